# SPDX-License-Identifier: Apache-2.0
"""The tasks of `saccade evaluate`, of saccade itself and of families, and the inputs of each."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.models.entry import EvaluationTask, imported
from saccade.models.families import entries, entry_of

Inputs = dict[str, dict[str, np.ndarray]]  # by role and name


def _task(
    module: str,
    function: str,
    roles: tuple[str, ...] = (),
    *,
    inputs: str | None = None,
    **functions: str,
) -> EvaluationTask:
    """Return a task of functions in modules of this package."""
    here = __name__.rpartition(".")[0]
    named = {kind: f"{here}.{module}:{name}" for kind, name in functions.items()}
    source = f"{here}.{inputs or module}:load_inputs"
    return EvaluationTask(f"{here}.{module}:{function}", source, roles, **named)


# A task's name is that of its function, with hyphens.
_FUNCTIONS = (
    _task("classification", "top1", examples="labelled_examples", decide="decide"),
    _task("matching", "zero_shot", ("text",), examples="zero_shot_examples", decide="decide"),
    _task("matching", "retrieval", ("text",)),
    _task("embedding", "knn", inputs="classification"),
    _task("embedding", "probe", inputs="classification"),
    _task("matching", "hard_negatives", ("text",)),
    _task(
        "segmentation",
        "ari",
        examples="ari_examples",
        segments="segments",
        scored_segments="masked_segments",
    ),
    _task(
        "segmentation",
        "reconstruction",
        ("decode",),
        examples="reconstruction_examples",
        segments="segments",
        scored_segments="painted_segments",
    ),
    _task("answering", "vqa", examples="vqa_examples", decide="decide"),
    _task("captioning", "caption", examples="caption_examples"),
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


def inputs_of(variant: VariantFiles, data: str, count: int) -> Inputs:
    """Return the first samples of a variant's data as inputs of its components, by role.

    Shapes: each [n ...] with n at most `count`.
    Raises: SaccadeError if no data fits the variant.
    """
    task = next(iter(tasks_of(variant.main.variant.family).values()))
    load: Callable[[VariantFiles, str, int], Inputs] = imported(task.inputs)
    return load(variant, data, count)
