# SPDX-License-Identifier: Apache-2.0
"""Measure what folding and pruning save in a NAC: configuration `bench`, one thread, batch 8.

The unfolded model is the evaluation pass of `NAC`, with eq. 4 and 5 as written: keys and values of
every module and token, gains and links are computed from codes and signatures in each call.
(Training reorders the read-in; that path is not measured.)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from bench_config import bench_config
from torch import Tensor, nn

from saccade.core.files import json_bytes, write_atomically
from saccade.core.machine import this_machine
from saccade.exporter.graph.cost import cost_of
from saccade.exporter.graph.tracing import trace_component
from saccade.exporter.runtimes.runners import onnx_session
from saccade.models.interface import component_named
from saccade.models.nac.model import NAC

BATCH = 8
BUDGET = 0.125
MOMENT_S = 0.2
TARGETS = {
    (256, "read_in"): 80.0,
    (1024, "read_in"): 80.0,
    (256, "whole"): 6.0,
    (1024, "whole"): 4.0,
    (256, "budget"): 7.5,
    (1024, "budget"): 16.0,
}
RATIOS = {
    "read_in": ("unfolded read-in", "folded read-in"),
    "read_in_with_ffn": ("unfolded read-in and ffn", "folded read-in and ffn"),
    "whole": ("unfolded", "folded"),
    "budget": ("folded", "folded, budget 0.125"),
}
Call = Callable[[], Any]
PEAK = """
import re, sys, numpy
from pathlib import Path
from saccade.exporter.runtimes.runners import onnx_session
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
session = onnx_session(sys.argv[1])
before = peak()
session.run(None, {"image": numpy.zeros((int(sys.argv[2]), 32, 32, 3), numpy.uint8)})
print(before, peak() - before)
"""


class ReadInAlone(nn.Module):
    """Read-in attention for the exporter: tokens in, one state per module out."""

    def __init__(self, model: nn.Module, *, folded: bool, ffn: bool) -> None:
        super().__init__()
        self.model, self.folded, self.ffn = model, folded, ffn

    def forward(self, tokens: Tensor) -> Tensor:
        read_in = self.model.read_in
        if self.folded:
            return read_in(tokens) if self.ffn else read_in.attend(tokens)
        code = self.model.generator.codes
        theta = self.model.initial_state(code)
        if self.ffn:
            return read_in(theta, tokens, code)
        return read_in.attend(theta, tokens, code)


def models(modules: int) -> dict[str, nn.Module]:
    """Return everything that is timed, by name; those with `read-in` in the name take tokens."""
    model = NAC(bench_config(modules)).eval()
    folded = model.fold()
    return {
        "unfolded": model,
        "folded": folded,
        f"folded, budget {BUDGET}": model.prune(BUDGET).fold(),
        "unfolded read-in": ReadInAlone(model, folded=False, ffn=False),
        "folded read-in": ReadInAlone(folded, folded=True, ffn=False),
        "unfolded read-in and ffn": ReadInAlone(model, folded=False, ffn=True),
        "folded read-in and ffn": ReadInAlone(folded, folded=True, ffn=True),
    }


def inputs(config_modules: int) -> tuple[Tensor, Tensor]:
    """Return images and, for the read-in alone, their tokens."""
    config = bench_config(config_modules)
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, config.height_px, config.width_px, config.channels)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return images, torch.randn(BATCH, config.tokens or 0, config.dim, generator=generator)


def interleaved(calls: dict[str, Call], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Time everything in turn, for several rounds; each time one warm-up call, then many calls.

    Units: seconds of wall and core time per call.
    """
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            count = 0
            wall, core = time.perf_counter(), time.process_time()
            while count == 0 or time.perf_counter() - wall < MOMENT_S:
                call()
                count += 1
            samples[name].append(
                {
                    "wall_s": (time.perf_counter() - wall) / count,
                    "core_s": (time.process_time() - core) / count,
                }
            )
    return samples


def ratios(samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return how many times faster within each round, as median and quartiles over the rounds."""
    by_clock = {}
    for name, (slow, fast) in RATIOS.items():
        row: dict[str, Any] = {}
        for clock in ("wall_s", "core_s"):
            each = [a[clock] / b[clock] for a, b in zip(samples[slow], samples[fast], strict=True)]
            quartiles = statistics.quantiles(each, n=4) if len(each) > 1 else [each[0]] * 3
            row[clock.removesuffix("_s")] = dict(
                zip(("lower", "median", "upper"), quartiles, strict=True)
            )
        by_clock[name] = row
    return by_clock


def in_torch(modules: int, rounds: int) -> dict[str, Any]:
    """Return times and ratios in eager torch."""
    images, tokens = inputs(modules)
    calls: dict[str, Call] = {}
    for name, model in models(modules).items():
        x = tokens if "read-in" in name else images
        calls[name] = lambda model=model, x=x: model(x)
    with torch.inference_mode():
        samples = interleaved(calls, rounds)
    speedups = ratios(samples)
    for name, row in speedups.items():
        row["target"] = TARGETS.get((modules, name))
    return {"ratios": speedups, "samples": samples}


def in_onnxruntime(modules: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return times and ratios of ONNX Runtime sessions, and the costs of the files."""
    images, tokens = inputs(modules)
    calls: dict[str, Call] = {}
    files: dict[str, Any] = {}
    for index, (name, model) in enumerate(models(modules).items()):
        path = folder / f"{modules}-{index}.onnx"
        if "read-in" in name:
            path.write_bytes(_export_read_in(model, tokens))
            feed = {"tokens": tokens.numpy()}
        else:
            feed = {"image": images.numpy()}
            component = component_named(model, "")
            proto = trace_component(model, component, feed, component.outputs)
            path.write_bytes(proto.SerializeToString())
            parameters = sum(p.numel() for p in model.parameters())
            files[name] = _file_figures(path, cost_of(proto, parameters, feed))
        session = onnx_session(path)
        calls[name] = lambda session=session, feed=feed: session.run(None, feed)
    samples = interleaved(calls, rounds)
    return {"ratios": ratios(samples), "files": files, "samples": samples}


def _file_figures(path: Path, cost: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", PEAK, str(path), str(BATCH)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded, grown = (int(number) / 1024 for number in done.stdout.split())
    return {
        "file_mib": path.stat().st_size / 2**20,
        "multiply_adds_per_sample": cost.multiply_adds.total,
        "multiply_adds_by_part": cost.multiply_adds.by_part,
        "peak_activation_mib_per_sample": cost.peak_activation_bytes / 2**20,
        "peak_memory_loaded_mib": loaded,
        "peak_memory_of_a_run_mib": grown,
    }


def _export_read_in(model: nn.Module, tokens: Tensor) -> bytes:
    with torch.no_grad():
        program = torch.onnx.export(
            model.eval(),
            (tokens,),
            dynamo=True,
            opset_version=20,
            input_names=["tokens"],
            dynamic_shapes=({0: torch.export.Dim("b", min=1)},),
            verbose=False,
        )
    assert program is not None
    return program.model_proto.SerializeToString()


def table(result: dict[str, Any]) -> str:
    """Return the ratios as text."""
    lines = ["runtime      modules  ratio             median [quartiles]        core time  target"]
    for runtime in ("torch", "onnxruntime"):
        for modules, speedups in result[runtime].items():
            for name, row in speedups["ratios"].items():
                wall, core = row["wall"], row["core"]
                lines.append(
                    f"{runtime:12} {modules:>7}  {name:17} {wall['median']:6.1f} "
                    f"[{wall['lower']:.1f}, {wall['upper']:.1f}]".ljust(66)
                    + f"{core['median']:6.1f}     {row.get('target') or '-'}"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--modules", type=int, nargs="+", default=[256, 1024])
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds at 256 modules; fewer for more"
    )
    default = Path(__file__).parent / "results" / "fold.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "benchmark": "fold",
        "configuration": bench_config().to_dict(),
        "batch": BATCH,
        "threads": 1,
        "machine": this_machine().to_dict(),
        "versions": {name: metadata.version(name) for name in ("torch", "onnx", "onnxruntime")},
        "targets": "torch eager, wall clock",
        "peak_memory": "largest resident set (VmHWM) of a fresh process with the session loaded, "
        f"and how much one run of batch {BATCH} adds to it",
        "torch": {},
        "onnxruntime": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for modules in options.modules:
            rounds = max(3, options.rounds * 256 // max(256, modules) + 2)
            result["torch"][str(modules)] = in_torch(modules, rounds)
            result["onnxruntime"][str(modules)] = in_onnxruntime(modules, rounds, Path(folder))
    write_atomically(options.out, json_bytes(json.loads(json.dumps(result))))
    print(table(result))
    print(options.out)


if __name__ == "__main__":
    main()
