# SPDX-License-Identifier: Apache-2.0
"""Bursts: is the load-adaptive choice in time, and how accurate is it, beside fixed budgets?

    python benchmarks/bursts.py                        # sleeping variants, about 25 minutes
    python benchmarks/bursts.py --arrivals gamma:0.7,4 --rounds 1 --seconds 20
    python benchmarks/bursts.py --router FOLDER        # beside another router's files

Dummies take the places of four variants. Each call sleeps for a stated time, during which the one
device that all share is theirs, as with a GPU. Their scores are stated, too. A RATE is
in multiples of what the largest budget can do in full batches. Ways to answer take turns, with the
same arrivals: each budget, of which the smallest is always the cheapest way, and the adaptive
choice. The server and its variants have the first half of the cores, callers the others.

Writes results/bursts.json. Intervals are Student's, over rounds with different seeds.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from result_file import interval, options_of, write_result
from served_models import QUIET, digits_folder, put_dummy

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.serving.bench.replay.options import ReplayOptions
from saccade.serving.bench.replay.replay import replay
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.server import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny_artefacts import rehash

BATCH, SLO_MS = 8, 100.0
# By budget: the fixed part of a call and that of each image in seconds, and a score.
VARIANTS = {
    1.0: (0.006, 0.003, 0.80),
    0.5: (0.004, 0.0015, 0.78),
    0.25: (0.003, 0.00075, 0.75),
    0.125: (0.0025, 0.0004, 0.70),
}
CAPACITY = BATCH / (VARIANTS[1.0][0] + BATCH * VARIANTS[1.0][1])
ARRIVALS = (
    *("poisson:0.7", "gamma:0.7,2", "gamma:0.7,4", "gamma:0.7,8"),
    *("step:0.4,2", "step:0.4,4", "step:0.4,8", "step:0.4,10"),
)
FIXED_IN = ("gamma:0.7,4",)  # elsewhere, only the cheapest of the fixed budgets takes part
AIM_IN_TIME, AIM_RECOVERY_S = 0.99, 0.5
_MODEL = """
import fcntl, time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        rows = [len(pb.get_input_tensor_by_name(one, "image").as_numpy()) for one in requests]
        with open({device!r}, "w") as device:
            fcntl.flock(device, fcntl.LOCK_EX)
            time.sleep({fixed} + {each} * sum(rows))
        return [
            pb.InferenceResponse([
                pb.Tensor(name, np.full((count, 10), 0.1, np.float32))
                for name in one.requested_output_names()
            ])
            for one, count in zip(requests, rows)
        ]
"""


@contextmanager
def served(router: Path | None, stretch: float) -> Iterator[tuple[Server, dict[str, float]]]:
    """Serve the dummies on the first half of the cores; yields the server and the scores."""
    folder = digits_folder("nac-four", tuple(VARIANTS))
    cores = sorted(os.sched_getaffinity(0))
    half, scores = max(1, len(cores) // 2), {}
    with tempfile.TemporaryDirectory() as place:
        repository = Path(place) / "repository"
        deploy(folder, RepositoryOptions(repository, slo_ms=stretch * SLO_MS, run_batch=BATCH))
        for manifest in ArtefactFolder(folder).manifests:
            variant = manifest.variant
            fixed, each, scores[variant.name] = VARIANTS[variant.budget]
            times = {"fixed": stretch * fixed, "each": stretch * each}
            code = _MODEL.format(device=f"{place}/device", **times)
            put_dummy(repository / variant.name, code)
        if router:
            (version,) = repository.glob("*/*/routes.json")
            for file in router.glob("*.py"):
                shutil.copy(file, version.parent)
        rehash(repository)
        os.sched_setaffinity(0, cores[:half])
        try:
            with Server(repository, QUIET) as server:
                os.sched_setaffinity(0, cores[half:] or cores)
                yield server, scores
        finally:
            os.sched_setaffinity(0, cores)


def run(
    server: Server, scores: dict[str, float], arrivals: str, budget: float | None, seed: int,
    seconds: float, stretch: float,
) -> dict[str, Any]:  # fmt: skip
    """Replay generated arrivals; returns the figures of all phases together, and of each."""
    kind, _, numbers = arrivals.partition(":")
    rate, *more = numbers.split(",")
    form = f"{kind}:{','.join([f'{float(rate) * CAPACITY / stretch:.6g}', *more])}"
    options = ReplayOptions(
        server.model, server.url, deadline_ms=stretch * SLO_MS, arrivals=form, seconds=seconds,
        budget=budget, seed=seed,
    )  # fmt: skip
    found = replay(None, options, scores=scores)
    sent = sum(phase["sent"] for phase in found.phases)
    in_time = [phase["in_time"] * phase["sent"] for phase in found.phases]
    scored = [count * (p["score"] or 0.0) for count, p in zip(in_time, found.phases, strict=True)]
    return {
        "in_time": sum(in_time) / sent,
        "score": sum(scored) / max(1e-9, sum(in_time)),
        "by_score": sum(scored) / sent,
        "recovery_s": found.recovery_s,
        "behind": found.behind,
        "lag_p99_ms": found.sender["lag_p99_ms"],
        "phases": found.phases,
    }


def arms_of(arrivals: str, routers: Sequence[str]) -> list[tuple[str, float | None]]:
    """Return the ways to answer, each a router and a budget."""
    budgets = VARIANTS if arrivals in FIXED_IN else (min(VARIANTS),)
    return [*((name, None) for name in routers), *(("this", budget) for budget in budgets)]


def measured(options: argparse.Namespace) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Measure every way to answer, in turn, with the same arrivals."""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    routers = {"this": None, **({"other": options.router} if options.router else {})}
    for arrivals in options.arrivals:
        arms = results.setdefault(arrivals, {})
        for seed in range(options.rounds):
            for router, path in routers.items():
                stretch = options.stretch
                with served(path, stretch) as (server, scores):
                    run(server, scores, "poisson:0.3", None, 99, 3.0 * stretch, stretch)  # warms up
                    for name, budget in arms_of(arrivals, list(routers)):
                        if name != router:
                            continue
                        arm = f"budget {budget:g}" if budget else f"adaptive, {router} router"
                        how = arrivals, budget, seed, options.seconds * stretch, stretch
                        one = run(server, scores, *how)
                        arms.setdefault(arm, []).append(one)
                        print(
                            f"{arrivals} {arm}: {100 * one['in_time']:.2f} % in time, score "
                            f"{one['score']:.4f}, {one['recovery_s']}, lag "
                            f"{one['lag_p99_ms']:.1f} ms",
                            flush=True,
                        )
    return results


def mean_of(runs: Sequence[dict[str, Any]], key: str) -> dict[str, float | None]:
    """Return a mean over rounds with its interval; runs whose sender fell behind do not count."""
    values = [one[key] for one in runs if not one["behind"]]
    mean = float(np.mean(values)) if values else None
    if len(values) < 2:
        return {"mean": mean, "rounds": len(values)}
    low, high = interval(values)
    return {"mean": mean, "low": low, "high": high, "rounds": len(values)}


def aims_of(summary: dict[str, Any], results: dict[str, Any], stretch: float) -> dict[str, Any]:
    """Return what was aimed for, and what was found."""
    aims: dict[str, Any] = {}
    arms = summary.get("gamma:0.7,4")
    own = arms["adaptive, this router"] if arms else None
    if arms and own and own["in_time"]["mean"] is not None:
        fixed = {name: arm for name, arm in arms.items() if name.startswith("budget")}
        kept = {n: a for n, a in fixed.items() if (a["in_time"]["mean"] or 0) >= AIM_IN_TIME}
        best = max((arm["score"]["mean"] for arm in kept.values()), default=0.0)
        aims["in time"] = {"found": own["in_time"], "met": own["in_time"]["mean"] >= AIM_IN_TIME}
        aims["score above each fixed budget in time"] = {
            "found": own["score"], "best fixed": best, "met": own["score"]["mean"] > best,
        }  # fmt: skip
    if arms := results.get("step:0.4,8"):
        found = [one["recovery_s"]["99 % in time"] for one in arms["adaptive, this router"]]
        met = all(one is not None and one < AIM_RECOVERY_S * stretch for one in found)
        aims["recovery in seconds"] = {"found": found, "met": met}
    return aims


def main() -> None:
    parser = options_of(__doc__, "bursts", rounds=3, seconds=30.0)
    parser.add_argument("--arrivals", nargs="+", default=ARRIVALS)
    parser.add_argument("--router", type=Path, help="folder of another router to compare with")
    parser.add_argument(
        "--stretch", type=float, default=1.0,
        help="times by which all times are longer, for a machine that does other work too",
    )  # fmt: skip
    options = parser.parse_args()
    results = measured(options)
    keys = ("in_time", "score", "by_score")
    summary = {
        arrivals: {arm: {key: mean_of(runs, key) for key in keys} for arm, runs in arms.items()}
        for arrivals, arms in results.items()
    }
    cores = sorted(os.sched_getaffinity(0))
    content = {
        "benchmark": "bursts, answered by fixed budgets and by the load-adaptive choice",
        "cores": {"server": cores[: max(1, len(cores) // 2)], "callers": cores[len(cores) // 2 :]},
        "slo_ms": SLO_MS,
        "stretch": options.stretch,
        "batch": BATCH,
        "variants": {f"{budget:g}": list(figures) for budget, figures in VARIANTS.items()},
        "capacity_per_s": CAPACITY,
        "seconds": options.seconds,
        "summary": summary,
        "aims": aims_of(summary, results, options.stretch),
        "runs": results,
    }
    write_result(options.out, content)
    for name, aim in content["aims"].items():
        print(f"{'met' if aim['met'] else 'MISSED'}: {name}: {aim}")


if __name__ == "__main__":
    main()
