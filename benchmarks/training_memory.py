# SPDX-License-Identifier: Apache-2.0
"""Measure the memory of one training step of a ViT-B: plain, in micro-batches, recomputed.

    python benchmarks/training_memory.py [--batch 8]

Each variant runs in a separate process, on one thread, all at the same time. A figure is the peak
of the resident memory above what the process needed before the step; it includes the gradients.
CPU time is that of the step; compare it with that of the other variants only.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.models.sot.config import vit
from saccade.models.sot.model import SoT
from saccade.models.training.parts import Gradients, blocks_of
from saccade.models.training.processes import ALONE

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate 4": {"accumulate": 4},
    "checkpoint activations": {"recompute": True},
    "both": {"accumulate": 4, "recompute": True},
}
# glibc returns the memory of large tensors as soon as they are freed.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "131072"}
RESULT = Path(__file__).with_name("results") / "training_memory.json"


class Classify:
    """The parts of a SoT's training task that gradients need, on random images."""

    auxiliary = None

    def __init__(self) -> None:
        self.model = SoT(vit(768, 12)).train()

    def loss(self, batch: Any, step: int) -> torch.Tensor:
        return self.model.loss(batch["image"], batch["labels"])

    def part(self, batch: Any, index: int, count: int) -> Any:
        return {name: value.chunk(count)[index] for name, value in batch.items()}

    def samples(self, batch: Any) -> int:
        return len(batch["labels"])

    weight = samples


def measured(name: str, batch: int) -> dict[str, float]:
    """Return the memory and the CPU time of one step."""
    torch.set_num_threads(1)
    given = VARIANTS[name]
    task: Any = Classify()
    blocks = blocks_of(task.model) if given.get("recompute") else ()
    gradients = Gradients(
        task, ALONE, nullcontext, lambda x: x, given.get("accumulate", 1), tuple(blocks)
    )
    images = torch.randint(0, 256, (batch, 224, 224, 3), dtype=torch.uint8)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    gradients({"image": images, "labels": torch.arange(batch)}, 0)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"mib": round((peak - before) / 1024), "cpu_s": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measured(options.variant, options.batch)))
        return
    command = [sys.executable, __file__, "--batch", str(options.batch), "--variant"]
    started = {
        name: subprocess.Popen(
            [*command, name], stdout=subprocess.PIPE, env=os.environ | RETURNED, text=True
        )
        for name in VARIANTS
    }
    found = {}
    for name, process in started.items():
        answer, _ = process.communicate()
        found[name] = json.loads(answer)
        print(name, found[name], flush=True)
    model = "ViT-B/16 of 768 channels and 12 blocks, 224 px, float32"
    content = {
        "machine": asdict(this_machine()),
        "model": model,
        "batch": options.batch,
        "steps": found,
    }
    write_result(options.out, content)


if __name__ == "__main__":
    main()
