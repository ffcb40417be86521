# SPDX-License-Identifier: Apache-2.0
"""ONNX files opened for the first time: in a process that may die of them.

An artefact folder can come from anybody, and the hash in its manifest says only that nothing was
changed since. So each file is read, held against `graph_limits`, loaded by ONNX Runtime and asked
one sample of zeros in a worker with limits of memory and time, before the process of the command
opens it.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.export.artefact.folder import ArtefactFolder
from saccade.export.artefact.manifest import Manifest
from saccade.worker import Limits, Worker

_PROCESS = "saccade.export.graph.trial_process"
_GIB = 2**30
_START_S = 120.0  # a busy machine may take long to start Python
_WALL = 10  # times the processor time: the same work while others have the processor
_AGAIN = "Export it again with: saccade export CHECKPOINT"
_KNOWN: set[str] = set()  # SHA-256 of files that this process has tried or written


def limits_for(file_bytes: int) -> Limits:
    """What one file may use: of memory some copies of its weights, of time what loading takes."""
    return Limits(memory_bytes=4 * _GIB + 8 * file_bytes, cpu_s=30 + round(60 * file_bytes / _GIB))


def tried(
    folder: ArtefactFolder, manifests: Iterable[Manifest], limits: Limits | None = None
) -> dict[str, str]:
    """By file name, what is wrong with a folder's files that cannot be opened within the limits.

    Bytes that this process knows by their hash are not tried again.
    """
    unknown = [each for each in manifests if each.file.sha256 not in _KNOWN]
    paths = [folder.path / each.file.name for each in unknown]
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    limits = limits or limits_for(max(sizes, default=0))
    wrong: dict[Path, str] = {}
    start = 0
    while start < len(paths):
        start = _run(paths, start, limits, wrong)
    return {path.name: reason for path, reason in wrong.items()}


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


def _run(paths: Sequence[Path], start: int, limits: Limits, wrong: dict[Path, str]) -> int:
    """One worker, from a file on; the file to go on with."""
    files = [str(path.absolute()) for path in paths[start:]]
    at = start
    with closing(Worker(_PROCESS, {"files": files}, limits)) as worker:
        try:
            begun = worker.receive(_START_S)
            while begun is not None:
                at = start + int(begun["begins"])
                done = worker.receive(max(_START_S, _WALL * (limits.cpu_s or 0)))
                if done is None:
                    wrong[paths[at]] = _too_much(paths[at], worker.ending(), limits)
                    return at + 1
                if done["reason"] is None:
                    _KNOWN.add(done["sha256"])
                else:
                    wrong[paths[at]] = str(done["reason"])
                begun = worker.receive(_START_S)
                at += 1
        except TimeoutError as error:
            wrong[paths[at]] = _too_much(paths[at], str(error), limits)
            return at + 1
        if at < len(paths):
            raise SaccadeError(
                f"{paths[at]}: the process that tries ONNX files ended before it "
                f"({worker.ending()}). {worker.last_words} Try again."
            )
    return at


def _too_much(path: Path, how: str, limits: Limits) -> str:
    memory = (limits.memory_bytes or 0) / _GIB
    return (
        f"{path}: loading it and asking it one sample ended the process that tried ({how}); "
        f"allowed are {limits.cpu_s} s and {memory:.1f} GiB. {_AGAIN}"
    )
