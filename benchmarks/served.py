# SPDX-License-Identifier: Apache-2.0
"""What serving costs beside in-process ONNX Runtime: throughput at load, core time a request.

One intra-op thread on both sides, spinning off, the two interleaved in rounds on the same cores,
the clients in a process of their own. Writes benchmarks/results/served.json.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench_folder import bench_folder, random_images
from result_file import write_result

from saccade.export.manifest import read_folder
from saccade.export.runners import onnx_session
from saccade.serving import in_process
from saccade.serving.addresses import ServeOptions
from saccade.serving.in_process import BATCHES, Calls, best_batch, sample
from saccade.serving.load import LoadGenerator, LoadResult, Stream, refuse_errors
from saccade.serving.machine import this_machine
from saccade.serving.repository import RepositoryOptions, deploy
from saccade.serving.served import check_answers, tensor_request
from saccade.serving.server import Server

HERE = Path(__file__).parent
CASES = {
    "16 images a request, 8 clients": (16, 8),
    "1 image a request, 16 clients": (1, 16),
    "1 image a request, 1 client": (1, 1),
}
LEAST_SHARE, MOST_OVERHEAD_MS = 0.8, 0.6
PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


def main() -> None:
    options = _options()
    folder = bench_folder(options.build, modules=options.modules, budgets=(1.0,))
    manifest = read_folder(folder)[0]
    images = random_images(folder, 64)
    name = manifest.variant.name
    session = onnx_session(folder / manifest.file.name, threads=1)
    best, run_batch = _batches(session, images, options.seconds)
    rounds: list[dict[str, Any]] = []
    quiet = ServeOptions(
        grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
    )
    with tempfile.TemporaryDirectory() as place:
        repository = Path(place) / "repository"
        deploy(folder, RepositoryOptions(out=repository, run_batch=run_batch))
        with (
            Server(repository, quiet) as server,
            LoadGenerator(server.url, server_pid=server.pid) as load,
        ):
            check_answers(server.url, name, images[:1], in_process.logits(session, images[:1]))
            for turn in range(options.rounds):
                one = _round(load, name, session, images, (best, run_batch), options.seconds)
                rounds.append(one)
                print(f"round {turn + 1}: {_line(one)}", flush=True)
    result = {
        "benchmark": "served against in-process",
        "configuration": {
            "modules": options.modules,
            "budget": 1.0,
            "best_batch": best,
            "run_batch": run_batch,
        },
        "machine": this_machine().to_dict(),
        "seconds": options.seconds,
        "cases": {case: _case(rounds, case) for case in CASES},
        "rounds": rounds,
    }
    result["targets"] = _targets(result["cases"])
    write_result(options.out, result)
    for text, target in result["targets"].items():
        print(f"{text}: {target['found']:.3f} (median), {'met' if target['met'] else 'MISSED'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement in a round")
    parser.add_argument("--build", type=Path, default=HERE.parent / "build" / "benchmarks")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "served.json")
    return parser.parse_args()


def _batches(session: Any, images: np.ndarray, seconds: float) -> tuple[int, int]:
    """The batch that is fastest in process, and the one the server is told to run."""
    calls = {size: Calls(size) for size in BATCHES}
    for _ in range(4):
        for each in calls.values():
            sample(session, images, each, seconds=seconds / 8)
    return max(BATCHES, key=lambda size: calls[size].inferences_per_second), best_batch(calls)


def _round(
    load: LoadGenerator,
    name: str,
    session: Any,
    images: np.ndarray,
    batches: tuple[int, int],
    seconds: float,
) -> dict[str, Any]:
    """In process and served, one after the other; the in-process figure before and after."""
    best, run_batch = batches
    inside = {size: Calls(size) for size in BATCHES if size <= 16 or size in batches}
    found: dict[str, Any] = {}
    sample(session, images, inside[best], seconds=seconds / 2)
    for case, (per_request, clients) in CASES.items():
        starts = range(0, len(images) - per_request + 1, per_request)
        requests = tuple(tensor_request(name, images[at : at + per_request]) for at in starts)
        stream = Stream(case, name, clients, requests, per_request)
        result = load.run([stream], seconds=seconds, warmup_s=0.5)
        found[case] = _served(refuse_errors(result, load.url), stream, name)
    sample(session, images, inside[best], seconds=seconds / 2)
    for size, calls in inside.items():
        if size != best:
            sample(session, images, calls, seconds=seconds / 8)
    for case, each in found.items():
        batch_own = _own_core_ms(each["batches"], inside, run_batch)
        own = batch_own / each["inferences"] * CASES[case][0]
        each["model_core_ms"] = own
        each["core_ms_above_model"] = each["core_ms"] - own
        rate = inside[best].inferences_per_second
        each["share_of_in_process"] = each["inferences_per_second"] / rate
    return {
        "load_average": os.getloadavg()[0],
        "in_process": {str(size): calls.summary() for size, calls in inside.items()},
        "in_process_core_ms_per_image": {
            str(size): calls.core_ms_per_image for size, calls in inside.items()
        },
        "served": found,
    }


def _served(result: LoadResult, stream: Stream, name: str) -> dict[str, Any]:
    """One window: rates, latency split by the server's own statistics, core time by process."""
    latencies = result.streams[stream.name].latencies_ms
    count, counted = len(latencies), result.statistics[name]
    split = {part: counted[f"{part}_ns"] / 1e6 / counted["requests"] for part in PARTS}
    split["client"] = 1e3 * result.client_cpu_s / count
    split["transport"] = statistics.fmean(latencies) - sum(split.values())
    quantiles = np.percentile(latencies, (50, 95, 99))
    core = {"client": 1e3 * result.client_cpu_s / count}
    for process, seconds in result.server_cpu_s.items():
        kind = "stub" if "python" in process else "server"
        core[kind] = core.get(kind, 0.0) + 1e3 * seconds / count
    return {
        "requests": count,
        "inferences": counted["inferences"],
        "inferences_per_second": count * stream.images / result.seconds,
        "latency_ms": dict(zip(("p50", "p95", "p99"), map(float, quantiles), strict=True)),
        "latency_split_ms": split,
        "core_split_ms": core,
        "core_ms": sum(core.values()),
        "batches": counted["batches"],
    }


def _own_core_ms(batches: dict[str, int], inside: dict[int, Calls], run_batch: int) -> float:
    """Core time in process for the same batches, cut into runs of at most the run batch."""
    sizes = sorted(size for size in inside if size <= run_batch)
    costs = [inside[size].core_ms_per_image * size for size in sizes]
    total = 0.0
    for batch, times in batches.items():
        runs = -(-int(batch) // run_batch)
        total += times * runs * float(np.interp(int(batch) / runs, sizes, costs))
    return total


def _case(rounds: list[dict[str, Any]], case: str) -> dict[str, Any]:
    """Median, least and most of every figure over the rounds."""
    plain = [one["served"][case] for one in rounds]
    keys = ("inferences_per_second", "share_of_in_process", "core_ms", "core_ms_above_model")
    found = {key: _spread([each[key] for each in plain]) for key in keys}
    for split in ("latency_ms", "latency_split_ms", "core_split_ms"):
        found[split] = {
            key: _spread([each[split][key] for each in plain]) for key in plain[0][split]
        }
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _targets(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    share = cases["16 images a request, 8 clients"]["share_of_in_process"]["median"]
    above = cases["1 image a request, 16 clients"]["core_ms_above_model"]["median"]
    return {
        "16 images, 8 clients: share of in-process throughput, at least 0.8": {
            "found": share, "met": share >= LEAST_SHARE,
        },
        "1 image, 16 clients: core milliseconds above the model's own, at most 0.6": {
            "found": above, "met": above <= MOST_OVERHEAD_MS,
        },
    }  # fmt: skip


def _line(one: dict[str, Any]) -> str:
    return "; ".join(
        f"{case}: {each['inferences_per_second']:.0f}/s, {each['share_of_in_process']:.2f} of in "
        f"process, {each['core_ms_above_model']:.2f} core ms above the model"
        for case, each in one["served"].items()
    )


if __name__ == "__main__":
    main()
