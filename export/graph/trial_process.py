# SPDX-License-Identifier: Apache-2.0
"""The worker of `trial`: reads, checks, loads and runs one ONNX file per request."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from saccade.core.errors import MissingPackage, SaccadeError, require
from saccade.core.files import sha256_of
from saccade.core.schema import AGAIN
from saccade.exporter.artefact.manifest import FileEntry
from saccade.exporter.graph.trial import Trial, Tried
from saccade.exporter.runtimes.runners import onnx_session

if TYPE_CHECKING:
    import onnx

_MEMORY = re.compile(r"alloc|out of memory|MemoryError", re.IGNORECASE)
try:
    HAS_ONNX = bool(require("onnx", extra="export"))  # now: requests have a time limit
except MissingPackage:
    HAS_ONNX = False


def main(trial: Trial) -> Tried:
    """Try a file. Without onnx, it is loaded but not checked against the limits of graphs."""
    path = Path(trial.path)
    try:
        return Tried(*(_tried(path, trial.file) if HAS_ONNX else _loaded(path)))
    except SaccadeError as error:
        return Tried("", str(error))
    except MemoryError:
        return Tried("", _too_large(path))


def _tried(path: Path, file: FileEntry) -> tuple[str, str | None]:
    """Return the hash of the file and why it must not be opened.

    Other errors of a runtime, within the limits, are left to the caller to report.
    """
    import onnx

    from saccade.exporter.graph.half_graph import HALF, widened_session
    from saccade.exporter.graph.model_file import read_model, without_values

    proto = without_values(read_model(path, file)[0])  # the checker copies it several times
    digest = sha256_of(path)
    half = any(tensor.data_type in HALF for tensor in proto.graph.initializer)
    try:
        onnx.checker.check_model(proto, full_check=True)
        session = widened_session(path, file) if half else onnx_session(path)
        session.run(None, _zeros(proto))
    except MissingPackage:
        return digest, None
    except Exception as error:  # the only common base of the libraries' errors
        return digest, _reason(path, error)
    return digest, None


def _loaded(path: Path) -> tuple[str, str | None]:
    try:
        onnx_session(path)
    except MissingPackage:  # no installed package can open it
        return "", None
    except SaccadeError as error:
        return sha256_of(path), _reason(path, error)
    return sha256_of(path), None


def _reason(path: Path, error: Exception) -> str | None:
    return _too_large(path) if _MEMORY.search(f"{error!r} {error}") else None


def _zeros(proto: "onnx.ModelProto") -> dict[str, np.ndarray]:
    """Return the inputs of a model as zeros, with size 1 for every free axis."""
    from onnx.helper import tensor_dtype_to_np_dtype

    given = {tensor.name for tensor in proto.graph.initializer}
    zeros = {}
    for value in proto.graph.input:
        if value.name not in given:
            kind = value.type.tensor_type
            shape = [axis.dim_value if axis.HasField("dim_value") else 1 for axis in kind.shape.dim]
            zeros[value.name] = np.zeros(shape, tensor_dtype_to_np_dtype(kind.elem_type))
    return zeros


def _too_large(path: Path) -> str:
    return (
        f"{path}: loading it and running one sample needs more memory than is allowed for a file "
        f"of this size. {AGAIN}"
    )
