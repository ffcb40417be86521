# SPDX-License-Identifier: Apache-2.0
"""ONNX files opened for the first time: in a process that may die of them.

An artefact folder can come from anybody, and the hash in its manifest says only that nothing was
changed since. So each file is read, held against the limits of graphs, loaded by ONNX Runtime and
asked one sample of zeros in a worker with limits of memory and time, before the process of the
command opens it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.worker import START_S, Limits, Worker, WorkerEnded

_PROCESS = "saccade.exporter.graph.trial_process"
_GIB = 2**30
_WALL = 10  # times the CPU time: the same work while others have the CPU
_AGAIN = "Export it again with: saccade export CHECKPOINT"
_KNOWN: set[str] = set()  # SHA-256 of files that this process has tried or written


@dataclass(frozen=True)
class Tried:
    """The hash of a file that was read, and why it cannot be opened."""

    sha256: str
    reason: str | None


def limits_for(file_bytes: int) -> Limits:
    """Limits of one file: for memory some copies of its weights, for time what loading takes."""
    return Limits(memory_bytes=4 * _GIB + 8 * file_bytes, cpu_s=30 + round(60 * file_bytes / _GIB))


def tried(
    folder: ArtefactFolder, manifests: Iterable[Manifest], limits: Limits | None = None
) -> dict[str, str]:
    """By file name, what is wrong with a folder's files that cannot be opened within the limits.

    Bytes that this process knows by their hash are not tried again.
    """
    unknown = [manifest for manifest in manifests if manifest.file.sha256 not in _KNOWN]
    paths = [folder.path / manifest.file.name for manifest in unknown]
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    limits = limits or limits_for(max(sizes, default=0))
    timeout_s = max(START_S, _WALL * (limits.cpu_s or 0))
    wrong: dict[str, str] = {}
    with Worker(_PROCESS, limits) as worker:
        for path in paths:
            try:
                answer = worker.ask(str(path.absolute()), Tried, timeout_s)
            except WorkerEnded as ended:
                wrong[path.name] = _too_much(path, str(ended), limits)
                continue
            if answer.reason is None:
                _KNOWN.add(answer.sha256)
            else:
                wrong[path.name] = answer.reason
    return wrong


def refuse_untried(folder: ArtefactFolder, manifests: Sequence[Manifest]) -> None:
    """Raises: SaccadeError for the first file of a folder that has other bytes than its manifest
    promises, or cannot be opened within limits.
    """
    for manifest in manifests:
        folder.file(manifest)
    for reason in tried(folder, manifests).values():
        raise SaccadeError(reason)


def made_here(manifest: Manifest) -> None:
    """Note that this process wrote a file itself, so that it is not tried."""
    _KNOWN.add(manifest.file.sha256)


def _too_much(path: Path, how: str, limits: Limits) -> str:
    memory = (limits.memory_bytes or 0) / _GIB
    return (
        f"{path}: loading it and asking it one sample ended the process that tried ({how}); "
        f"allowed are {limits.cpu_s} s and {memory:.1f} GiB. {_AGAIN}"
    )
