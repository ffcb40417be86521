# SPDX-License-Identifier: Apache-2.0
"""The points of a sweep: each budget at each precision, exported, scored, and built.

That happens in worker processes, which run `main`; a half that is done already is skipped.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of, write_atomically
from saccade.core.progress import Advance
from saccade.core.schema import typed
from saccade.core.worker import WorkerEnded, each_alone
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import SUFFIX, VariantFiles
from saccade.exporter.artefact.variant import (
    budget_option,
    choose_budgets,
    default_model_name,
    variant_name,
)
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.export import export
from saccade.exporter.export_options import ExportOptions
from saccade.exporter.graph.trial import refuse_untried
from saccade.exporter.runtimes.runtime import BuildOptions, Runtime, build
from saccade.models.checkpoint import Checkpoint
from saccade.models.scores.results import EvaluationResult, Score
from saccade.serving.bench.options import SweepOptions
from saccade.serving.bench.sweep.state import Failure, Point, SweepFolder, link


@dataclass(frozen=True)
class PointTask:
    """A point to export and score, and the folder for its files."""

    checkpoint: str
    name: str | None
    slots: str | None
    evaluation: EvaluateOptions
    place: str
    budget: str
    precision: str


@dataclass(frozen=True)
class Refusal:
    """Why a point was refused and at which stage; both are empty if it passed."""

    stage: str = ""
    reason: str = ""


def main(task: PointTask) -> Refusal:
    """Do what is missing. A refusal of the point is an answer; any other error is raised."""
    place = Path(task.place)
    folder, score = place / "export", place / "score.json"
    stage = "export"
    try:
        if not folder.exists():
            options = ExportOptions(
                folder,
                name=task.name,
                budget=(task.budget,),
                slots=Path(task.slots) if task.slots else None,
                precision=(task.precision,),
            )
            export(Path(task.checkpoint), options)
        stage = "score"
        if not score.exists():
            (result,) = evaluate(folder, task.evaluation).results
            write_atomically(score, json.dumps(as_json(result)).encode())
    except SaccadeError as error:
        if isinstance(error.__cause__, OSError):  # a full disk says nothing about the point
            raise
        return Refusal(stage, str(error))
    return Refusal()


def as_json(result: EvaluationResult) -> dict[str, Any]:
    """Return a score with each sample's value, as a sweep stores it."""
    return {**asdict(result), "samples": [float(value) for value in result.samples]}


def read_result(content: dict[str, Any]) -> EvaluationResult:
    """Read what `as_json` returned."""
    scores = typed(tuple[Score, ...], content["scores"], "score.json: ")
    return EvaluationResult(
        **{**content, "scores": scores, "samples": np.asarray(content["samples"])}
    )


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


def points_of(checkpoint: Checkpoint, options: SweepOptions) -> tuple[Point, ...]:
    """Return the points of a sweep: largest budget first, precisions in the given order.

    Raises: SaccadeError for a budget that the family does not have.
    """
    model: Any = checkpoint.build()
    name = options.name or default_model_name(checkpoint.path)
    return tuple(
        Point(
            variant=variant_name(name, "", budget.label, precision),
            setting=budget.label,
            precision=precision,
            budget=budget_option(budget.label, budget.share),
        )
        for budget in choose_budgets(model, options.budget)
        for precision in options.precision
    )


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
    missing = {}
    for point in points:
        exported = state.exported(point).is_dir() and state.read(point, "score") is not None
        if exported or state.failure(point):
            advance(1, point.variant)
        else:
            missing[point.variant] = point
    tasks = {
        name: PointTask(
            checkpoint=str(checkpoint.path),
            name=options.name,
            slots=str(options.slots) if options.slots else None,
            evaluation=options.evaluation(),
            place=str(state.place(point)),
            budget=point.budget,
            precision=point.precision,
        )
        for name, point in missing.items()
    }
    crashed = {}
    for name, outcome in each_alone(__name__, tasks, Refusal, at_a_time=options.processes):
        if not isinstance(outcome, Refusal):
            crashed[name] = outcome
        elif outcome.reason:
            state.fail(missing[name], outcome.stage, outcome.reason)
        advance(1, name)
    if crashed:
        raise _crash(crashed)


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
    ready = []
    for point in points:
        if state.failure(point) is None:
            folder = ArtefactFolder(state.exported(point))
            folder.check_files()
            ready.append(ReadyPoint(point, folder, read_result(state.finished(point, "score"))))
    # The hash of image files is that of their pixels in a variant's own size.
    seen = {(one.variant.preprocessing, one.result.data_sha256) for one in ready}
    if len(seen) > len({preprocessing for preprocessing, _ in seen}):
        raise SaccadeError(
            f"{state.path}: its points were scored on different data, because the data changed "
            "after the sweep had started. Start again with --force."
        )
    return ready


def collected(state: SweepFolder, ready: Sequence[ReadyPoint]) -> ArtefactFolder:
    """Return the sweep's artefact folder, with the files of these points and no others.

    Raises: SaccadeError if a file cannot be linked, or cannot be opened within the limits.
    """
    if ready:
        state.artefacts.mkdir(exist_ok=True)
        _discard_others(state.artefacts, ready)
    for one in ready:
        _collect(one, state.artefacts)
    folder = ArtefactFolder(state.artefacts)
    refuse_untried(folder, folder.manifests if ready else ())
    return folder


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


def _discard_others(artefacts: Path, ready: Sequence[ReadyPoint]) -> None:
    kept = {
        component.variant.name for one in ready for component in one.variant.components.values()
    }
    there = {path.name.removesuffix(SUFFIX) for path in artefacts.glob("*" + SUFFIX)}
    there |= {path.stem for path in artefacts.glob("*.onnx")}  # even if its manifest is gone
    for name in sorted(there - kept):
        (artefacts / (name + SUFFIX)).unlink(missing_ok=True)
        for path in artefacts.glob(f"{name}.onnx*"):  # with its data file
            path.unlink()


def build_engines(
    state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime, *, retry: bool
) -> None:
    """Build an engine for each point; record a refusal, which does not fail the point itself."""
    name = f"engine-{runtime.name}"
    for one in ready:
        if retry:
            state.forgive(one.point, f"{name}-failed")
        out = state.place(one.point) / name
        built = out.is_dir() and state.read(one.point, name)
        if built or state.read(one.point, f"{name}-failed"):
            continue
        try:
            made = build(one.folder, BuildOptions(engine=runtime.name, out=out, force=True))
        except SaccadeError as error:
            state.write(one.point, f"{name}-failed", {"reason": str(error)})
        else:
            state.write(one.point, name, {"engine": runtime.name, "plans": made.files()})


def collect_engines(
    state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime
) -> tuple[list[dict[str, Any]], list[Failure]]:
    """Link the engines into the artefact folder, as `saccade build` does.

    Return a description of each, and of those that were refused.
    """
    rows, failures, name = [], [], f"engine-{runtime.name}"
    for one in ready:
        point = one.point
        if refused := state.read(point, f"{name}-failed"):
            reason = f"{runtime.name}: {refused['reason']}"
            failures.append(Failure(point.variant, point.setting, point.precision, "build", reason))
        if (built := state.read(point, name)) is None:
            continue
        capabilities = "+".join(built["plans"][0]["compute_capabilities"])
        place = state.artefacts / "engines" / f"{runtime.name}-{capabilities}"
        place.mkdir(parents=True, exist_ok=True)
        for path in (state.place(point) / name).iterdir():
            if path.is_file():
                link(path, place / path.name)
        rows += [
            {"variant": one.variant.name, "engine": runtime.name, **plan} for plan in built["plans"]
        ]
    return rows, failures
