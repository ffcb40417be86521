# SPDX-License-Identifier: Apache-2.0
"""Labels as they are written, by name or by number, and the classes that they are."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import check_labels
from saccade.core.spelling import did_you_mean
from saccade.models.data.samples.source import DataDescription

Refused = Callable[[int, str], SaccadeError]  # called with a row and the reason


class LabelColumn:
    """The labels of a source's rows: text or whole numbers, stored once per distinct label."""

    def __init__(self) -> None:
        self._codes: dict[str | int, int] = {}
        self._first: list[int] = []  # row in which each label occurs first
        self._of_row = array("q")

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


def numbered_classes(
    where: str, labels: np.ndarray, names: np.ndarray | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the classes of an array of numbers, and their names, which an array may give.

    Shapes: labels [n] of any integer type, names [k] -> int64 [n].
    Raises: SaccadeError if a label has no name, or the names are not distinct text.
    """
    if not len(labels):
        raise SaccadeError(f"{where}: has no labels, expected one per sample.")
    low, high = int(labels.min()), int(labels.max())
    classes = high + 1 if names is None else names.size
    if low < 0 or high >= classes or (names is None and classes > len(labels)):
        row = int(np.flatnonzero((labels < 0) | (labels >= min(classes, len(labels))))[0])
        raise SaccadeError(
            f"{where}: labels range from {low} to {high}, expected 0 to classes - 1"
            f"{'' if names is None else f' ({classes} class names)'}; row {row + 1:,} has "
            f"{labels[row]}. Number the classes from 0."
        )
    if names is None:
        return labels.astype(np.int64), tuple(str(index) for index in range(classes))
    if names.ndim != 1 or names.dtype.kind != "U" or len(set(names.tolist())) != classes:
        raise SaccadeError(
            f"{where}: class_names are {names.dtype} {names.shape}, expected distinct strings."
        )
    check_labels(names.tolist(), where, "class name")
    return labels.astype(np.int64), tuple(names.tolist())
