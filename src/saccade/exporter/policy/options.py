# SPDX-License-Identifier: Apache-2.0
"""Options of a calibration."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.errors import SaccadeError
from saccade.exporter.runtimes.runtime import DEFAULT, RuntimeName
from saccade.path_fields import PathFields

MOST_STEPS = 4
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,47}")


@dataclass(frozen=True)
class CalibrateOptions(PathFields):
    """On what the policies are certified, and for which risks."""

    data: str | None = None  # a name, a folder or an .npz, like the traffic; none: what it learned
    split: Literal["train", "validation", "test", "all"] = "test"  # of the data
    risk: tuple[float, ...] = (0.01,)  # at most this share of answers may be lost; one policy each
    confidence: float = 0.95  # that a policy's risk is what it says
    # an answer is lost if it is not the full model's, or if it is wrong where that one is right
    against: Literal["full", "labels"] = "full"
    steps: int = 3  # variants that a sample is put to at most
    name: str = "auto"  # of the policy; with several risks, name-risk
    limit: int | None = None  # samples at most
    templates: Path | None = None  # prompts of zero-shot, one per line, with {} for the label
    device: str | None = None  # whose speeds count, if the frontier has those of several
    seed: int = 0  # of the order of the samples
    runtime: RuntimeName = DEFAULT  # what runs the variants
    # run custom ops by our kernels; --no-op-library: run custom ops by their ONNX function bodies
    op_library: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy_name(self.name)
        for risk in self.risk:
            if not 0 <= risk < 1:
                raise SaccadeError(
                    f"--risk is {risk:g}, expected a share of at least 0 and below 1, such as 0.01."
                )
        if not self.risk or len(set(self.risk)) < len(self.risk):
            raise SaccadeError("--risk: expected one or more risks, each of them once.")
        if not 0.5 <= self.confidence < 1:
            raise SaccadeError(
                f"--confidence is {self.confidence:g}, expected at least 0.5 and below 1, such as "
                "0.95."
            )
        if not 1 <= self.steps <= MOST_STEPS:
            raise SaccadeError(f"--steps is {self.steps}, expected 1 to {MOST_STEPS}.")


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
