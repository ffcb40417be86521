# SPDX-License-Identifier: Apache-2.0
"""Export and score points, and collect those that passed in one artefact folder to measure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.core.progress import Advance
from saccade.core.worker import WorkerEnded, each_alone
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import SUFFIX
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.graph.trial import refuse_untried
from saccade.models.checkpoint import Checkpoint
from saccade.models.scores.results import EvaluationResult, Score
from saccade.serving.bench.sweep.options import SweepOptions
from saccade.serving.bench.sweep.point_process import PointTask, Refusal
from saccade.serving.bench.sweep.points import Point
from saccade.serving.bench.sweep.state import SweepFolder, link

_PROCESS = "saccade.serving.bench.sweep.point_process"


@dataclass(frozen=True)
class ReadyPoint:
    """A point with its variant and its score."""

    point: Point
    folder: ArtefactFolder  # artefacts of that point only
    result: EvaluationResult

    @property
    def variant(self) -> VariantFiles:
        """The only variant of the folder."""
        (variant,) = self.folder.variants
        return variant


def prepare(
    state: SweepFolder,
    points: Iterable[Point],
    checkpoint: Checkpoint,
    options: SweepOptions,
    advance: Advance,
) -> None:
    """Export and score missing points in separate processes; record those that fail.

    Raises: SaccadeError if such a process crashes, which says nothing about the point.
    """
    tasks = {}
    for point in points:
        if state.failure(point) or _is_prepared(state, point):
            advance(1, point.variant)
        else:
            tasks[point.variant] = _task(state, point, checkpoint, options)
    known = {point.variant: point for point in points}
    crashed = {}
    for name, outcome in each_alone(_PROCESS, tasks, Refusal, at_a_time=options.processes):
        if not isinstance(outcome, Refusal):
            crashed[name] = outcome
        elif outcome.reason:
            state.fail(known[name], outcome.stage, outcome.reason)
        advance(1, name)
    if crashed:
        raise _crash(crashed)


def _task(
    state: SweepFolder, point: Point, checkpoint: Checkpoint, options: SweepOptions
) -> PointTask:
    return PointTask(
        checkpoint=str(checkpoint.path),
        name=options.name,
        slots=str(options.slots) if options.slots else None,
        data=options.data,
        split=options.split,
        task=options.task,
        limit=options.limit,
        runtime=options.runtime,
        op_library=options.op_library,
        place=str(state.place(point)),
        folder=str(state.exported(point)),
        budget=point.budget,
        precision=point.precision,
    )


def _is_prepared(state: SweepFolder, point: Point) -> bool:
    return state.exported(point).is_dir() and state.read(point, "score") is not None


def _crash(crashed: Mapping[str, SaccadeError | WorkerEnded]) -> SaccadeError:
    first = next(iter(crashed.values()))
    how = f"failed: {first}"
    if isinstance(first, WorkerEnded):
        how = f"stopped ({first}): {first.last_words or 'it printed nothing'}."
    return SaccadeError(
        f"{', '.join(crashed)}: the process that exports and scores {how} Finished work is kept. "
        "Run the same command again, with --jobs 1 if memory was short."
    )


def ready_points(state: SweepFolder, points: Sequence[Point]) -> list[ReadyPoint]:
    """Return the points that have passed so far.

    Raises: SaccadeError if they were scored on different data.
    """
    candidates = []
    for point in points:
        if state.failure(point) is None:
            folder = ArtefactFolder(state.exported(point))
            folder.check_files()
            score = state.read(point, "score")
            assert score is not None
            candidates.append(ReadyPoint(point, folder, read_result(score)))
    if len({value.result.data_sha256 for value in candidates}) > 1:
        raise SaccadeError(
            f"{state.path}: its points were scored on different data, because the data changed "
            "after the sweep had started. Start again with --force."
        )
    return candidates


def collected(state: SweepFolder, ready: Sequence[ReadyPoint]) -> ArtefactFolder:
    """Return the sweep's artefact folder, with the files of these points and no others.

    Raises: SaccadeError if a file cannot be linked, or cannot be opened within the limits.
    """
    if ready:
        state.artefacts.mkdir(exist_ok=True)
        _discard_others(state.artefacts, ready)
    for candidate in ready:
        _collect(candidate, state.artefacts)
    folder = ArtefactFolder(state.artefacts)
    refuse_untried(folder, folder.manifests if ready else ())
    return folder


def read_result(content: dict[str, Any]) -> EvaluationResult:
    """Read what `point_process.as_json` wrote."""
    scores = tuple(
        Score(**{**score, "interval": score["interval"] and tuple(score["interval"])})
        for score in content["scores"]
    )
    return EvaluationResult(
        **{**content, "scores": scores, "samples": np.asarray(content["samples"])}
    )


def _collect(point: ReadyPoint, target: Path) -> None:
    source, parent = point.folder.path, point.variant.main.parent.name
    names = [parent]
    for component in point.variant.components.values():
        names += [file.name for file in component.file.files]
        names.append(component.variant.name + SUFFIX)
    for name in names:  # the manifest after its file: a reader never finds a manifest alone
        if not _is_same(source / name, target / name):
            link(source / name, target / name)
    if not (source / parent).samefile(target / parent):
        link(target / parent, source / parent)  # one copy of the checkpoint is enough


def _is_same(one: Path, other: Path) -> bool:
    if not other.exists():
        return False
    return one.samefile(other) or sha256_of(one) == sha256_of(other)


def _discard_others(artefacts: Path, candidates: Sequence[ReadyPoint]) -> None:
    kept = {
        component.variant.name
        for candidate in candidates
        for component in candidate.variant.components.values()
    }
    there = {path.name.removesuffix(SUFFIX) for path in artefacts.glob("*" + SUFFIX)}
    there |= {path.stem for path in artefacts.glob("*.onnx")}  # even if its manifest is gone
    for name in sorted(there - kept):
        (artefacts / (name + SUFFIX)).unlink(missing_ok=True)
        for path in artefacts.glob(f"{name}.onnx*"):  # with its data file
            path.unlink()
