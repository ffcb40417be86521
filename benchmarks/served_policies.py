# SPDX-License-Identifier: Apache-2.0
"""Measure policies through the server: throughput, CPU time and answers, beside fixed budgets.

    python benchmarks/served_policies.py --artefact FOLDER --data HELD_OUT.npz
    python benchmarks/served_policies.py --repository REPOSITORY --data HELD_OUT.npz

The second form needs no torch. `HELD_OUT.npz` has `images` and `labels` on which nothing was chosen
(digits_halves.py). Prepare with a checkpoint:

    python benchmarks/digits_halves.py --out halves
    saccade export CHECKPOINT --out folder --name nac --budget 1,0.75,0.5,0.25,0.125,0.0625,0.015625
    saccade bench folder --out report --no-server
    saccade calibrate folder --data halves/calibration.npz --split all --risk 0.005,0.01,0.02,0.05
    saccade calibrate folder --data halves/calibration.npz --split all --steps 1 --risk 0.4 \\
        --name one-step
    saccade repository folder --out repository

Clients in a separate process send PNG files and wait for their answers. A round measures each
budget and each policy once, and every second round in reverse, so only ratios within a round are
compared. A policy of one step is compared with the same variant named by its budget: what the
policy itself costs. Answers are those of one pass over all images. Writes
benchmarks/results/served_policies.json.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from result_file import write_result

from saccade.core.archives import read_arrays
from saccade.core.machine import this_machine
from saccade.models.scores.intervals import bootstrap, paired_bootstrap
from saccade.serving.bench.load import LoadGenerator, LoadResult, Stream, refuse_errors
from saccade.serving.bench.load_requests import ask, png_files, request
from saccade.serving.client.answers import BY_POLICY
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.policies import policies_of
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

HERE = Path(__file__).parent
LEAST_TIMES, MOST_OVERHEAD = 5.0, 0.05
ASKED = ("probabilities", "variant")  # as `Client.classify` does
AT_ONCE, WARM_UP_S = 8, 0.3
MOST_CLIENTS = 128  # a lane of the router refuses more than 256 waiting requests
QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)


@dataclass(frozen=True)
class Arm:
    """One way to choose who answers: a variant by its budget, or a policy."""

    name: str
    parameters: dict[str, str]
    chain: tuple[str, ...]  # the variants that may answer, in the order in which they run

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that `Client.classify` requests."""
        return (*ASKED, *BY_POLICY) if "policy" in self.parameters else ASKED


@dataclass(frozen=True)
class Repository:
    """A repository that is served: its router, its variants and policies as arms."""

    model: str
    arms: tuple[Arm, ...]
    full: str  # name of the arm of the full model
    same: dict[str, str]  # policies of one step -> the budget of the same variant


def repository_of(folder: Path, kept: Sequence[float] = ()) -> Repository:
    """Read the arms of a repository: policies, and budgets from the largest.

    With `kept`, budgets other than these are left out, unless policies are compared with them.
    """
    model = read_repository(folder).model
    routes = json.loads((folder / model / "1" / "routes.json").read_bytes())
    routes["variants"].sort(key=lambda route: -route["budget"])
    budgets = {
        route["name"]: Arm(
            f"budget {route['budget']:g}", {"budget": route["setting"]}, (route["name"],)
        )
        for route in routes["variants"]
    }
    policies = sorted(policies_of(routes), key=lambda policy: policy.risk)
    chains = {policy.name: _arm(policy) for policy in policies}
    same = {arm.name: budgets[arm.chain[0]].name for arm in chains.values() if len(arm.chain) == 1}
    # Next to each other, so that both find the machine in the same state.
    alone = [chains[name] for name in chains if len(chains[name].chain) == 1]
    longer = [chains[name] for name in chains if len(chains[name].chain) > 1]
    arms = [*longer]
    for arm in budgets.values():
        arms += [arm, *(one for one in alone if one.chain == arm.chain)]
    full = policies[0].full if policies else routes["variants"][0]["name"]
    named = {f"budget {budget:g}" for budget in kept} | {budgets[full].name, *same.values()}
    arms = [arm for arm in arms if not kept or "policy" in arm.parameters or arm.name in named]
    return Repository(model, tuple(arms), budgets[full].name, same)


def _arm(policy: Any) -> Arm:
    chain = tuple(step.variant for step in policy.steps)
    return Arm(f"policy {policy.name}", {"policy": policy.name}, chain)


def messages(model: str, arm: Arm, images: np.ndarray, size: int) -> tuple[bytes, ...]:
    """Return serialized requests that together contain every image once, `size` in each."""
    files = png_files(images)
    return tuple(
        request(model, {"image": files[at : at + size]}, arm.outputs, arm.parameters)
        for at in range(0, len(files) - size + 1, size)
    )


def answers(url: str, asked: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Return the class of each image, the variant that answered it, and after how many steps."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda message: ask(url, message), asked))
    classes = np.concatenate([np.asarray(one["probabilities"]).argmax(-1) for one in found])
    variants = [name.decode().rstrip("\0") for one in found for name in one["variant"]]
    steps = [np.ravel(one["steps"]) for one in found if "steps" in one]
    certified = [np.ravel(one["certified"]) for one in found if "certified" in one]
    return {
        "classes": classes,
        "variants": np.array(variants),
        "steps": np.concatenate(steps) if steps else np.ones(len(classes), int),
        "certified": np.concatenate(certified) if certified else np.ones(len(classes), bool),
    }


def described(arm: Arm, own: dict[str, Any], full: dict[str, Any], labels: np.ndarray) -> Any:
    """Return what an arm answered, compared with the full model's answers and with the labels."""
    labels = labels[: len(own["classes"])]
    right, full_right = ((one["classes"] == labels).astype(np.float64) for one in (own, full))
    assert set(own["variants"]) <= set(arm.chain), f"{arm.name}: answered by another variant"
    assert own["certified"].all(), f"{arm.name}: an answer is not certified"
    return {
        "chain": list(arm.chain),
        "images": len(labels),
        "shares_by_step": [
            float((own["steps"] == step + 1).mean()) for step in range(len(arm.chain))
        ],
        "agreement": float((own["classes"] == full["classes"]).mean()),
        "accuracy": float(right.mean()),
        "accuracy_minus_full": list(paired_bootstrap(right, full_right, 0)),
    }


def measured_round(
    load: LoadGenerator,
    streams: dict[str, Stream],
    chains: dict[str, Any],
    turn: int,
    window: float,
) -> dict[str, Any]:
    """Put each arm's load on the server once; every second round in reverse."""
    figures: dict[str, Any] = {}
    for name in list(streams)[:: -1 if turn % 2 else 1]:
        stream = streams[name]
        result = refuse_errors(load.run([stream], seconds=window, warmup_s=WARM_UP_S), load.url)
        figures[name] = _figures(result, stream, chains[name])
    return {"load_average": os.getloadavg()[0], "arms": figures}


def _figures(result: LoadResult, stream: Stream, chain: Sequence[str]) -> dict[str, Any]:
    latencies = result.streams[stream.name].latencies_ms
    images = len(latencies) * stream.images
    server = sum(result.server_cpu_s.values())
    ran = {name: result.statistics.get(name, {}).get("inferences", 0) for name in chain}
    return {
        "images_per_second": images / result.seconds,
        "server_core_ms_per_image": 1e3 * server / images,
        "cores_of_server": server / result.seconds,
        "cores_of_clients": result.client_cpu_s / result.seconds,
        "p50_ms": float(np.percentile(latencies, 50)),
        "p99_ms": float(np.percentile(latencies, 99)),
        # Images in flight at the two ends of the window make these shares inexact.
        "share_run_by_step": [count / images for count in ran.values()],
        "images_per_call": [
            _mean_batch(result.statistics.get(name, {}).get("batches", {})) for name in chain
        ],
    }


def _mean_batch(batches: dict[str, int]) -> float:
    calls = sum(batches.values())
    return sum(int(size) * count for size, count in batches.items()) / calls if calls else 0.0


def times(rounds: Sequence[Any], fast: str, slow: str, key: str = "images_per_second") -> Any:
    """Return how many times as much, with its interval over the rounds."""
    pairs = [(one["arms"][fast][key], one["arms"][slow][key]) for one in rounds]
    logs = np.log([own / other for own, other in pairs])
    low, high = bootstrap(logs) if len(logs) > 1 else (-np.inf, np.inf)
    return {
        "times": float(np.exp(logs.mean())),
        "interval": [float(np.exp(low)), float(np.exp(high))],
    }


def summary(rounds: Sequence[Any], served: Repository) -> dict[str, Any]:
    """Return the median of each figure, and the ratios over the full model."""
    arms = {}
    for arm in served.arms:
        own = [one["arms"][arm.name] for one in rounds]
        numbers = {
            key: statistics.median(each[key] for each in own)
            for key, value in own[0].items()
            if isinstance(value, float)
        }
        arms[arm.name] = {
            **numbers,
            "share_run_by_step": own[-1]["share_run_by_step"],
            "images_per_call": own[-1]["images_per_call"],
            "times_full": times(rounds, arm.name, served.full),
            "core_time_over_full": times(rounds, arm.name, served.full, "server_core_ms_per_image"),
        }
    overheads = {}
    for policy, budget in served.same.items():
        ratio = times(rounds, policy, budget)
        low, high = ratio["interval"]
        overheads[policy] = {
            "of": budget,
            "throughput_lost": 1 - ratio["times"],
            "interval": [1 - high, 1 - low],
            "core_time": times(rounds, policy, budget, "server_core_ms_per_image"),
        }
    return {"arms": arms, "one_step_overhead": overheads, "rounds": list(rounds)}


def targets(case: dict[str, Any], answered: dict[str, Any], served: Repository) -> dict[str, Any]:
    """Return the two targets with what was found."""
    chains = {
        name: case["arms"][name]["times_full"]["times"]
        for name in case["arms"]
        if name.startswith("policy") and answered[name]["accuracy_minus_full"][1] >= 0
    }
    best = max(chains, key=lambda name: chains[name], default="")
    kept = [1 - one["throughput_lost"] for one in case["one_step_overhead"].values()]
    lost = 1 - statistics.geometric_mean(kept) if kept else None
    return {
        f"a policy of no lower accuracy, over budget 1, at least {LEAST_TIMES:g} times": {
            "policy": best, "found": chains.get(best), "met": chains.get(best, 0) >= LEAST_TIMES,
        },
        f"throughput lost to a policy of one step, at most {MOST_OVERHEAD:g}": {
            "found": lost, "met": lost is not None and lost <= MOST_OVERHEAD,
        },
    }  # fmt: skip


def print_table(size: int, case: dict[str, Any], answered: dict[str, Any]) -> None:
    print(f"\n{size} image{'s' * (size > 1)} per request")
    print(f"{'':24} images/s  times full [interval]   core ms  agreement accuracy  by step")
    for name, one in case["arms"].items():
        low, high = one["times_full"]["interval"]
        told = answered[name]
        shares = " ".join(f"{share:.2f}" for share in told["shares_by_step"])
        print(
            f"{name:24}{one['images_per_second']:9.0f}  {one['times_full']['times']:6.2f} "
            f"[{low:.2f}, {high:.2f}]{one['server_core_ms_per_image']:12.3f}"
            f"{told['agreement']:11.4f}{told['accuracy']:9.4f}  {shares}"
        )
    for name, lost in case["one_step_overhead"].items():
        low, high = (100 * each for each in lost["interval"])
        print(
            f"{name} loses {100 * lost['throughput_lost']:.1f} % [{low:.1f}, {high:.1f}] of the "
            f"throughput of {lost['of']}"
        )


def main() -> None:
    options = _options()
    arrays = read_arrays(options.data, ("images", "labels"))
    images, labels = arrays["images"], arrays["labels"]
    with ExitStack() as stack:
        place = options.repository
        if place is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "repository"
            deploy(options.artefact, RepositoryOptions(out=place))
        served = repository_of(place, options.budgets)
        server = stack.enter_context(Server(place, QUIET))
        load = stack.enter_context(LoadGenerator(server.url, server_pid=server.pid))
        passes = {
            arm.name: answers(server.url, messages(served.model, arm, images, AT_ONCE))
            for arm in served.arms
        }
        answered = {
            arm.name: described(arm, passes[arm.name], passes[served.full], labels)
            for arm in served.arms
        }
        cases = {}
        for size in options.images:
            streams = {
                arm.name: Stream(
                    arm.name,
                    served.model,
                    max(1, min(MOST_CLIENTS, options.in_flight // size)),
                    messages(served.model, arm, images, size),
                    size,
                )
                for arm in served.arms
            }
            chains = {arm.name: arm.chain for arm in served.arms}
            rounds = []
            for turn in range(options.rounds):
                rounds.append(measured_round(load, streams, chains, turn, options.seconds))
                print(f"{size} per request, round {turn + 1}", flush=True)
            cases[str(size)] = summary(rounds, served)
    result = {
        "benchmark": "policies beside fixed budgets, through the router",
        "machine": this_machine().to_dict(),
        "data": options.data.name,
        "seconds": options.seconds,
        "images_in_flight": options.in_flight,
        "answers": answered,
        "images_per_request": cases,
        "targets": {size: targets(case, answered, served) for size, case in cases.items()},
    }
    write_result(options.out, result)
    for size, case in cases.items():
        print_table(int(size), case, answered)
        for text, target in result["targets"][size].items():
            print(f"{text}: {target['found']}, {'met' if target['met'] else 'MISSED'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--artefact", type=Path, help="folder with policies; it is deployed first")
    source.add_argument("--repository", type=Path, help="a repository with policies")
    parser.add_argument("--data", type=Path, required=True, help=".npz with images and labels")
    parser.add_argument("--images", type=int, nargs="+", default=[64, 1], help="per request")
    parser.add_argument("--budgets", type=float, nargs="+", default=[], help="default: all")
    parser.add_argument("--in-flight", type=int, default=512, help="images of all clients together")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each window")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "served_policies.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
