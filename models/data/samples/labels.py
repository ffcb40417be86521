# SPDX-License-Identifier: Apache-2.0
"""Labels as they are written, by name or by number, and the classes that they are."""

from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import check_labels
from saccade.core.spelling import did_you_mean
from saccade.models.data.samples.source import DataDescription

Refused = Callable[[int, str], SaccadeError]  # called with a row and the reason


class LabelColumn:
    """The labels of a source's rows: text or whole numbers, stored once per distinct label."""

    def __init__(self, labels: Iterable[str | int] = ()) -> None:
        self._codes: dict[str | int, int] = {}
        self._first: list[int] = []  # row in which each label occurs first
        self._of_row = array("q")
        for label in labels:
            self.add(label)

    def add(self, label: str | int) -> None:
        """Add the label of the next row."""
        code = self._codes.setdefault(label, len(self._codes))
        if code == len(self._first):
            self._first.append(len(self._of_row))
        self._of_row.append(code)

    def classes(
        self, given: DataDescription, refused: Refused, known: Sequence[str] | None = None
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the class of each row, and the names of the classes.

        With names (`--labels`, or `known` from the file itself) a label is one of them, or its
        number. Without, whole numbers count from 0, and names are sorted.

        Shapes: -> int64 [n].
        Raises: SaccadeError for a label that is none of them, with its row.
        """
        names = given.labels or (tuple(known) if known else None)
        if names is not None:
            where = f"--labels {given.labels_path}" if given.labels else "the file's own names"
            index_of = {name: index for index, name in enumerate(names)}
            found = [
                _named(label, index_of, names, where, self._first[code], refused)
                for label, code in self._codes.items()
            ]
        elif self._codes and all(_number(label) is not None for label in self._codes):
            found = [_number(label) or 0 for label in self._codes]
            self._check_numbers(found, refused)
            names = tuple(str(index) for index in range(max(found) + 1))
        else:
            names = tuple(sorted(str(label) for label in self._codes))
            index_of = {name: index for index, name in enumerate(names)}
            found = [index_of[str(label)] for label in self._codes]
        check_labels(names, "labels", "class name")
        of_row = np.frombuffer(self._of_row, dtype=np.int64) if self._of_row else np.empty(0, int)
        return np.array(found, dtype=np.int64)[of_row], names

    def _check_numbers(self, found: Sequence[int], refused: Refused) -> None:
        for index, number in enumerate(found):
            if not 0 <= number < len(self._of_row):
                raise refused(
                    self._first[index],
                    f"found the label {number}, expected 0 to classes - 1, with at most "
                    f"{len(self._of_row):,} classes for as many rows. Number the classes from 0, "
                    "or name them with --labels FILE.",
                )


def _named(
    label: str | int,
    index_of: dict[str, int],
    names: Sequence[str],
    where: str,
    row: int,
    refused: Refused,
) -> int:
    if (index := index_of.get(str(label))) is not None and isinstance(label, str):
        return index
    number = _number(label)
    if number is not None and 0 <= number < len(names):
        return number
    raise refused(
        row,
        f"found the label {str(label)!r:.80}, expected one of the {len(names):,} names in {where} "
        f"or a number from 0 to {len(names) - 1}.{did_you_mean(str(label), names)} Correct the "
        "label, or add it to the names.",
    )


def _number(label: str | int) -> int | None:
    if isinstance(label, int):
        return label
    digits = label.removeprefix("-")
    return int(label) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
