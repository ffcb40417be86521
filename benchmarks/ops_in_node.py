# SPDX-License-Identifier: Apache-2.0
"""Run onnxruntime-node and onnxruntime-web for ops_runtimes.py, with models and data in files."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def node(name: str, modules: Path) -> Callable[[Sequence[Any]], Any]:
    def run(asked: Sequence[Any]) -> Any:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            listed = [written(job, folder, index) for index, job in enumerate(asked)]
            (folder / "jobs.json").write_text(json.dumps(listed))
            script = Path(__file__).with_name("ops_runtimes.mjs")
            subprocess.run(["node", script, folder, name, modules], check=True)
            content = json.loads((folder / "found.json").read_text())
            answers = [
                read(job, entry, folder)
                for job, entry in zip(listed, content["found"], strict=True)
            ]
        return content["version"], iter(answers)

    return run


def written(job: Any, folder: Path, index: int) -> dict[str, Any]:
    """Write the job's files, and return their names for the script."""
    (folder / f"{index}.onnx").write_bytes(job.model().SerializeToString())
    inputs = []
    for port, array in zip(job.op.inputs, job.arrays, strict=True):
        file = f"{index}.{port.name}.in"
        (folder / file).write_bytes(np.ascontiguousarray(array).tobytes())
        entry = {"name": port.name, "type": array.dtype.name, "dims": array.shape, "file": file}
        inputs.append(entry)
    outputs = [{"name": port.name, "file": f"{index}.{port.name}.out"} for port in job.op.outputs]
    return {"model": f"{index}.onnx", "inputs": inputs, "outputs": outputs}


def read(job: dict[str, Any], entry: dict[str, Any], folder: Path) -> Any:
    if "error" in entry:
        return RuntimeError(entry["error"])
    return [
        np.frombuffer((folder / output["file"]).read_bytes(), kind["type"]).reshape(kind["dims"])
        for output, kind in zip(job["outputs"], entry["answers"], strict=True)
    ]
