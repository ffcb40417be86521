# SPDX-License-Identifier: Apache-2.0
"""Compare saccade's OpenVINO runtime, in process and served, with OpenVINO itself and ONNX Runtime.

    saccade export vit-b.safetensors --precision fp32,bf16,int8 --out build/vit-b
    python benchmarks/openvino_native.py build/vit-b

OpenVINO itself compiles the exported file with the same number of threads and the same type. For
bf16 it compiles the fp32 file, to be computed in bfloat16: that is what its user would do. Each
round runs every way once, in rotated order, and gives one ratio per pair. The server is compared
with native windows right before and after its own. Writes benchmarks/results/openvino_native.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from result_file import options_of, write_result
from served_models import under_load

from saccade.core.machine import advice, cores, instruction_sets, this_machine
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.onnxruntime import ONNXRUNTIME
from saccade.exporter.runtimes.openvino.runtime import OPENVINO, cpu_has_bf16, openvino_module
from saccade.serving.bench.load import Stream, refuse_errors
from saccade.serving.bench.load_requests import tensor_request

NATIVE, OURS, ORT, SERVED = "native", "saccade", "onnxruntime fp32", "saccade served"
# Bars: saccade over OpenVINO itself, and a precision over ONNX Runtime's fp32. The second needs a
# CPU with instructions for the type.
SHARE, OVER_ORT = 0.95, {"bf16": 1.8, "int8": 2.5}
Window = Callable[[float], float]  # takes its seconds, returns images per second


def main() -> None:
    options = _options()
    folder = ArtefactFolder(options.folder)
    # OpenVINO itself reads no custom ops: the largest budget without any.
    plain = [manifest for manifest in folder.manifests if not manifest.custom_ops]
    if not plain:
        raise SystemExit(f"{folder}: every variant has custom ops, which OpenVINO cannot read")
    by_precision = {
        manifest.variant.precision: manifest
        for manifest in plain
        if manifest.variant.setting == plain[0].variant.setting
    }
    wanted = [name for name in options.precisions or by_precision if name in OPENVINO.precisions]
    cases = {}
    for threads in options.threads or (1, cores()):
        for precision in wanted:
            title = f"{precision}, {threads} thread{'s' * (threads > 1)}"
            cases[title] = _case(folder, by_precision, precision, threads, options)
            print(f"{title}: {cases[title]['images_per_second']}", flush=True)
    result = {
        "benchmark": "saccade's OpenVINO runtime against OpenVINO and ONNX Runtime",
        "machine": this_machine(OPENVINO.label()).to_dict(),
        "instruction_sets": {"found": instruction_sets(), "meaning": advice(instruction_sets())},
        "bf16_computed_in": "bfloat16" if cpu_has_bf16() else "float32",
        "model": folder.model,
        "images_per_call": options.batch,
        "seconds_per_window": options.seconds,
        "cases": cases,
        "bars": _bars(cases),
    }
    write_result(options.out, result)
    for text, bar in result["bars"].items():
        print(f"{text}: {bar['found']:.2f}, {'met' if bar['met'] else 'MISSED'}")


def _options() -> argparse.Namespace:
    parser = options_of(__doc__, "openvino_native", rounds=9, seconds=4.0)
    parser.add_argument("folder", type=Path, help="artefact folder")
    parser.add_argument("--precisions", nargs="*", help="default: all in the folder")
    parser.add_argument("--threads", type=int, nargs="*", help="default: one, and one per core")
    parser.add_argument("--batch", type=int, default=8)
    return parser.parse_args()


def _case(
    folder: ArtefactFolder,
    manifests: Mapping[str, Manifest],
    precision: str,
    threads: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure one precision with one number of threads, by every way."""
    manifest, full = manifests[precision], manifests["fp32"]
    shape = [axis if isinstance(axis, int) else options.batch for axis in manifest.inputs[0].shape]
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    inputs = {manifest.inputs[0].name: images}
    source = full if precision == "bf16" else manifest
    with ExitStack() as stack:
        ways: dict[str, Window] = {
            NATIVE: _calls(native_openvino(folder.file(source), precision, threads), inputs),
            OURS: _calls(OPENVINO.load(folder, manifest, None, threads=threads), inputs),
            ORT: _calls(ONNXRUNTIME.load(folder, full, "bodies", threads=threads), inputs),
            SERVED: _served(stack, folder, manifest, threads, images),
        }
        for window in ways.values():
            window(0.0)  # one call, which allocates memory
        rounds = [_round(ways, turn, options.seconds) for turn in range(options.rounds)]
    names = ("saccade over native", "served over native", "native over onnxruntime fp32",
             "saccade over onnxruntime fp32")  # fmt: skip
    return {
        "images_per_second": {way: statistics.median(one[way] for one in rounds) for way in ways},
        "ratios": {name: _spread([one[name] for one in rounds]) for name in names},
        "rounds": rounds,
    }


def _round(ways: Mapping[str, Window], turn: int, seconds: float) -> dict[str, float]:
    """Run every way once; the server is between two native windows."""
    order = [OURS, NATIVE, ORT]
    order = order[turn % 3 :] + order[: turn % 3]
    rates = {way: ways[way](seconds) for way in order}
    before, rates[SERVED], after = (ways[way](seconds) for way in (NATIVE, SERVED, NATIVE))
    return {
        **rates,
        "saccade over native": rates[OURS] / rates[NATIVE],
        "served over native": 2 * rates[SERVED] / (before + after),
        "native over onnxruntime fp32": rates[NATIVE] / rates[ORT],
        "saccade over onnxruntime fp32": rates[OURS] / rates[ORT],
    }


def native_openvino(
    path: Path, precision: str, threads: int
) -> Callable[[Mapping[str, np.ndarray]], Any]:
    """Return OpenVINO as its documentation shows it: one file, one request at a time."""
    core = openvino_module().Core()
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
    }
    compiled = core.compile_model(core.read_model(path), "CPU", properties)
    return lambda inputs: compiled(dict(inputs))


def _calls(run: Callable[[Mapping[str, np.ndarray]], Any], inputs: Mapping[str, Any]) -> Window:
    count = len(next(iter(inputs.values())))

    def window(seconds: float) -> float:
        start, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - start < seconds:
            run(inputs)
            calls += 1
        return count * calls / (time.perf_counter() - start)

    return window


def _served(
    stack: ExitStack, folder: ArtefactFolder, manifest: Manifest, threads: int, images: np.ndarray
) -> Window:
    entry = manifest.variant
    kept = [each for each in folder.variants if each.main.variant.name == entry.name]
    options = {"runtime": OPENVINO.name, "threads": threads, "run_batch": len(images)}
    load = stack.enter_context(under_load(folder.only(kept), **options))
    # A second request waits while one runs, so that the model is never idle.
    requests = (tensor_request(entry.name, images),)
    stream = Stream("images", entry.name, 2, requests, len(images))

    def window(seconds: float) -> float:
        result = refuse_errors(
            load.run([stream], seconds=max(seconds, 0.1), warmup_s=0.5), load.url
        )
        return len(result.streams[stream.name].latencies_ms) * len(images) / result.seconds

    return window


def _spread(values: list[float]) -> dict[str, float]:
    """Return the median with the 95 % interval of the median, by bootstrap."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return {"median": statistics.median(values), "low": float(low), "high": float(high)}


def _bars(cases: Mapping[str, Any]) -> dict[str, Any]:
    bars = {}
    for title, case in cases.items():
        least = {"saccade over native": SHARE, "served over native": SHARE}
        if over := OVER_ORT.get(title.partition(",")[0]):
            least["saccade over onnxruntime fp32"] = over
        for name, bound in least.items():
            found = case["ratios"][name]["median"]
            bar = {"found": found, "least": bound, "met": found >= bound}
            bars[f"{title}, {name}, at least {bound}"] = bar
    return bars


if __name__ == "__main__":
    main()
