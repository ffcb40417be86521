# SPDX-License-Identifier: Apache-2.0
"""The table of a training run: loss, learning rate and scores by step, as a CSV file."""

import csv
import io
from pathlib import Path

from saccade.files import write_atomically

LEADING = ("step", "loss", "learning_rate", "seconds")


class TrainingLog:
    """Rows in memory, written whole, so that a reader never sees half a line.

    The loss of a row is the mean over the steps since the row before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, float]] = []

    def add(self, row: dict[str, float], scores: dict[str, float]) -> None:
        """One row: the leading columns, and the scores where the step was validated."""
        self.rows.append(row | scores)

    def write(self) -> None:
        """Bring the file up to date.

        Raises: SaccadeError if it cannot be written.
        """
        write_atomically(self.path, self.content())

    def content(self) -> bytes:
        """The table as CSV."""
        scores = dict.fromkeys(key for row in self.rows for key in row if key not in LEADING)
        text = io.StringIO()
        table = csv.DictWriter(text, (*LEADING, *scores), restval="", lineterminator="\n")
        table.writeheader()
        for row in self.rows:
            table.writerow({key: f"{value:.10g}" for key, value in row.items()})
        return text.getvalue().encode()
