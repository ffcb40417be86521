# SPDX-License-Identifier: Apache-2.0
"""Options of commands for the user's own data, besides its path."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.models.preprocessing import Preprocessing

# Takes work that reads all images, and returns its result, a value of JSON. The processes of a
# training run let one of them do it.
Once = Callable[[Callable[[], Any]], Any]


def here(work: Callable[[], Any]) -> Any:
    """Return what this work returns, done in this process."""
    return work()


@dataclass(frozen=True)
class DataOptions:
    """The options of the same names, and how a started model takes images."""

    labels: Path | None = None
    data_root: Path | None = None
    skip_bad: int = 0
    background: tuple[int, ...] = (0,)  # values of masks that are background
    preprocessing: Preprocessing | None = None  # of the checkpoint that training starts from
    shots: int | None = None  # training samples per class, drawn with `seed`; default: all
    seed: int = 0
    most: int | None = None  # samples to draw of the split, the same on every call; default: all
    once: Once = here
