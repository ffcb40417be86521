# SPDX-License-Identifier: Apache-2.0
"""Score a checkpoint, or every variant of an exported folder, on data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError, require
from saccade.exporter.artefact.folder import ArtefactFolder
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
from saccade.models.entry import imported
from saccade.models.scores.results import EvaluationResult
from saccade.progress import progress


@dataclass(frozen=True)
class Evaluation:
    """Results of each variant's evaluation."""

    path: Path
    results: tuple[EvaluationResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"path": str(self.path), "found": [result.to_dict() for result in self.results]}

    def to_text(self) -> Any:
        """A row for each score, for a terminal."""
        return render(self.results)


def evaluate(path: ArtefactFolder | Path | str, options: EvaluateOptions) -> Evaluation:
    """The scores of a checkpoint or of the variants in a folder.

    Without data it is what the card says, or else the task's own.

    Raises: SaccadeError if there is neither, or the task or data do not fit the family.
    """
    if isinstance(path, ArtefactFolder) or Path(path).is_dir():
        folder, runtime = ArtefactFolder.open(path), runtime_named(options.runtime)
        runtime.require()
        models = subjects_of_folder(folder, runtime, kernels=options.op_library)
        results = scores_of(models, options, lambda: folder.checkpoint)
        return Evaluation(folder.path, results)
    require("torch", extra="export")
    checkpoint = load(path)
    models = subjects_of_checkpoint(checkpoint, options.budget)
    return Evaluation(checkpoint.path, scores_of(models, options, lambda: checkpoint))


def scores_of(
    models: Sequence[EvaluatedModel],
    options: EvaluateOptions,
    checkpoint: Callable[[], Checkpoint | None],
) -> tuple[EvaluationResult, ...]:
    """Results of the task for each model; the checkpoint is read where no data is named.

    Raises: SaccadeError if the task or data do not fit the family.
    """
    if options.data is None:
        options = replace(options, data=trained_on(checkpoint()))
    results = []
    with progress("evaluate", len(models)) as advance:
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
            f"--positions {options.positions}: task '{name}' has objects anywhere. "
            "Leave it out; only the task ari can choose where they are."
        )
    task: Callable[[EvaluatedModel, EvaluateOptions], EvaluationResult] = imported(chosen.score)
    return task
