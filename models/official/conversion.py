# SPDX-License-Identifier: Apache-2.0
"""What a converter is given and what it answers: the authors' tensors, and ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Official:
    """A checkpoint of the authors' code as it was read, and what the user said beside it.

    `tensors` are flat, by the names in the file: a Flax tree's joined by '/', without the
    `module.` that several GPUs leave.
    """

    path: str  # for messages
    tensors: "Mapping[str, Tensor]"
    config: Mapping[str, Any] | None = None  # --config
    labels: tuple[str, ...] | None = None
    vocabulary: tuple[str, ...] | None = None
    attention: str | None = None  # softmax, sparsemax, tvmax
    lam: float | None = None
    backbone: "Mapping[str, Tensor] | None" = None  # --backbone, read like the checkpoint
    deterministic: bool = False  # --deterministic


@dataclass(frozen=True)
class Converted:
    """One of our models, and where each of its tensors came from.

    `names` maps our keys to the keys of the file, `weights` holds what was made of them. Keys of
    the file that are rightly left out stand in `ignored` with the reason.
    """

    family: str
    config: Any  # the family's frozen dataclass
    weights: "dict[str, Tensor]"
    names: dict[str, str]
    preprocessing: Preprocessing | None
    images_from: str = ""  # what the preprocessing is taken from, for the report
    labels: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for the card and the terminal
    # Further calibration arrays, all with the same first axis; none: generated inputs.
    calibration: dict[str, np.ndarray] = field(default_factory=dict)
    # The configuration with the paper's own formulas in place of approximations, if they differ.
    exact: Any = None
