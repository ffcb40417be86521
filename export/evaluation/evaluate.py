# SPDX-License-Identifier: Apache-2.0
"""Score a checkpoint, or every variant of an exported folder, on data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError, require
from saccade.export.artefact.folder import ArtefactFolder
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.report import render
from saccade.export.evaluation.subject import (
    Subject,
    subjects_of_checkpoint,
    subjects_of_folder,
    trained_on,
)
from saccade.export.evaluation.tasks import task_asked
from saccade.export.runtimes.runtime import runtime_named
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.entry import imported
from saccade.models.scores.results import Found
from saccade.progress import progress


@dataclass(frozen=True)
class Evaluation:
    """What was found of each variant."""

    path: Path
    found: tuple[Found, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"path": str(self.path), "found": [each.to_dict() for each in self.found]}

    def to_text(self) -> Any:
        """A row for each score, for a terminal."""
        return render(self.found)


def evaluate(path: ArtefactFolder | Path | str, options: EvaluateOptions) -> Evaluation:
    """The scores of a checkpoint or of the variants in a folder.

    Without data it is what the card says, or else the task's own.

    Raises: SaccadeError if there is neither, or the task or data do not fit the family.
    """
    if isinstance(path, ArtefactFolder) or Path(path).is_dir():
        folder, runtime = ArtefactFolder.open(path), runtime_named(options.runtime)
        runtime.require()
        subjects = subjects_of_folder(folder, runtime, kernels=options.op_library)
        found = scores_of(subjects, options, lambda: folder.checkpoint)
        return Evaluation(folder.path, found)
    require("torch", extra="export")
    checkpoint = load(path)
    subjects = subjects_of_checkpoint(checkpoint, options.budget)
    return Evaluation(checkpoint.path, scores_of(subjects, options, lambda: checkpoint))


def scores_of(
    subjects: Sequence[Subject],
    options: EvaluateOptions,
    checkpoint: Callable[[], Checkpoint | None],
) -> tuple[Found, ...]:
    """What the task finds of each; the checkpoint is read where no data is named.

    Raises: SaccadeError if the task or data do not fit the family.
    """
    if options.data is None:
        options = replace(options, data=trained_on(checkpoint()))
    found = []
    with progress("evaluate", len(subjects)) as advance:
        for subject in subjects:
            advance(0, note=subject.name)
            found.append(replace(_task(subject, options)(subject, options), ops=subject.ops))
            advance()
    return tuple(found)


def _task(
    subject: Subject, options: EvaluateOptions
) -> Callable[[Subject, EvaluateOptions], Found]:
    name, chosen = task_asked(subject.family, options.task, subject.name, subject.parts)
    if options.positions != "anywhere" and name != "ari":
        raise SaccadeError(
            f"--positions {options.positions}: task '{name}' has objects anywhere. "
            "Leave it out; only the task ari can choose where they are."
        )
    task: Callable[[Subject, EvaluateOptions], Found] = imported(chosen.score)
    return task
