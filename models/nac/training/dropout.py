# SPDX-License-Identifier: Apache-2.0
"""The modules that a step of a training loop keeps, drawn from the loop's own generator."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from saccade.models.nac.config import NACConfig


def drawn_modules(
    config: NACConfig, rng: np.random.Generator, *, most: int, rank: Callable[[], Tensor]
) -> Tensor | None:
    """Modules to keep, or none for all: a share from `module_dropout` to that of `most` modules.

    They are the best connected ones, the first of `rank`, in `dropout_ordered` of the steps, else
    a random subset.

    Shapes: -> int64 [m].
    """
    if config.module_dropout >= 1:
        return None
    least, largest = config.module_dropout, min(1.0, most / config.modules)
    if config.dropout_draw == "uniform":
        share = rng.uniform(least, largest)
    else:
        share = math.exp(rng.uniform(math.log(least), math.log(largest)))
    keep = max(1, math.floor(share * config.modules + 0.5))
    if rng.random() >= config.dropout_ordered:
        return torch.from_numpy(rng.permutation(config.modules)[:keep])
    return rank()[:keep]
