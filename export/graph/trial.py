# SPDX-License-Identifier: Apache-2.0
"""Try out unknown ONNX files in a separate process, which may crash.

An artefact folder can come from anyone, and the hash in its manifest only proves that a file has
not changed since. Before a command opens a file in its own process, a worker with limits on memory
and time reads it, loads it in ONNX Runtime and runs it on one sample of zeros.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from saccade.core.errors import MissingPackage, SaccadeError, require
from saccade.core.files import sha256_of
from saccade.core.schema import AGAIN
from saccade.core.worker import START_S, Limits, Worker, WorkerEnded
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import FileEntry, Manifest
from saccade.exporter.runtimes.runners import onnx_session

if TYPE_CHECKING:
    import onnx

_GIB = 2**30
_WALL = 10  # times the CPU time, in case other processes use the CPU
_MEMORY = re.compile(r"alloc|out of memory|MemoryError", re.IGNORECASE)
_KNOWN: set[str] = set()  # SHA-256 of files that this process tried or wrote


@dataclass(frozen=True)
class Trial:
    """A file to try, with its entry in the manifest."""

    path: str
    file: FileEntry


@dataclass(frozen=True)
class Verdict:
    """The hash of a file, and why it must not be opened."""

    sha256: str
    reason: str | None = None


def limits_for(file_bytes: int) -> Limits:
    """Return the limits for a file: memory for several copies of its weights, time to load it."""
    return Limits(memory_bytes=4 * _GIB + 8 * file_bytes, cpu_s=30 + round(60 * file_bytes / _GIB))


def tried(
    folder: ArtefactFolder, manifests: Iterable[Manifest], limits: Limits | None = None
) -> dict[str, str]:
    """Return the reasons why files of a folder cannot be opened within the limits, by file name.

    A file with a hash that this process already tried is skipped.
    """
    files = [manifest.file for manifest in manifests if manifest.file.sha256 not in _KNOWN]
    sizes = [file.total_bytes for file in files if (folder.path / file.name).is_file()]
    limits = limits or limits_for(max(sizes, default=0))
    timeout_s = max(START_S, _WALL * (limits.cpu_s or 0))
    wrong: dict[str, str] = {}
    with Worker(__name__, limits) as worker:
        for file in files:
            path = folder.path / file.name
            try:
                verdict = worker.ask(Trial(str(path.absolute()), file), Verdict, timeout_s)
            except WorkerEnded as ended:
                wrong[file.name] = (
                    f"{path}: the process that loaded it and ran one sample failed ({ended}); the "
                    f"limits are {limits.cpu_s} s of CPU time and "
                    f"{(limits.memory_bytes or 0) / _GIB:.1f} GiB of memory. {AGAIN}"
                )
                continue
            if verdict.reason is None:
                _KNOWN.add(verdict.sha256)
            else:
                wrong[file.name] = verdict.reason
    return wrong


def refuse_untried(folder: ArtefactFolder, manifests: Sequence[Manifest]) -> None:
    """Check the files of a folder before they are opened.

    Raises: SaccadeError for the first one that does not match its manifest or cannot be opened
        within the limits.
    """
    for manifest in manifests:
        folder.file(manifest)
    for reason in tried(folder, manifests).values():
        raise SaccadeError(reason)


def made_here(manifest: Manifest) -> None:
    """Record that this process wrote a file itself, so that it is not tried."""
    _KNOWN.add(manifest.file.sha256)


def main(trial: Trial) -> Verdict:
    """Try a file, in the worker. Without onnx, it is loaded, but neither checked nor run."""
    path, digest = Path(trial.path), ""
    try:
        digest = sha256_of(path)  # first: the file may be replaced while it is tried
        require("onnx", extra="export")
        reason = _reason(path, trial.file)
    except MissingPackage:
        reason = _load(path)
    except SaccadeError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{path}: cannot be read ({error.strerror}). {AGAIN}"
    except MemoryError as error:
        reason = _of_memory(path, error)
    return Verdict(digest, reason)


def _reason(path: Path, file: FileEntry) -> str | None:
    """Return why a file must not be opened.

    Raises: SaccadeError for one that cannot be read.
    """
    import onnx

    from saccade.exporter.graph.half_graph import HALF, widened
    from saccade.exporter.graph.model_file import graph_session, read_model, without_values

    proto, weights = read_model(path, file)
    light = without_values(proto)
    half = any(tensor.data_type in HALF for tensor in proto.graph.initializer)
    try:
        onnx.checker.check_model(light, full_check=True)  # before anything relies on its values
        wide = widened(proto, weights) if half else None
        del proto, weights  # the session has copies of its own
        session = graph_session(*wide, optimized=True) if wide else onnx_session(path)
        session.run(None, _zeros(light))
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        return f"{path}: is not a valid ONNX file ({first.rstrip('.')}). {AGAIN}"
    except Exception as error:  # the only common base of the libraries' errors
        return _of_memory(path, error)
    return None


def _load(path: Path) -> str | None:
    try:
        onnx_session(path)
    except SaccadeError as error:
        return _of_memory(path, error)
    return None


def _of_memory(path: Path, error: Exception) -> str | None:
    """Return what is wrong if a file needs too much memory; the caller reports other errors."""
    if not _MEMORY.search(f"{error!r} {error}"):
        return None
    return (
        f"{path}: loading it and running one sample needs more memory than is allowed for a file "
        f"of this size. {AGAIN}"
    )


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
