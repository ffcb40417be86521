# SPDX-License-Identifier: Apache-2.0
"""Load beyond the full model's capacity: adaptive choice beside fixed budgets and a fixed cascade.

    python benchmarks/adaptive_load.py --artefact build/nac --prepare   # needs the export extras
    python benchmarks/adaptive_load.py                                   # about 5 minutes
    python benchmarks/adaptive_load.py --seconds 20 --rounds 3 --picture docs/adaptive_load.png

Requests arrive at random (Poisson), whether earlier ones are answered or not, at 0.5, 1, 2, 4 and 8
times what budget 1 alone sustains, and at last at 0.5 times again. Every request has the objective
as its timeout. Five ways to answer take turns:

    budget 1        always the full model
    budget 0.125    always a small one
    the cheapest    always the smallest budget
    cascade         a certified policy, without adaptation
    adaptive        a repository written with --slo-ms; requests name nothing

`--prepare` writes what a run needs into the folder --work: two repositories, with and without
--slo-ms, and the 5,000 test canvases of digits-sum with their labels. A run itself imports neither
torch nor scikit-learn, so the folder may be copied to another machine.

The recovery is the time after the largest load since which the full model answers most requests of
every half second. The first and the last thing that is measured is the capacity, with callers that
wait for their answers. What the host took in each round is in the result. Writes
results/adaptive_load.json.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from poisson_load import OK, OTHER, REFUSED, Order, Sent, send
from result_file import BUILD, options_of, write_result

from saccade.core.machine import this_machine
from saccade.serving.bench.load import LoadGenerator, Stream
from saccade.serving.bench.load_requests import png_files, request
from saccade.serving.client.client import Client
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from open_load import quantiles, with_timeout

TIMES = (0.5, 1.0, 2.0, 4.0, 8.0, 0.5)
WARM_S, REST_S = 2.0, 2.0
CLIENTS, REQUESTS = 16, 500
GRACE_S = 10.0  # the server keeps the timeout; a call that is cut off costs the server more
WINDOW_S, LEAST_SEEN_S = 0.5, 2.0
LEAST_IN_TIME, LEAST_ACCURACY, LEAST_BEYOND = 0.95, 0.89, -0.005
MOST_P50, MOST_RECOVERY_S = 1.1, 5.0
QUIET = ServeOptions(grpc_port=0, http_port=0, metrics_port=0, ready_port=0)


@dataclass(frozen=True)
class Arm:
    """One way to answer: where its requests go, and what they name."""

    name: str
    url: str
    parameters: dict[str, str]
    outputs: tuple[str, ...] = ("logits", "variant")


def main() -> None:
    """Prepare the folder if it lacks something, then run every arm and write the result."""
    options = _options()
    if options.prepare or not (options.work / "canvases.npz").exists():
        prepare(options)
    if options.prepare:
        return
    files, labels = requests_of(options)
    # The server whose turn it is not does nothing.
    with (
        Server(options.work / "plain", QUIET) as plain,
        Server(options.work / "adaptive", QUIET) as adaptive,
    ):
        result = measure(plain, adaptive, files, labels, options)
    for name, met in result["aims"].items():
        print(f"{'met' if met['met'] else 'MISSED'}: {name}: {met['found']}")


def _options() -> argparse.Namespace:
    parser = options_of(__doc__, "adaptive_load", rounds=1, seconds=10.0)
    parser.add_argument("--artefact", type=Path, help="artefact folder; policies are used if there")
    parser.add_argument("--prepare", action="store_true", help="only write the folder --work")
    parser.add_argument("--work", type=Path, default=BUILD / "adaptive")
    parser.add_argument("--slo-ms", type=float, default=50.0)
    parser.add_argument("--images", type=int, default=4, help="images per request")
    parser.add_argument("--generators", type=int, default=2, help="processes that send requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=float, nargs="+", default=TIMES, help="of the capacity")
    parser.add_argument("--fixed", default="0.125", help="the small budget")
    parser.add_argument("--policy", help="of the cascade; default: the one nearest to risk 0.01")
    parser.add_argument("--picture", type=Path, help="also draw it over time, into this PNG file")
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> None:
    """Write the repositories and the canvases; this imports what an export needs."""
    from saccade.models.data.datasets import load_data
    from saccade.serving.repository.deploy import deploy
    from saccade.serving.repository.options import RepositoryOptions

    if options.artefact is None:
        raise SystemExit(f"{options.work} is not prepared. Pass --artefact FOLDER.")
    options.work.mkdir(parents=True, exist_ok=True)
    for name, slo_ms in (("plain", None), ("adaptive", options.slo_ms)):
        deploy(options.artefact, RepositoryOptions(options.work / name, slo_ms=slo_ms, force=True))
    data = load_data("digits-sum", "test")
    np.savez(options.work / "canvases.npz", images=data.images, labels=data.labels)
    print(f"{options.work}: prepared with {len(data.labels)} canvases")


def requests_of(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return the canvases as PNG files, one row per request, and their labels.

    Shapes: -> object [requests each], int64 [requests each].
    """
    with np.load(options.work / "canvases.npz") as file:
        images, labels = file["images"], file["labels"]
    count = min(REQUESTS, len(images) // options.images)
    shape = count, options.images
    rows = count * options.images
    return png_files(images[:rows]).reshape(shape), labels[:rows].reshape(shape)


def arms_of(
    plain: Server, adaptive: Server, smallest: str, options: argparse.Namespace
) -> list[Arm]:
    """Return the arms; without policies there is no cascade."""
    arms = [
        Arm(f"budget {budget}", plain.url, {"budget": budget})
        for budget in dict.fromkeys(("1", options.fixed, smallest))
    ]
    with Client(plain.url, plain.model) as client:
        policies = client.view().policies
    if policies:
        ending = [name for name in policies if name.endswith("-0.01")]
        name = options.policy or (ending or policies)[0]
        arms.append(Arm(f"cascade {name}", plain.url, {"policy": name}))
    return [*arms, Arm("adaptive", adaptive.url, {}, ("logits", "variant", "degraded"))]


def measure(
    plain: Server,
    adaptive: Server,
    files: np.ndarray,
    labels: np.ndarray,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure the capacities and every arm, and write what is known after each."""
    with Client(plain.url, plain.model) as client:
        view = client.view()
    smallest = view.budget(view.variants[-1])
    capacities = {name: [capacity(plain, files, name)] for name in ("1", options.fixed, smallest)}
    print(f"requests per second that are sustained: {capacities}", flush=True)
    phases = tuple((times * capacities["1"][0], options.seconds) for times in options.times)
    result: dict[str, Any] = {
        "benchmark": "load-adaptive choice beyond the full model's capacity",
        "model": plain.model,
        "cheapest": smallest,
        "images": options.images,
        "slo_ms": options.slo_ms,
        "seconds": options.seconds,
        "variants": list(view.variants),
        "policies": list(view.policies),
        "times": list(options.times),
        "capacity_per_s": capacities,
        "arms": {},
    }
    arms = arms_of(plain, adaptive, smallest, options)
    runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for turn in range(options.rounds):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            stolen = Stolen()
            sent = run(arm, files, plain.model, phases, options, seed=options.seed + 100 * turn)
            one = summary(sent, labels, view.variants, phases, options)
            runs[arm.name].append(one | {"stolen": stolen.share()})
            result["arms"] = runs
            print(lines(arm.name, runs[arm.name][-1]), flush=True)
            write_result(options.out, result)
            time.sleep(REST_S)
    for name, seen in capacities.items():
        seen.append(capacity(plain, files, name))
    result["aims"] = aims(runs, smallest, min(capacities[smallest]), options)
    write_result(options.out, result)
    if options.picture:
        draw(options.picture, result)
    return result


class Stolen:
    """What the host has taken from this machine's cores since this was made."""

    def __init__(self) -> None:
        self._begun_s, self._stolen_s = time.monotonic(), _stolen_s()

    def share(self) -> float:
        """Return the share of the cores' time."""
        elapsed_s = (time.monotonic() - self._begun_s) * this_machine().cores
        return (_stolen_s() - self._stolen_s) / elapsed_s


def _stolen_s() -> float:
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(words[8]) / os.sysconf("SC_CLK_TCK")


def capacity(server: Server, files: np.ndarray, budget: str, seconds: float = 4.0) -> float:
    """Measure requests per second of callers that wait for their answers."""
    messages = messages_of(files[:64], server.model, {"budget": budget}, ("logits", "variant"))
    stream = Stream("all", server.model, CLIENTS, messages)
    with LoadGenerator(server.url, server_pid=server.pid) as load:
        result = load.run([stream], seconds=seconds, warmup_s=1.0)
    return len(result.streams["all"].latencies_ms) / result.seconds


def messages_of(
    files: np.ndarray,
    model: str,
    parameters: dict[str, str],
    outputs: tuple[str, ...],
    timeout_s: float | None = None,
) -> tuple[bytes, ...]:
    """Return one serialized request per row of files."""
    from tritonclient.grpc import service_pb2

    made = [request(model, {"image": row[:, None]}, outputs, parameters) for row in files]
    if timeout_s is None:
        return tuple(made)
    read = service_pb2.ModelInferRequest.FromString
    return tuple(with_timeout(read(each), int(1e6 * timeout_s)) for each in made)


def run(
    arm: Arm,
    files: np.ndarray,
    model: str,
    phases: tuple[tuple[float, float], ...],
    options: argparse.Namespace,
    seed: int,
) -> Sent:
    """Send the whole load of one arm; the warm-up is at negative times."""
    slo_s = options.slo_ms / 1e3
    messages = messages_of(files, model, arm.parameters, arm.outputs, slo_s)
    warm = ((phases[0][0], WARM_S), *phases)
    return send(Order(arm.url, messages, warm, slo_s + GRACE_S, seed), options.generators)


def summary(
    sent: Sent,
    labels: np.ndarray,
    variants: Sequence[str],
    phases: tuple[tuple[float, float], ...],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return one arm's figures, phase by phase and over time."""
    right = sent.classes == labels[sent.message]
    edges = np.cumsum([0.0, *(seconds for _, seconds in phases)])

    def between(start_s: float, stop_s: float) -> dict[str, Any]:
        inside = (sent.planned_s >= start_s) & (sent.planned_s < stop_s)
        return figures(sent, right, inside, variants, options.slo_ms)

    loads = [
        {"times": times, "offered_per_s": phase[0], **between(start, stop)}
        for times, phase, start, stop in zip(
            options.times, phases, edges[:-1], edges[1:], strict=True
        )
    ]
    over_time = [between(second, second + 1) for second in np.arange(0.0, edges[-1], 1.0)]
    return {
        "loads": loads,
        "recovery_s": recovery_s(sent, edges[1:], options.slo_ms),
        "full_share": {
            "first phase": full_share(sent, options.slo_ms, 0.0, edges[1]),
            "half of the last": full_share(sent, options.slo_ms, edges[-2:].mean(), edges[-1]),
        },
        "lag_ms": quantiles(sent.lag_ms.tolist()),
        "first_refusals": sent.refusals,
        "over_time": {
            name: [one[name] for one in over_time]
            for name in ("sent", "in_time", "refused", "accuracy", "degraded", "share")
        },
    }


def figures(
    sent: Sent, right: np.ndarray, inside: np.ndarray, variants: Sequence[str], slo_ms: float
) -> dict[str, Any]:
    """Return how the requests of some time were answered."""
    answered = inside & (sent.status == OK)
    named = Counter(sent.variants[answered].ravel().tolist())
    rows = max(1, sum(named.values()))
    return {
        "sent": int(inside.sum()),
        "in_time": int((answered & (sent.ms <= slo_ms)).sum()),
        "late": int((answered & (sent.ms > slo_ms)).sum()),
        "refused": int((inside & (sent.status == REFUSED)).sum()),
        "failed": int((inside & (sent.status == OTHER)).sum()),
        "accuracy": float(right[answered].mean()) if answered.any() else None,
        "degraded": float(sent.degraded[answered].mean()) if answered.any() else None,
        "answered_ms": quantiles(sent.ms[answered].tolist()),
        "refused_ms": quantiles(sent.ms[inside & (sent.status == REFUSED)].tolist()),
        "share": {name: named[name] / rows for name in variants},
    }


def recovery_s(sent: Sent, edges: np.ndarray, slo_ms: float) -> float | None:
    """Return when, after the load fell, the full model answers again, and keeps answering.

    In each window since then, most requests are answered in time and not degraded; bursts of such a
    load also have degraded answers. None: not by the end, whose last LEAST_SEEN_S are too short to
    tell.
    """
    fell_s, end_s = edges[-2:]
    starts = np.arange(fell_s, end_s, WINDOW_S)
    shares = [full_share(sent, slo_ms, start, start + WINDOW_S) for start in starts]
    low = [at for at, share in enumerate(shares) if share <= 0.5]
    recovered = float(WINDOW_S * (low[-1] + 1)) if low else 0.0
    return recovered if recovered <= end_s - fell_s - LEAST_SEEN_S else None


def full_share(sent: Sent, slo_ms: float, start_s: float, stop_s: float) -> float:
    """Return the share of a time's requests that the best candidate answers in time."""
    inside = (sent.planned_s >= start_s) & (sent.planned_s < stop_s)
    good = (sent.status == OK) & (sent.ms <= slo_ms) & ~sent.degraded.any(axis=1)
    return float(good[inside].mean()) if inside.any() else 1.0


def aims(
    runs: dict[str, list[dict[str, Any]]],
    smallest: str,
    sustained_per_s: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return what was aimed for, and what was found; the worst round counts.

    What the cheapest variant could carry is what it answered in time in the same round: at the same
    load, or the most at any load, which is more. Callers that wait sustain still more, because
    their answers may take longer.
    """
    times = max(options.times)
    largest = list(options.times).index(times)

    def of(arm: str, key: str, load: int) -> np.ndarray:
        return np.array([one["loads"][load][key] or 0.0 for one in runs[arm]])

    def p50(arm: str) -> np.ndarray:
        return np.array([one["loads"][0]["answered_ms"]["p50"] for one in runs[arm]])

    cheapest, in_time = f"budget {smallest}", of("adaptive", "in_time", largest)
    most = np.max([of(cheapest, "in_time", load) for load in range(len(options.times))], axis=0)
    sustained = np.minimum(of("adaptive", "sent", largest), sustained_per_s * options.seconds)
    beyond = of("adaptive", "accuracy", 0) - of("budget 1", "accuracy", 0)
    recovered = [one["recovery_s"] for one in runs["adaptive"]]
    at = f"at {times:g} times: "
    least = {
        f"{at}answered in time, of those that the cheapest answers in time": (
            in_time / of(cheapest, "in_time", largest), LEAST_IN_TIME,
        ),
        f"{at}answered in time, of the most that the cheapest does at any load": (
            in_time / most, LEAST_IN_TIME,
        ),
        f"{at}answered in time, of what callers that wait sustain": (
            in_time / sustained, LEAST_IN_TIME,
        ),
        f"{at}accuracy": (of("adaptive", "accuracy", largest), LEAST_ACCURACY),
        "at half load: accuracy beyond that of budget 1": (beyond, LEAST_BEYOND),
    }  # fmt: skip
    slower = p50("adaptive") / p50("budget 1")
    return {
        **{
            name: {"found": found.tolist(), "met": bool(found.min() >= bound)}
            for name, (found, bound) in least.items()
        },
        "at half load: median time over that of budget 1": {
            "found": slower.tolist(), "met": bool(slower.max() <= MOST_P50),
        },
        "recovery in seconds": {
            "found": recovered,
            "met": all(one is not None and one <= MOST_RECOVERY_S for one in recovered),
        },
    }  # fmt: skip


def lines(name: str, one: dict[str, Any]) -> str:
    """Return the table of one run."""
    rows = [f"{name}: recovered after {one['recovery_s']} s, lag {one['lag_ms']}"]
    for load in one["loads"]:
        ms = load["answered_ms"] or {"p50": 0.0, "p99": 0.0}
        counts = ", ".join(f"{key} {load[key]}" for key in ("in_time", "late", "refused", "failed"))
        rows.append(
            f"  {load['times']:4g} x {load['offered_per_s']:6.0f}/s: {counts}, accuracy "
            f"{100 * (load['accuracy'] or 0):.1f} %, p50 {ms['p50']:.1f} ms, p99 {ms['p99']:.1f} "
            f"ms, degraded {100 * (load['degraded'] or 0):.0f} %"
        )
    return "\n".join(rows)


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw the first round over time: what was answered in time, and by which variant."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, figsize=(10, 8), sharex=True, layout="constrained"
    )
    for name, rounds in result["arms"].items():
        over = rounds[0]["over_time"]
        seconds = np.arange(len(over["sent"]))
        top.plot(seconds, over["in_time"], label=name, linewidth=2 if name == "adaptive" else 1)
        accuracy = [np.nan if one is None else 100 * one for one in over["accuracy"]]
        middle.plot(seconds, accuracy, label=name, linewidth=2 if name == "adaptive" else 1)
    over = result["arms"]["adaptive"][0]["over_time"]
    top.plot(seconds, over["sent"], "k:", label="offered")
    shares = np.array([[100 * one[name] for one in over["share"]] for name in result["variants"]])
    bottom.stackplot(seconds, shares, labels=result["variants"])
    top.set(ylabel=f"requests per second\nanswered within {result['slo_ms']:g} ms")
    middle.set(ylabel="accuracy of the answers (%)")
    bottom.set(ylabel="adaptive: answers by variant (%)", xlabel="seconds", ylim=(0, 100))
    for axes in (top, middle, bottom):
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
