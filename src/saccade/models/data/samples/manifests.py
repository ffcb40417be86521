# SPDX-License-Identifier: Apache-2.0
"""CSV and JSON lines that list images with their labels."""

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade import limits
from saccade.errors import SaccadeError
from saccade.files import read_regular
from saccade.json_text import parse_json
from saccade.models.data.samples.labels import LabelColumn, Refused
from saccade.models.data.samples.source import (
    SPLIT_NAMES,
    Given,
    RowUnreadable,
    Source,
    numbered,
    split_in,
    split_named,
)

# Usual names of columns, the first that a table has counts.
PATHS = ("path", "file", "file_name", "filename", "image", "image_path", "filepath")
LABELS = ("label", "labels", "class", "category", "target", "cls", "fine_label")
SENTENCES = ("sentence", "sentences", "caption", "captions", "text")
SPLIT_COLUMNS = ("split", "subset")


class Root:
    """The folder in which the paths of a list begin, and which they may not leave."""

    def __init__(self, path: Path) -> None:
        self.path, self._real = path, path.resolve()

    def has(self, name: str) -> bool:
        """Return whether it has a file of that name."""
        try:
            return (self._real / name).is_file()
        except (OSError, ValueError):
            return False

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes of a file in it; of a larger one, the first bytes beyond the limit.

        Raises: RowUnreadable if it leads out of the folder or is missing; OSError.
        """
        file = (self._real / name).resolve()
        if not file.is_relative_to(self._real):
            raise RowUnreadable(
                f"leads out of {self.path}. Move the file into this folder, or name the folder "
                "that contains all images with --data-root"
            )
        try:
            return read_regular(file, most_bytes)
        except FileNotFoundError:
            raise RowUnreadable(
                f"no such file in {self.path}, in which the paths begin. Correct the row, or name "
                "another folder with --data-root"
            ) from None


class Manifest(Source):
    """A .csv with a header, or a .jsonl: columns of paths and labels, and optionally of splits.

    Paths are relative to the manifest, or to the root that the user gives, and stay inside it.

    Raises: SaccadeError if a column is missing, or a row has no path, label or known split.
    """

    def __init__(self, path: Path, given: Given) -> None:
        self.path, self._root = path, Root(given.root or path.parent)
        self._files: list[str] = []
        labels, splits = LabelColumn(), array("b")
        columns: Columns | None = None
        for row, values in enumerate(table_rows(path)):
            columns = columns or Columns.of(path, list(values))
            self._files.append("")
            self._files[row] = path_in(row, values, columns.image, self.refused)
            labels.add(label_in(row, values, columns.label, self.refused))
            if columns.split is not None:
                splits.append(split_in_row(row, values, columns.split, self.refused))
        if columns is None:
            raise SaccadeError(
                f"{path}: found no rows, expected one per image. For CSV, the first line names "
                "the columns."
            )
        self.labels, self.class_names = labels.classes(given, self.refused)
        if columns.split is not None:
            self.split_of = np.array(splits, dtype=np.int8)
        elif (split := split_in(path.name)) >= 0:
            self.split_of = np.full(len(self.labels), split, dtype=np.int8)

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes of the file that the row names."""
        return self._root.read(self._files[row], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the row's number and path."""
        return numbered(row, self._files[row])


def path_in(row: int, values: Mapping[str, Any], column: str, refused: Refused) -> str:
    """Return the path in a column of a row.

    Raises: SaccadeError if there is none.
    """
    value = values.get(column)
    if not isinstance(value, str) or not value or "\0" in value:
        raise refused(row, f"found {value!r:.80} in column {column!r}, expected a path.")
    return value


def label_in(row: int, values: Mapping[str, Any], column: str, refused: Refused) -> str | int:
    """Return the label in a column of a row.

    Raises: SaccadeError if there is none.
    """
    value = values.get(column)
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise refused(
        row, f"found {value!r:.80} in column {column!r}, expected a label, as text or number."
    )


def split_in_row(row: int, values: Mapping[str, Any], column: str, refused: Refused) -> int:
    """Return the index in SPLITS of the split in a column of a row.

    Raises: SaccadeError if it is not the name of a split.
    """
    value = values.get(column)
    split = split_named(value) if isinstance(value, str) else None
    if split is None:
        raise refused(
            row,
            f"found {value!r:.80} in column {column!r}, expected one of "
            f"{', '.join(SPLIT_NAMES)}. Correct the row, or remove the column.",
        )
    return split


class Columns:
    """The columns of a table that are used."""

    def __init__(self, image: str, label: str, split: str | None) -> None:
        self.image, self.label, self.split = image, label, split

    @property
    def used(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(filter(None, (self.image, self.label, self.split)))

    @classmethod
    def of(cls, path: Path, names: Sequence[str], images: Sequence[str] = PATHS) -> "Columns":
        """Find the columns by their usual names.

        Raises: SaccadeError if there is none of images or labels.
        """
        image = next((name for name in images if name in names), None)
        label = next((name for name in LABELS if name in names), None)
        shown = ", ".join(repr(name)[:60] for name in names[:20])
        if image is None:
            raise SaccadeError(
                f"{path}: found the columns {shown}, expected one of images: "
                f"{', '.join(images)}. Rename the column of images."
            )
        if label is None:
            sentences = next((name for name in SENTENCES if name in names), None)
            what = f"sentences ({sentences}) without labels" if sentences else f"columns {shown}"
            raise SaccadeError(
                f"{path}: found {what}, expected a column of labels: {', '.join(LABELS)}. Add "
                "the class of each image."
            )
        return cls(image, label, next((name for name in SPLIT_COLUMNS if name in names), None))


def table_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Return the rows of a .csv with a header, or of JSON lines, one after the other.

    Raises: SaccadeError if the file or a row cannot be read.
    """
    return _csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path)


def _csv_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline(limits.TABLE_LINE)
            file.seek(0)
            # Spreadsheets separate by semicolons where the comma is a decimal point.
            mark = next((mark for mark in ",;\t" if mark in header), ",")
            reader = csv.DictReader(file, delimiter=mark, strict=True, restval=None)
            for row, values in enumerate(reader):
                if None in values:
                    raise SaccadeError(
                        f"{path}: {numbered(row)}: found {len(values) - 1 + len(values[None])} "
                        f"values, expected the {len(values) - 1} columns of the first line. Put "
                        "values that contain a comma into quotation marks."
                    )
                yield {(name or "").strip(): value for name, value in values.items()}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SaccadeError(
            f"{path}: cannot be read as CSV ({error}), expected UTF-8 text with the names of the "
            "columns in the first line. Write it again."
        ) from error


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    row = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(limits.TABLE_LINE + 1):
                if not line.strip():
                    continue
                if len(line) > limits.TABLE_LINE:
                    raise ValueError(f"the line is longer than {limits.TABLE_LINE} bytes")
                values = parse_json(line)
                if not isinstance(values, dict):
                    raise ValueError(f"found {values!r:.80}")
                yield values
                row += 1
    except (OSError, ValueError) as error:
        raise SaccadeError(
            f"{path}: {numbered(row)}: cannot be read ({error}), expected one JSON object per line."
        ) from error
