# SPDX-License-Identifier: Apache-2.0
"""Options of a calibration."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from saccade.core.errors import SaccadeError
from saccade.core.options import Options
from saccade.core.schema import BelowOne, Natural, Range
from saccade.exporter.runtimes.runtime import DEFAULT, RuntimeName

MOST_STEPS = 4
MIN_ARI = 0.95  # about 1.5 % of a tetrominoes scene's positions go to another slot
Against = Literal["full", "labels"]
Split = Literal["train", "validation", "val", "test", "all"]
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,47}")


@dataclass(frozen=True)
class CalibrateOptions(Options):
    """The data and the risks for which policies are certified."""

    # a data set's name, or your own data in any format of docs/data.md, also images without labels;
    # it must be like the traffic; default: the data that the checkpoint was trained on
    data: str | None = None
    split: Split = "test"  # which part of the data to use, not one that the model was trained on
    # other data that chooses the chains; then all samples of --data certify them
    choose_data: str | None = None
    # the split that chooses, of --choose-data or else of --data; default: all of --choose-data, or
    # a part of --split
    choose_split: Split | None = None
    labels: Path | None = None  # names of the data's classes, one per line, in order
    data_root: Path | None = None  # folder in which a manifest's paths begin; default: its own
    skip_bad: Natural = 0  # leave out at most this many unreadable rows
    # largest share of lost answers; each value gives a policy
    risk: tuple[BelowOne, ...] = (0.01,)
    # how certain it must be that a policy keeps its risk
    confidence: Annotated[float, Range(0.5, 1, below=True)] = 0.95
    # when an answer counts as lost: if it differs from the full model's (full), or if it is wrong
    # and the full model's is right (labels)
    against: Against = "full"
    # for segmentations: the smallest adjusted Rand index with the full model's at which an answer
    # counts as the same; default: 0.95
    min_ari: Annotated[float, Range(0, 1, above=True)] | None = None
    # certify embeddings: an answer is lost if the nearest neighbor in an index is not that of the
    # full model's embedding. Half of the images fit linear maps between the variants' spaces
    embedding: bool = False
    # with --embedding: your own vectors of the full model as the index, .npy, .npz or .parquet;
    # default: the embeddings of the images that fit the maps
    against_index: Path | None = None
    # with --embedding: a map is used if it finds this share of the nearest neighbors
    min_recall: Annotated[float, Range(0, 1)] = 0.5
    # also certify the risk of each class with enough samples on its own; all answers of the other
    # classes come from the full model
    per_class: bool = False
    # largest number of variants that one sample may go through
    steps: Annotated[int, Range(1, MOST_STEPS)] = 3
    name: str = "auto"  # name of the policy; with several risks, the risk is appended
    limit: int | None = None  # largest number of samples
    templates: Path | None = None  # zero-shot prompts, one per line, with {} for the label
    device: str | None = None  # the device whose measured speeds to use, if there are several
    seed: int = 0  # seed of the order of the samples
    runtime: RuntimeName = DEFAULT  # the runtime that runs the variants
    # run custom ops with our kernels; --no-op-library: run custom ops by their ONNX function bodies
    op_library: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("split", "choose_split"):
            if getattr(self, name) == "val":
                object.__setattr__(self, name, "validation")
        check_policy_name(self.name)
        if self.against_index and not self.embedding:
            raise SaccadeError(
                "--against-index: is about embeddings. Pass --embedding, or drop it."
            )
        if self.embedding and (self.against == "labels" or self.per_class):
            raise SaccadeError(
                f"--{'per-class' if self.per_class else 'against labels'}: embeddings have no "
                "classes. With --embedding, an answer is lost if its nearest neighbor is not the "
                "full model's. Drop one of the two."
            )
        names = {check_policy_name(self.policy_name(risk)) for risk in self.risk}
        if not self.risk or len(names) < len(self.risk):
            found = ",".join(map(str, self.risk)) or "empty"
            raise SaccadeError(
                f"--risk is {found}, expected one or more different risks of at most six digits, "
                "which become part of their policies' names. Pass each of them once."
            )
        if (
            self.choose_data is None
            and self.choose_split is not None
            and ("all" in (self.split, self.choose_split) or self.split == self.choose_split)
        ):
            raise SaccadeError(
                f"--choose-split is {self.choose_split} and --split is {self.split}, expected two "
                "splits that share no sample: a sample that chose cannot certify. Pass, for "
                "example, --choose-split validation --split test, or other data by --choose-data."
            )

    def policy_name(self, risk: float) -> str:
        """Return the name of the policy of one of the risks."""
        return self.name if len(self.risk) == 1 else name_by_risk(self.name, risk)


def name_by_risk(name: str, risk: float) -> str:
    """Return the name of a policy of a calibration with several risks."""
    return f"{name}-{risk:g}"


def check_policy_name(name: str) -> str:
    """Return the name if files and requests may carry it.

    Raises: SaccadeError otherwise.
    """
    if not _NAME.fullmatch(name):
        raise SaccadeError(
            f"--name is {name!r:.80}, expected 1 to 48 characters of a-z, 0-9, '.', '_' and '-', "
            "of which the first is a letter or digit. Pass another name."
        )
    return name
