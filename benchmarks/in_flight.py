# SPDX-License-Identifier: Apache-2.0
"""Measure how much of a large machine the router can carry, with variants that sleep.

    python benchmarks/in_flight.py [--instances 16 64] [--slower 4] [--folder ARTEFACTS]
    python benchmarks/in_flight.py --routers 1 2 4 [--core-share 0.25]

A dummy takes the place of each variant: it sleeps for a stated time per image, as a process does
that waits for a GPU or for cores that this machine lacks. Callers that wait for their answers give
the throughput, beside the ideal of as many instances. Then requests arrive at random (Poisson) at
0.7 of the ideal, and the times of their answers are compared with those of a simulated queue for as
many instances, without a router. Then all requests follow a policy whose three steps all run, and
last two variants are called at the same time. With --folder, the largest variant of a real model
with as many instances as cores is called through the router and past it, in turn. With --routers,
each process of the router may use only a share of a core, by a group of the kernel (as root), as if
the machine was faster in all else: how much do several carry? Writes results/in_flight.json.
"""

import heapq
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from result_file import RESULTS, options_of, spread, write_result
from served_models import QUIET, digits_folder, put_dummy, random_images, under_load

from saccade.core.machine import cores
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.model_repository.router.routes import PolicyRoute, StepRoute
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import (
    encoded_request,
    png_files,
    request,
    tensor_request,
)
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.process import stubs_in
from saccade.serving.server.server import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from open_load import Arrivals, OpenLoad
from tiny_artefacts import rehash

FOLDER, BUDGETS = "nac-three", (1.0, 0.5, 0.125)
SLEEP_S = {1.0: 0.05, 0.5: 0.02, 0.125: 0.01}
BESIDE = (1.0, 0.125)  # of the budgets, those that are called at the same time
POLICY = "three-steps"
LOAD, SHARE, TIMES = 0.7, 0.95, 1.5  # of the ideal; the aims
QUEUED = 100_000  # simulated arrivals
CPU_GROUPS, PERIOD_US = Path("/sys/fs/cgroup/cpu"), 20_000
_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for one in requests:
            rows = len(pb.get_input_tensor_by_name(one, "image").as_numpy())
            time.sleep({seconds} * rows)
            answers.append(pb.InferenceResponse([
                pb.Tensor(name, np.full((rows, {classes}), 0.1, np.float32))  # never confident
                for name in one.requested_output_names()
            ]))
        return answers
"""


@contextmanager
def sleeping(
    instances: int, slower: float, routers: int = 1
) -> Iterator[tuple[str, LoadGenerator, Server]]:
    """Serve dummies of both variants; yields the router's name, the load and the server."""
    folder = digits_folder(FOLDER, BUDGETS)
    with tempfile.TemporaryDirectory() as place:
        repository = Path(place) / "repository"
        options = RepositoryOptions(
            repository, instance_count=instances, routers=routers, run_batch=1
        )
        deploy(folder, options)
        for budget, manifest in zip(BUDGETS, ArtefactFolder(folder).manifests, strict=True):
            code = _MODEL.format(seconds=slower * SLEEP_S[budget], classes=10)
            put_dummy(repository / manifest.variant.name, code)
        add_policy(repository / ArtefactFolder(folder).model / "1" / "routes.json")
        rehash(repository)
        with (
            Server(repository, QUIET) as server,
            LoadGenerator(server.url, server_pid=server.pid) as load,
        ):
            yield ArtefactFolder(folder).model, load, server


def add_policy(path: Path) -> None:
    """Add a policy whose chain has all variants to the routes."""
    routes = json.loads(path.read_text())
    variants = sorted(routes["variants"], key=lambda variant: variant["budget"])
    steps = [
        StepRoute(variant["name"], variant["sha256"], 0.9, 1.0, end_share=0.0)
        for variant in variants[:-1]
    ]
    full = variants[-1]["name"]
    last = StepRoute(full, variants[-1]["sha256"], None, 1.0, end_share=1.0)
    policy = PolicyRoute(
        POLICY, "full", 0.95, 0.01, 0.01, "top1", full, sum(SLEEP_S.values()), (*steps, last)
    )
    routes["policies"] = [asdict(policy)]
    path.write_text(json.dumps(routes))


def waited(arrivals_s: np.ndarray, instances: int, service_s: float) -> np.ndarray:
    """Return the seconds until each answer if nothing but the instances takes time, in order."""
    free, answers = [0.0] * instances, []
    for arrival in np.sort(arrivals_s):
        begun = max(arrival, heapq.heappop(free))
        heapq.heappush(free, begun + service_s)
        answers.append(begun + service_s - arrival)
    return np.array(answers)


def measured(instances: int, seconds: float, slower: float) -> dict[str, Any]:
    """Measure the dummies of one number of instances."""
    images = random_images(digits_folder(FOLDER, BUDGETS), 32)
    with sleeping(instances, slower) as (name, load, _):
        requests = {
            budget: tuple(encoded_request(name, one[None], budget) for one in images)
            for budget in BUDGETS
        }
        ideal = {budget: instances / slower / sleep for budget, sleep in SLEEP_S.items()}
        alone = Stream("alone", name, 2 * instances, requests[1.0])
        found = refuse_errors(load.run([alone], seconds=seconds, warmup_s=1.0), load.url)
        result: dict[str, Any] = {
            "instances": instances,
            "requests_per_second": found.rate,
            "share_of_ideal": found.rate / ideal[1.0],
            "server_cores": sum(found.server_cpu_s.values()) / found.seconds,
        }
        rate = LOAD * ideal[1.0]
        with OpenLoad(load.url) as open_load:
            sent = open_load.run(Arrivals(requests[1.0], rate, 2 * seconds, 30.0))
        refused = {status: len(times) for status, times in sent.failed_ms.items()}
        assert not refused, f"{refused}: {sent.first_errors}"
        gaps_s = np.random.default_rng(0).exponential(1 / rate, QUEUED)
        queued = 1e3 * waited(gaps_s.cumsum(), instances, slower * SLEEP_S[1.0])
        result["at_load"] = {
            "load": LOAD,
            "p50_ms": float(np.percentile(sent.answered_ms, 50)),
            "p99_ms": float(np.percentile(sent.answered_ms, 99)),
            "p99_of_the_queue_ms": float(np.percentile(queued, 99)),
            "generator_lag_p99_ms": float(np.percentile(sent.lag_ms, 99)),
        }
        result["times_the_queue"] = (
            result["at_load"]["p99_ms"] / result["at_load"]["p99_of_the_queue_ms"]
        )
        files = {"image": png_files(images[:1])}
        chain = (request(name, files, ("probabilities",), {"policy": POLICY}),)
        # Enough callers for the last step, from which each request is away for the others.
        callers = round(2 * instances * sum(SLEEP_S.values()) / SLEEP_S[1.0])
        three = Stream("policy", name, callers, chain)
        found = refuse_errors(load.run([three], seconds=seconds, warmup_s=1.0), load.url)
        result["policy"] = {
            "share_of_ideal": found.rate / ideal[1.0],
            "server_cores": sum(found.server_cpu_s.values()) / found.seconds,
            "p99_ms": float(np.percentile(found.only.latencies_ms, 99)),
        }
        # The cheap variant beside the expensive one, each with callers for half of its instances.
        beside = [
            Stream(f"budget {budget:g}", name, instances // 2, requests[budget])
            for budget in BESIDE
        ]
        both = refuse_errors(load.run(beside, seconds=seconds, warmup_s=1.0), load.url)
        result["side_by_side"] = {
            one.name: {
                "share_of_ideal": len(both.streams[one.name].latencies_ms)
                / both.seconds
                / (ideal[budget] / 2),
                "p99_ms": float(np.percentile(both.streams[one.name].latencies_ms, 99)),
            }
            for one, budget in zip(beside, BESIDE, strict=True)
        }
    return result


@contextmanager
def limited(pids: list[int], share: float) -> Iterator[None]:
    """Let each of these processes use at most a share of a core."""
    groups = [CPU_GROUPS / f"saccade-{pid}" for pid in pids]
    try:
        for pid, group in zip(pids, groups, strict=True):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)))
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for group in filter(Path.exists, groups):
            (CPU_GROUPS / "cgroup.procs").write_text((group / "cgroup.procs").read_text().strip())
            group.rmdir()


def ceilings(routers: list[int], share: float, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure what each number of routers carries, in turn, each with a share of a core."""
    instances = max(16, *routers)
    images = random_images(digits_folder(FOLDER, BUDGETS), 32)
    rates: dict[int, list[float]] = {count: [] for count in routers}
    for turn in range(rounds):
        for count in routers[:: -1 if turn % 2 else 1]:
            with sleeping(instances, 1.0, count) as (name, load, server):
                pids = [stub.pid for stub in stubs_in(server.pid) if stub.model == name]
                assert len(pids) == count
                requests = tuple(encoded_request(name, one[None], 1.0) for one in images)
                stream = Stream("alone", name, 2 * instances, requests)
                with limited(pids, share):
                    window = load.run([stream], seconds=seconds, warmup_s=1.0)
                rates[count].append(refuse_errors(window, load.url).rate)
                print(count, rates[count][-1], flush=True)
    first = np.array(rates[routers[0]])
    return {
        "instances": instances,
        "core_share_of_a_router": share,
        "requests_per_second": {str(count): rates[count] for count in routers},
        f"times_{routers[0]}": {
            str(count): spread((np.array(rates[count]) / first).tolist()) for count in routers[1:]
        },
        "ideal_requests_per_second": instances / SLEEP_S[1.0],
    }


def real(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure the largest variant of a folder, with an instance for each core."""
    artefact = ArtefactFolder(folder)
    images, variant = random_images(folder, 4), artefact.variants[0].name
    count = cores()
    with under_load(folder, instance_count=count, threads=1) as load:
        direct = tuple(tensor_request(variant, image[None]) for image in images)
        routed = tuple(encoded_request(artefact.model, image[None], 1.0) for image in images)
        found: dict[str, list[float]] = {"direct": [], "routed": []}
        for turn in range(rounds):
            for name in sorted(found, reverse=bool(turn % 2)):
                model, requests = (
                    (variant, direct) if name == "direct" else (artefact.model, routed)
                )
                stream = Stream(name, model, 16 * count, requests)
                window = load.run([stream], seconds=seconds, warmup_s=2.0)
                found[name].append(refuse_errors(window, load.url).rate)
    ratio = np.array(found["routed"]) / np.array(found["direct"])
    return {
        "variant": variant,
        "instances": count,
        **found,
        "routed_over_direct": spread(ratio.tolist()),
    }


def main() -> None:
    parser = options_of(__doc__, "in_flight", rounds=5, seconds=6.0)
    parser.add_argument("--instances", type=int, nargs="+", default=[16, 64])
    parser.add_argument(
        "--slower", type=float, default=1.0, help="factor for the times that variants sleep"
    )
    parser.add_argument("--folder", type=Path, help="artefacts of a real model")
    parser.add_argument("--routers", type=int, nargs="+", help="numbers of routers to compare")
    parser.add_argument("--core-share", type=float, default=0.25, help="share of a core for each")
    parser.set_defaults(out=None)  # in_flight.json, in_flight_real.json or in_flight_routers.json
    options = parser.parse_args()
    kind = "_real" if options.folder else "_routers" if options.routers else ""
    out = options.out or RESULTS / f"in_flight{kind}.json"
    if kind:
        rounds, seconds = options.rounds, options.seconds
        if options.folder:
            result = real(options.folder, rounds, seconds)
        else:
            result = ceilings(options.routers, options.core_share, rounds, seconds)
        write_result(out, result)
        print(result)
        return
    found = []
    for instances in options.instances:
        found.append(measured(instances, options.seconds, options.slower))
        print(found[-1], flush=True)
    aims = {
        f"share of the ideal throughput, at least {SHARE}": [x["share_of_ideal"] for x in found],
        f"the same of a policy of three steps, at least {SHARE}": [
            x["policy"]["share_of_ideal"] for x in found
        ],
        f"p99 at {LOAD} of it, at most {TIMES} times the queue's": [
            x["times_the_queue"] for x in found
        ],
    }
    sleep_s = [options.slower * sleep for sleep in SLEEP_S.values()]
    write_result(out, {"sleep_s": sleep_s, "runs": found, "aims": aims})
    for aim, values in aims.items():
        print(f"{aim}: {values}")


if __name__ == "__main__":
    main()
