# SPDX-License-Identifier: Apache-2.0
"""Options of commands for the user's own data, besides its path."""

from dataclasses import dataclass
from pathlib import Path

from saccade.core.choice import check_within
from saccade.core.schema import Range
from saccade.models.preprocessing import Preprocessing


@dataclass(frozen=True)
class DataAsked:
    """The options of the same names, and how a started model takes images."""

    labels: Path | None = None
    data_root: Path | None = None
    skip_bad: int = 0
    background: tuple[int, ...] = (0,)  # values of masks that are background
    preprocessing: Preprocessing | None = None  # of the checkpoint that training starts from
    shots: int | None = None  # training samples per class, drawn with `seed`; default: all
    seed: int = 0
    most: int | None = None  # samples to draw of the split, the same on every call; default: all


def check_skip_bad(rows: int) -> None:
    """Check the number of unreadable rows to leave out.

    Raises: SaccadeError if it is negative.
    """
    check_within("--skip-bad", rows, Range(0))
