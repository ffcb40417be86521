# SPDX-License-Identifier: Apache-2.0
"""The tasks of `saccade evaluate`: saccade's own and those that a family defines."""

from collections.abc import Collection
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.entry import EvaluationTask
from saccade.models.families import entries, entry_of

_HERE = "saccade.exporter.evaluation"
_LABELLED = f"{_HERE}.classification:load_inputs"
_CAPTIONED = f"{_HERE}.captioning:load_inputs"
_SCENES = f"{_HERE}.segmentation:load_inputs"
_ASKED = f"{_HERE}.answering:load_inputs"
_PAIRED = f"{_HERE}.matching:load_inputs"
_TOWERS = ("text",)
# A task's name is that of its function, with hyphens.
_FUNCTIONS = (
    EvaluationTask(
        f"{_HERE}.classification:top1",
        _LABELLED,
        (),
        f"{_HERE}.classification:labelled_examples",
        f"{_HERE}.classification:decide",
    ),
    EvaluationTask(
        f"{_HERE}.matching:zero_shot",
        _PAIRED,
        _TOWERS,
        f"{_HERE}.matching:zero_shot_examples",
        f"{_HERE}.matching:decide",
    ),
    EvaluationTask(f"{_HERE}.matching:retrieval", _PAIRED, _TOWERS),
    EvaluationTask(f"{_HERE}.embedding:knn", _LABELLED),
    EvaluationTask(f"{_HERE}.embedding:probe", _LABELLED),
    EvaluationTask(f"{_HERE}.matching:hard_negatives", _PAIRED, _TOWERS),
    EvaluationTask(
        f"{_HERE}.segmentation:ari",
        _SCENES,
        (),
        f"{_HERE}.segmentation:ari_examples",
        segments=f"{_HERE}.segmentation:segments",
        scored_segments=f"{_HERE}.segmentation:masked_segments",
    ),
    EvaluationTask(
        f"{_HERE}.segmentation:reconstruction",
        _SCENES,
        ("decode",),
        f"{_HERE}.segmentation:reconstruction_examples",
        segments=f"{_HERE}.segmentation:segments",
        scored_segments=f"{_HERE}.segmentation:painted_segments",
    ),
    EvaluationTask(
        f"{_HERE}.answering:vqa",
        _ASKED,
        (),
        f"{_HERE}.answering:vqa_examples",
        f"{_HERE}.answering:decide",
    ),
    EvaluationTask(
        f"{_HERE}.captioning:caption", _CAPTIONED, (), f"{_HERE}.captioning:caption_examples"
    ),
)
TASKS = {task.score.partition(":")[2].replace("_", "-"): task for task in _FUNCTIONS}


def task_names() -> tuple[str, ...]:
    """Return the names of all tasks of all families."""
    own = [name for _, entry in entries() for name in entry.own_tasks]
    return tuple(dict.fromkeys((*TASKS, *own)))


def tasks_of(family: str, roles: Collection[str] | None = None) -> dict[str, EvaluationTask]:
    """Return the tasks of a family, its default first; with `roles`, those for these components.

    Raises: SaccadeError if there is no such family, or it names an unknown task.
    """
    entry = entry_of(family)
    known = {**TASKS, **entry.own_tasks}
    if unknown := [name for name in entry.tasks if name not in known]:
        raise SaccadeError(
            f"family '{family}' names the unknown task {unknown[0]!r}, expected some of "
            f"{', '.join(known)}. Correct its ENTRY, or declare the task in `own_tasks`."
        )
    tasks = {name: known[name] for name in entry.tasks}
    if roles is None:
        return tasks
    return {name: task for name, task in tasks.items() if set(task.roles) <= set(roles)}


def task_asked(
    family: str, name: str | None, subject: Any, roles: Collection[str] | None = None
) -> tuple[str, EvaluationTask]:
    """Return the task `name`, or the family's default; `subject` is the model's name in errors.

    Raises: SaccadeError if the family does not support the task.
    """
    known = tasks_of(family, roles)
    chosen = name or next(iter(known), None)
    if chosen not in known:
        raise SaccadeError(
            f"--task {chosen}: {subject} is of family '{family}', which supports "
            f"{', '.join(known) or 'no task'}. Choose one of them."
        )
    return chosen, known[chosen]
