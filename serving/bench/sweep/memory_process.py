# SPDX-License-Identifier: Apache-2.0
"""What a process that holds one variant occupies: `python -m ....memory_process TASK`.

The folder holds that variant alone. The answer is one JSON object: the resident memory before the
variant was loaded, and after it answered a batch.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from saccade.export.artefact.folder import ArtefactFolder
from saccade.export.runtimes.runtime import loaded, runtime_named
from saccade.serving.bench.work import works_of

BATCH = 8


def main(task: dict[str, Any]) -> dict[str, int]:
    """Load, answer, look."""
    runtime = runtime_named(task["runtime"])
    folder = ArtefactFolder(task["folder"])
    (variant,) = folder.variants
    folder.check_files()
    inputs = {
        role: {name: np.load(path, allow_pickle=False) for name, path in each.items()}
        for role, each in task["inputs"].items()
    }
    runtime.require()
    before = resident_bytes()
    runners = loaded(runtime, folder, folder.manifests, task["ops"])
    for work in works_of(variant, inputs, runners):
        work.run({name: np.resize(x, (BATCH, *x.shape[1:])) for name, x in work.inputs.items()})
    return {"before_bytes": before, "resident_bytes": resident_bytes(), "batch": BATCH}


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
