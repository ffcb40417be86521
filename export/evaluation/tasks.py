# SPDX-License-Identifier: Apache-2.0
"""The tasks of `saccade evaluate`, of saccade itself and of families, with inputs and options."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from saccade.core.checks import check_one_of
from saccade.core.options import Options
from saccade.core.schema import Natural, Range
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.runtimes.runtime import DEFAULT, RuntimeName
from saccade.models.budget import BudgetLike
from saccade.models.data.options import DataOptions
from saccade.models.entry import EvaluationTask, imported
from saccade.models.families import entries, entry_of

Inputs = dict[str, dict[str, np.ndarray]]  # by role and name


def _task(
    module: str,
    function: str,
    roles: tuple[str, ...] = (),
    **functions: str,
) -> EvaluationTask:
    """Return a task of functions in modules of this package."""
    place = f"{__name__.rpartition('.')[0]}.{module}"
    named = {kind: f"{place}:{name}" for kind, name in functions.items()}
    return EvaluationTask(f"{place}:{function}", f"{place}:load_inputs", roles, **named)


# A task's name is that of its function, with hyphens.
_FUNCTIONS = (
    _task("classification", "top1", examples="labelled_examples", decide="decide"),
    _task("matching", "zero_shot", ("text",), examples="zero_shot_examples", decide="decide"),
    _task("matching", "retrieval", ("text",)),
    _task("classification", "knn"),
    _task("classification", "probe"),
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
    for name in entry.tasks:
        advice = "Correct its ENTRY, or declare the task in `own_tasks`."
        check_one_of(f"a task of family '{family}'", name, known, advice)
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
    chosen = name or next(iter(known), "")
    check_one_of(f"--task of {subject} (family '{family}')", chosen, known)
    return chosen, known[chosen]


def inputs_of(variant: VariantFiles, data: str, count: int, skip_bad: int = 0) -> Inputs:
    """Return the first samples of a variant's data as inputs of its components, by role.

    Shapes: each [n ...] with n at most `count`.
    Raises: SaccadeError if no data fits the variant.
    """
    task = next(iter(tasks_of(variant.main.variant.family).values()))
    load: Callable[[VariantFiles, str, int, int], Inputs] = imported(task.inputs)
    return load(variant, data, count, skip_bad)


if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[task_names()]

SampleLimit = Annotated[int, Range(2)]
SplitName = Literal["train", "validation", "val", "test", "all"]


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """How to score a checkpoint or the variants of an artefact folder."""

    # a name, or your own data: a folder, .npz, .csv, .jsonl, .json, .parquet or .tar (see
    # docs/data.md); default: the training data
    data: str | None = None
    # which samples to score; without splits of its own, data is split 70 % train, 10 % validation,
    # 20 % test. Default: test, or validation if the data has no test samples
    split: SplitName | None = None
    labels: Path | None = None  # names of the data's classes, one per line, in order
    data_root: Path | None = None  # folder in which a manifest's paths begin; default: its own
    skip_bad: Natural = 0  # leave out at most this many unreadable rows; they are counted
    background: tuple[int, ...] = (0,)  # values of masks that are background, such as 0,255
    task: TaskName | None = None  # default: the family's own
    budget: tuple[BudgetLike, ...] = ()  # only for a checkpoint; a folder is scored whole
    limit: SampleLimit | None = None  # score at most this many samples
    by_class: bool = False  # also score each class, and say for which others it is taken
    # do --by-class, and write the samples with wrong answers into this CSV file
    mistakes: Path | None = None
    templates: Path | None = None  # zero-shot prompts, one per line, with {} for the label
    # places of the objects; only for the task ari
    positions: Literal["anywhere", "left"] = "anywhere"
    # linear probe: logistic regression, or AdamW for 10 epochs (both CLIP's sweep), or DINO's SGD
    # on the class tokens of the last blocks
    probe: Literal["logistic", "adamw", "dino"] = "logistic"
    seed: int = 0  # seed of questions, captions, initial states and probes
    runtime: RuntimeName = DEFAULT  # runs the variants of a folder
    # for a folder: run custom ops with saccade's kernels; --no-op-library: run them as their ONNX
    # function bodies
    op_library: bool = True

    @property
    def asked(self) -> DataOptions:
        """Return the options of the user's data."""
        return DataOptions(self.labels, self.data_root, self.skip_bad, self.background)
