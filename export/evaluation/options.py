# SPDX-License-Identifier: Apache-2.0
"""Options of an evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from saccade.core.options import Options
from saccade.core.schema import Natural, Range
from saccade.exporter.evaluation.tasks import task_names
from saccade.exporter.runtimes.runtime import DEFAULT, RuntimeName
from saccade.models.budget import BudgetLike
from saccade.models.data.asked import DataAsked

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
    templates: Path | None = None  # zero-shot prompts, one per line, with {} for the label
    positions: Literal["anywhere", "left"] = "anywhere"  # of objects; only for the task ari
    # linear probe: logistic regression, or AdamW for 10 epochs (both CLIP's sweep), or DINO's SGD
    # on the class tokens of the last blocks
    probe: Literal["logistic", "adamw", "dino"] = "logistic"
    seed: int = 0  # for questions, captions, initial states and probes
    runtime: RuntimeName = DEFAULT  # runs the variants of a folder
    # for a folder: run custom ops with saccade's kernels; --no-op-library: run them as their ONNX
    # function bodies
    op_library: bool = True

    @property
    def asked(self) -> DataAsked:
        """Return the options of the user's data."""
        return DataAsked(self.labels, self.data_root, self.skip_bad, self.background)
