# SPDX-License-Identifier: Apache-2.0
"""Score a checkpoint, or every variant of an exported folder, on data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError, require
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.report import render
from saccade.export.evaluation.subject import Subject, subjects_of, trained_on
from saccade.export.evaluation.tasks import task_asked
from saccade.export.runtimes.runtime import runtime_named
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


def evaluate(path: Path | str, options: EvaluateOptions) -> Evaluation:
    """The scores of a checkpoint or of the variants in a folder.

    Without data it is what the card says, or else the task's own.

    Raises: SaccadeError if there is neither, or the task or data do not fit the family.
    """
    path = Path(path)
    if path.is_file():
        require("torch", extra="export")
    else:
        runtime_named(options.runtime).require()
    subjects = subjects_of(path, options.budget, options.runtime, kernels=options.op_library)
    if options.data is None:
        options = replace(options, data=trained_on(path))
    found = []
    with progress("evaluate", len(subjects)) as advance:
        for subject in subjects:
            advance(0, note=subject.name)
            found.append(replace(_task(subject, options)(subject, options), ops=subject.ops))
            advance()
    return Evaluation(path, tuple(found))


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
