# SPDX-License-Identifier: Apache-2.0
"""Try out unknown ONNX files in a separate process, which may crash.

An artefact folder can come from anyone, and the hash in its manifest only proves that a file has
not changed since. Before a command opens a file in its own process, a worker with limits on memory
and time reads it, checks the limits of graphs, loads it in ONNX Runtime and runs it on one sample
of zeros.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN
from saccade.core.worker import START_S, Limits, Worker, WorkerEnded
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import FileEntry, Manifest

_PROCESS = "saccade.exporter.graph.trial_process"
_GIB = 2**30
_WALL = 10  # times the CPU time, in case other processes use the CPU
_KNOWN: set[str] = set()  # SHA-256 of files that this process tried or wrote


@dataclass(frozen=True)
class Trial:
    """A file to try, with its entry in the manifest."""

    path: str
    file: FileEntry


@dataclass(frozen=True)
class Tried:
    """The hash of a file, and why it must not be opened."""

    sha256: str
    reason: str | None


def limits_for(file_bytes: int) -> Limits:
    """Return the limits for a file: memory for several copies of its weights, time to load it."""
    return Limits(memory_bytes=4 * _GIB + 8 * file_bytes, cpu_s=30 + round(60 * file_bytes / _GIB))


def tried(
    folder: ArtefactFolder, manifests: Iterable[Manifest], limits: Limits | None = None
) -> dict[str, str]:
    """Return the reasons why files of a folder cannot be opened within the limits, by file name.

    A file with a hash that this process already tried is skipped.
    """
    unknown = [manifest for manifest in manifests if manifest.file.sha256 not in _KNOWN]
    files = [(folder.path / manifest.file.name, manifest.file) for manifest in unknown]
    sizes = [file.total_bytes for path, file in files if path.is_file()]
    limits = limits or limits_for(max(sizes, default=0))
    timeout_s = max(START_S, _WALL * (limits.cpu_s or 0))
    wrong: dict[str, str] = {}
    with Worker(_PROCESS, limits) as worker:
        for path, file in files:
            try:
                answer = worker.ask(Trial(str(path.absolute()), file), Tried, timeout_s)
            except WorkerEnded as ended:
                wrong[path.name] = _too_much(path, str(ended), limits)
                continue
            if answer.reason is None:
                _KNOWN.add(answer.sha256)
            else:
                wrong[path.name] = answer.reason
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


def _too_much(path: Path, how: str, limits: Limits) -> str:
    memory = (limits.memory_bytes or 0) / _GIB
    return (
        f"{path}: the process that loaded it and ran one sample failed ({how}); the limits are "
        f"{limits.cpu_s} s of CPU time and {memory:.1f} GiB of memory. {AGAIN}"
    )
