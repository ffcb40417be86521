# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of serving over in-process ONNX Runtime: throughput and core time per request.

Both use one intra-op thread without spinning on the same cores; clients are in a separate process.
Every window through the server is between two in-process windows. Writes
benchmarks/results/served.json.
"""

import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from result_file import options_of, spread, write_result
from served_models import bench_folder, random_images, under_load

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.runtimes.runners import Runner, onnx_runner, onnx_session
from saccade.serving.bench.in_process import BATCHES, Calls, best_batch, sample
from saccade.serving.bench.load import LoadGenerator, LoadResult, Stream, refuse_errors
from saccade.serving.bench.load_requests import tensor_request
from saccade.serving.bench.served import check_answers

LEAST_SHARE, MOST_OVERHEAD_MS = 0.8, 0.6
PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class Target:
    """A variant in process: its function, the cost of each batch size, and the best batch."""

    name: str
    run: Runner
    images: np.ndarray
    calls: dict[int, Calls]

    @property
    def run_batch(self) -> int:
        return best_batch(self.calls)

    def best_rate(self, gauge: Calls) -> float:
        """Return images per second at the best batch, scaled to the machine's current pace."""
        rates = {size: call.inferences_per_second for size, call in self.calls.items()}
        return gauge.inferences_per_second * max(rates.values()) / rates[gauge.batch]

    def core_ms(self, batches: dict[str, int], gauge: Calls) -> float:
        """Return the core time per image in the batches that the server formed, scaled likewise."""
        sizes = sorted(self.calls)
        costs = [self.calls[size].core_ms_per_image for size in sizes]
        images = total = 0.0
        for text, times in batches.items():
            runs = -(-int(text) // self.run_batch)
            images += int(text) * times
            total += int(text) * times * float(np.interp(int(text) / runs, sizes, costs))
        pace = gauge.core_ms_per_image / self.calls[gauge.batch].core_ms_per_image
        return pace * total / images


@dataclass(frozen=True)
class Case:
    """One load: variant, images per request, clients."""

    title: str
    control: bool
    images: int
    clients: int


THROUGHPUT = Case("16 images a request, 8 clients", False, 16, 8)
OVERHEAD = Case("1 image a request, 16 clients", False, 1, 16)
CONTROL = Case("1 image a request, 16 clients, one module", True, 1, 16)
CASES = (THROUGHPUT, OVERHEAD, CONTROL, Case("1 image a request, 1 client", False, 1, 1))


def main() -> None:
    parser = options_of(__doc__, "served", rounds=9, seconds=4.0)
    parser.add_argument("--modules", type=int, default=256)
    options = parser.parse_args()
    folder = bench_folder(modules=options.modules, budgets=(1.0, 1 / options.modules))
    full, control = _in_process(folder, options.seconds)
    with under_load(folder, run_batch=full.run_batch, threads=1) as load:
        for each in (full, control):
            one = each.images[:1]
            message = tensor_request(each.name, one, "logits")
            expected = {"logits": each.run({"image": one})["logits"]}
            check_answers(load.url, each.name, message, expected, "fp32")
        rounds = []
        for turn in range(options.rounds):
            rounds.append(_round(load, full, control, turn, options.seconds))
            print(f"round {turn + 1}: {_line(rounds[-1])}", flush=True)
    cases = {case.title: _spreads([one["cases"][case.title] for one in rounds]) for case in CASES}
    result = {
        "benchmark": "served against in-process",
        "configuration": {"modules": options.modules, "run_batch": full.run_batch},
        "seconds": options.seconds,
        "in_process": {target.name: _calls(target) for target in (full, control)},
        "cases": cases,
        "targets": _targets(cases),
        "rounds": rounds,
    }
    write_result(options.out, result)
    for text, target in result["targets"].items():
        print(f"{text}: {target['found']:.2f}, {'met' if target['met'] else 'MISSED'}")


def _in_process(folder: Path, seconds: float) -> list[Target]:
    images, targets = random_images(folder, 64), []
    for manifest in ArtefactFolder(folder).manifests:
        run = onnx_runner(onnx_session(folder / manifest.file.name, threads=1))
        calls = {size: Calls(size) for size in BATCHES}
        for _ in range(4):
            for call in calls.values():
                sample(run, {"image": images}, call, seconds=seconds / 8)
        targets.append(Target(manifest.variant.name, run, images, calls))
    return targets


def _round(
    load: LoadGenerator, full: Target, control: Target, turn: int, seconds: float
) -> dict[str, Any]:
    """Run each case between two in-process samples; each round starts with another case."""
    start, figures = turn % len(CASES), {}
    for case in CASES[start:] + CASES[:start]:
        target = control if case.control else full
        gauge = Calls(min(full.run_batch, case.images * case.clients))
        sample(target.run, {"image": target.images}, gauge, seconds=seconds / 4)
        starts = range(0, len(target.images) - case.images + 1, case.images)
        requests = tuple(
            tensor_request(target.name, target.images[at : at + case.images]) for at in starts
        )
        stream = Stream(case.title, target.name, case.clients, requests, case.images)
        result = refuse_errors(load.run([stream], seconds=seconds, warmup_s=0.5), load.url)
        sample(target.run, {"image": target.images}, gauge, seconds=seconds / 4)
        figures[case.title] = _figures(result, stream, target, gauge)
    return {"load_average": os.getloadavg()[0], "cases": figures}


def _figures(result: LoadResult, stream: Stream, target: Target, gauge: Calls) -> dict[str, Any]:
    """Return the figures of a window: rate, latency by server statistics, core time by process."""
    latencies, counted = result.streams[stream.name].latencies_ms, result.statistics[target.name]
    count = len(latencies)
    core = {"client": 1e3 * result.client_cpu_s / count, "server": 0.0, "stub": 0.0}
    for process, used in result.server_cpu_s.items():
        core["stub" if "python" in process else "server"] += 1e3 * used / count
    model = stream.images * target.core_ms(counted["batches"], gauge)
    split = {part: counted[f"{part}_ns"] / 1e6 / counted["requests"] for part in PARTS}
    split["client"] = core["client"]
    split["transport"] = statistics.fmean(latencies) - sum(split.values())
    rate = count * stream.images / result.seconds
    quantiles = np.percentile(latencies, (50, 95, 99))
    return {
        "requests": count,
        "batches": counted["batches"],
        "inferences_per_second": rate,
        "share_of_in_process": rate / target.best_rate(gauge),
        "latency_ms": dict(zip(("p50", "p95", "p99"), map(float, quantiles), strict=True)),
        "latency_split_ms": split,
        "core_split_ms": {**core, "of stub: the model's own": model},
        "core_ms_above_model": sum(core.values()) - model,
    }


def _spreads(values: list[Any]) -> Any:
    """Return median, minimum and maximum of every number, in the same structure."""
    if isinstance(values[0], dict):
        keys = [key for key in values[0] if key not in ("batches", "requests")]
        return {key: _spreads([value[key] for value in values]) for key in keys}
    return spread(values)


def _calls(target: Target) -> dict[str, Any]:
    return {
        str(size): {**call.summary(), "core_ms_per_image": call.core_ms_per_image}
        for size, call in target.calls.items()
    }


def _targets(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    share = cases[THROUGHPUT.title]["share_of_in_process"]["median"]
    above = cases[OVERHEAD.title]["core_ms_above_model"]["median"]
    control = cases[CONTROL.title]["core_ms_above_model"]["median"]
    return {
        f"{THROUGHPUT.title}: share of in-process throughput, at least {LEAST_SHARE}": {
            "found": share, "met": share >= LEAST_SHARE,
        },
        f"{OVERHEAD.title}: core ms a request above the model's, at most {MOST_OVERHEAD_MS}": {
            "found": above, "met": above <= MOST_OVERHEAD_MS,
        },
        f"{CONTROL.title}: the same": {"found": control, "met": control <= MOST_OVERHEAD_MS},
    }  # fmt: skip


def _line(one: dict[str, Any]) -> str:
    return "; ".join(
        f"{title}: {case['inferences_per_second']:.0f}/s, {case['share_of_in_process']:.2f} of in "
        f"process, {case['core_ms_above_model']:.2f} core ms above the model"
        for title, case in one["cases"].items()
    )


if __name__ == "__main__":
    main()
