# SPDX-License-Identifier: Apache-2.0
"""Options of an evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from saccade.errors import SaccadeError
from saccade.exporter.evaluation.tasks import task_names
from saccade.exporter.runtimes.runtime import DEFAULT, RuntimeName
from saccade.models.budget import BudgetLike
from saccade.path_fields import PathFields

if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[task_names()]


@dataclass(frozen=True)
class EvaluateOptions(PathFields):
    """How to score a checkpoint or the variants of an artefact folder."""

    data: str | None = None  # a name, a folder or an .npz; default: the training data
    task: TaskName | None = None  # default: the family's own
    budget: tuple[BudgetLike, ...] = ()  # only for a checkpoint; a folder is scored whole
    limit: int | None = None  # score at most this many samples
    templates: Path | None = None  # zero-shot prompts, one per line, with {} for the label
    positions: Literal["anywhere", "left"] = "anywhere"  # of objects; only for the task ari
    seed: int = 0  # for questions, captions and initial states
    runtime: RuntimeName = DEFAULT  # runs the variants of a folder
    # for a folder: run custom ops with saccade's kernels; --no-op-library: run them as their ONNX
    # function bodies
    op_library: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit is not None and self.limit < 2:
            raise SaccadeError(f"--limit is {self.limit}, expected at least 2.")
