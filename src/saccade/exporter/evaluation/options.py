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
    """On what a checkpoint or the variants of a folder are scored."""

    data: str | None = None  # a name, a folder or an .npz; none: what it learned
    task: TaskName | None = None  # none: the family's own
    budget: tuple[BudgetLike, ...] = ()  # of a checkpoint; a folder is scored whole
    limit: int | None = None  # samples at most
    templates: Path | None = None  # prompts of zero-shot, one a line, with {} for the label
    positions: Literal["anywhere", "left"] = "anywhere"  # of objects, for ari
    seed: int = 0  # of questions, captions and initial states
    runtime: RuntimeName = DEFAULT  # what runs the variants of a folder
    op_library: bool = True  # of a folder: custom ops by our kernels, else by function bodies

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit is not None and self.limit < 2:
            raise SaccadeError(f"--limit is {self.limit}, expected at least 2.")
