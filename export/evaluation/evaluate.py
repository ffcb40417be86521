# SPDX-License-Identifier: Apache-2.0
"""Score a checkpoint, or every variant of an exported folder, on data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError, require
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.results import Found
from saccade.export.evaluation.subject import Subject, subjects_of, trained_on
from saccade.export.runtimes.runtime import runtime_named
from saccade.progress import progress

_TASKS = {
    "top1": "classification:top1",
    "zero-shot": "matching:zero_shot",
    "retrieval": "matching:retrieval",
    "knn": "embedding:knn",
    "probe": "embedding:probe",
    "hard-negatives": "matching:hard_negatives",
    "ari": "segmentation:ari",
    "vqa": "answering:vqa",
    "caption": "captioning:caption",
}
# What a family can be asked, its own score first.
TASKS_OF = {
    "nac": ("top1", "knn", "probe"),
    "sot": ("top1", "knn", "probe"),
    "sparo": ("zero-shot", "retrieval", "hard-negatives", "knn", "probe"),
    "slot-attention": ("ari",),
    "vqa": ("vqa",),
    "captioner": ("caption",),
}


@dataclass(frozen=True)
class Evaluation:
    """What was found of each variant."""

    path: Path
    found: tuple[Found, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"path": str(self.path), "found": [each.to_dict() for each in self.found]}


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
    known = TASKS_OF[subject.family]
    if subject.family == "sparo" and "text" not in subject.parts:
        known = ("knn", "probe")
    name = options.task or known[0]
    if name not in known:
        raise SaccadeError(
            f"--task {name}: {subject.name} is of family '{subject.family}', which can be asked "
            f"{', '.join(known)}. Choose one of them."
        )
    if options.positions != "anywhere" and name != "ari":
        raise SaccadeError(
            f"--positions {options.positions}: task '{name}' has objects anywhere. "
            "Leave it out; only the task ari can choose where they are."
        )
    module, function = _TASKS[name].split(":")
    task: Callable[[Subject, EvaluateOptions], Found] = getattr(
        import_module(f"saccade.export.evaluation.{module}"), function
    )
    return task
