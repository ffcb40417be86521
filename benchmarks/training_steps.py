# SPDX-License-Identifier: Apache-2.0
"""Measure a training step of digits-sum: float32 and bfloat16, tokens of a digit and smaller.

    python benchmarks/training_steps.py [--modules 64 256 --rounds 5]

Circuits have a mean degree of 12 and no module dropout; one thread is used. Variants take turns. A
figure is the median over rounds of CPU time, so that other programs have little effect. Each size
is measured in two separate processes: with default settings, and with glibc keeping the memory of
large tensors instead of returning it and faulting it in again in every step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.models.nac.training import task
from saccade.models.training.loop import Run
from saccade.models.training.options import TrainOptions

BATCH = 64
TOKENS: dict[str, dict[str, Any]] = {
    "12 px, linear": {"patch_px": 12},
    "6 px, linear": {"patch_px": 6},
    "6 px, convolutions": {"patch_px": 6, "tokenizer": "conv"},
}
PRECISIONS = ("fp32", "bf16")
KEPT = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8000000000"
ALLOCATORS = {"default": {}, "memory kept": {"GLIBC_TUNABLES": KEPT}}
RESULT = Path(__file__).with_name("results") / "training_steps.json"


def run_of(modules: int, tokens: dict[str, Any], precision: Any) -> Run:
    """Return a run at its first step."""
    given = {"modules": modules, "module_dropout": 1.0, "graph_degree": 12.0, **tokens}
    out = Path("build/training_steps.safetensors")
    options = TrainOptions(out, "digits-sum", set=given, batch=BATCH, precision=precision)
    return Run(task(options), options)


def measured(modules: int, rounds: int) -> dict[str, Any]:
    """Return CPU seconds per step by tokens and precision, and ratios within a round."""
    torch.manual_seed(0)
    times: dict[tuple[str, str], list[float]] = {}
    runs = {
        (name, precision): run_of(modules, tokens, precision)
        for name, tokens in TOKENS.items()
        for precision in PRECISIONS
    }
    for index in range(rounds + 1):
        for key, run in runs.items():
            begin = time.process_time()
            run.step()
            if index:  # the first step warms up caches
                times.setdefault(key, []).append(time.process_time() - begin)
    seconds: dict[str, Any] = {}
    for name in TOKENS:
        wide, half = (np.array(times[name, precision]) for precision in PRECISIONS)
        seconds[name] = {
            "fp32_s": statistics.median(wide),
            "bf16_s": statistics.median(half),
            "times_faster": statistics.median(wide / half),
            "times_faster_least_and_most": [float((wide / half).min()), float((wide / half).max())],
        }
    return seconds


def in_a_process(modules: int, rounds: int, environment: dict[str, str]) -> dict[str, Any]:
    """Run `measured` in a process with these variables, which glibc reads when it starts."""
    command = [sys.executable, __file__, "--child", "--modules", str(modules)]
    done = subprocess.run(
        [*command, "--rounds", str(rounds)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Measure each size and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.child:
        print(json.dumps(measured(given.modules[0], given.rounds)))
        return
    sizes = {
        str(modules): {
            name: in_a_process(modules, given.rounds, environment)
            for name, environment in ALLOCATORS.items()
        }
        for modules in given.modules
    }
    result = {
        "machine": this_machine().to_dict(),
        "batch": BATCH,
        "rounds": given.rounds,
        "allocators": ALLOCATORS,
        "modules": sizes,
    }
    write_result(given.out, result)
    for modules, allocators in sizes.items():
        for allocator, rows in allocators.items():
            for tokens, row in rows.items():
                print(f"{modules} modules, {tokens}, {allocator}: {row}")


if __name__ == "__main__":
    main()
