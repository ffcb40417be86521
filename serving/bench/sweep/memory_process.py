# SPDX-License-Identifier: Apache-2.0
"""Measure the memory of a process that has loaded one variant."""

import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.runtimes.runtime import loaded, runtime_named
from saccade.plugins.contract import Ops
from saccade.serving.bench.work import works_of

BATCH = 8


@dataclass(frozen=True)
class MemoryTask:
    """A folder with a single variant, and .npy files of samples by role and name."""

    folder: str
    inputs: dict[str, dict[str, bytes]]
    runtime: str
    ops: Ops


@dataclass(frozen=True)
class ResidentMemory:
    """Resident memory before the variant was loaded, and after it had answered a batch."""

    before_bytes: int
    resident_bytes: int
    batch: int = BATCH


def main(task: MemoryTask) -> ResidentMemory:
    """Load the variant, answer a batch, and measure the memory."""
    runtime = runtime_named(task.runtime)
    folder = ArtefactFolder(task.folder)
    (variant,) = folder.variants
    folder.check_files()
    inputs = {
        role: {name: np.load(io.BytesIO(file), allow_pickle=False) for name, file in value.items()}
        for role, value in task.inputs.items()
    }
    runtime.require()
    before = resident_bytes()
    runners = loaded(runtime, folder, folder.manifests, task.ops)
    for work in works_of(variant, inputs, runners):
        work.run({name: np.resize(x, (BATCH, *x.shape[1:])) for name, x in work.inputs.items()})
    return ResidentMemory(before, resident_bytes())


def resident_bytes() -> int:
    """Return the resident memory of this process. Units: bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
