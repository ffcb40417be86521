# SPDX-License-Identifier: Apache-2.0
"""Score a checkpoint, or every variant of an exported folder, on data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.machine import cores
from saccade.core.progress import Report, bar, progress_of, reporting
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.variant import check_budgets
from saccade.exporter.evaluation.evaluated_model import (
    EvaluatedModel,
    subjects_of_checkpoint,
    subjects_of_folder,
    trained_on,
)
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.report import render
from saccade.exporter.evaluation.tasks import task_asked
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.checkpoint_folder import checkpoint_file
from saccade.models.data.loaded_once import loaded_once
from saccade.models.entry import imported
from saccade.models.scores.results import EvaluationResult


@dataclass(frozen=True)
class Evaluation:
    """The evaluation results of each variant."""

    path: Path
    results: tuple[EvaluationResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": str(self.path), "found": [result.to_dict() for result in self.results]}

    def to_text(self) -> Any:
        """Return a table with a row per score, for a terminal."""
        return render(self.results)


def evaluate(
    path: ArtefactFolder | Path | str,
    options: EvaluateOptions,
    *,
    progress: Report | None = bar,
) -> Evaluation:
    """Score a checkpoint, or every variant in an artefact folder.

    If no data is given, the data in the checkpoint's card is used, or else the task's default.

    Raises: SaccadeError if there is neither, or if the task or data do not fit the family.
    """
    with reporting(progress):
        return _evaluated(path, options)


def _evaluated(path: ArtefactFolder | Path | str, options: EvaluateOptions) -> Evaluation:
    if isinstance(path, ArtefactFolder) or checkpoint_file(path).is_dir():
        folder, runtime = ArtefactFolder.open(path), runtime_named(options.runtime)
        runtime.require()
        models = subjects_of_folder(folder, runtime, kernels=options.op_library, threads=cores())
        results = scores_of(models, options, lambda: folder.checkpoint)
        return Evaluation(folder.path, results)
    checkpoint = load(path, check=partial(check_budgets, given=options.budget))
    models = subjects_of_checkpoint(checkpoint, options.budget)
    return Evaluation(checkpoint.path, scores_of(models, options, lambda: checkpoint))


def scores_of(
    models: Sequence[EvaluatedModel],
    options: EvaluateOptions,
    checkpoint: Callable[[], Checkpoint | None],
) -> tuple[EvaluationResult, ...]:
    """Run the task for each model, on the user's data loaded once for all of them.

    The checkpoint is read only if no data is given.

    Raises: SaccadeError if the task or data do not fit the family.
    """
    if options.data is None:
        options = replace(options, data=trained_on(checkpoint()))
    results = []
    with progress_of("evaluate", len(models)) as advance, loaded_once():
        for model in models:
            advance(0, note=model.name)
            results.append(replace(_task(model, options)(model, options), ops=model.ops))
            advance()
    return tuple(results)


def _task(
    model: EvaluatedModel, options: EvaluateOptions
) -> Callable[[EvaluatedModel, EvaluateOptions], EvaluationResult]:
    name, chosen = task_asked(model.family, options.task, model.name, model.components)
    if options.positions != "anywhere" and name != "ari":
        raise SaccadeError(
            f"--positions {options.positions}: only the task ari supports this option, not "
            f"'{name}'. Leave it out."
        )
    if options.probe != "logistic" and name != "probe":
        raise SaccadeError(
            f"--probe {options.probe}: only the task probe supports this option, not '{name}'. Add "
            "--task probe, or leave it out."
        )
    task: Callable[[EvaluatedModel, EvaluateOptions], EvaluationResult] = imported(chosen.score)
    return task
