# SPDX-License-Identifier: Apache-2.0
"""CSV and JSON lines that list images with their labels."""

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core import limits
from saccade.core.errors import Damaged, SaccadeError
from saccade.core.files import read_regular
from saccade.core.json_text import parse_json
from saccade.models.data.samples.labels import LabelColumn, Refused
from saccade.models.data.samples.source import (
    SPLIT_NAMES,
    Beside,
    DataDescription,
    RowUnreadable,
    SampleSource,
    numbered,
    split_in,
    split_named,
)

# Usual names of columns, the first that a table has counts.
PATHS = ("path", "file", "file_name", "filename", "image", "image_path", "filepath")
LABELS = ("label", "labels", "class", "category", "target", "cls", "fine_label")
SENTENCES = ("sentence", "sentences", "caption", "captions", "text")
MASKS = ("mask", "masks", "mask_path", "mask_file", "instance_mask", "segmentation", "instances")
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
        try:
            file = (self._real / name).resolve()
        except ValueError:  # a null character, or half of a surrogate pair
            raise RowUnreadable(f"found {name!r:.80}, expected a path. Correct the row") from None
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


class ListedFiles(SampleSource):
    """Files that a .csv with a header, or a .jsonl, lists: one path per row.

    Paths are relative to the table, or to the root that the user gives, and stay inside it.
    """

    def __init__(self, path: Path, given: DataDescription) -> None:
        self.path, self._root = path, Root(given.root or path.parent)
        self._files: list[str] = []

    def rows(self, beside: Beside) -> Iterator[tuple[int, Mapping[str, Any], str]]:
        """Yield each row, its values, and the column of labels or masks; empty if there is none.

        Lists the files and sets the splits.
        Raises: SaccadeError if a column is missing, or a row has no path or known split.
        """
        splits = array("b")
        columns: TableColumns | None = None
        for row, values in enumerate(table_rows(self.path)):
            columns = columns or TableColumns.of(self.path, list(values), beside=beside)
            self._files.append("")
            self._files[row] = path_in(row, values, columns.image, self.refused)
            yield row, values, columns.value
            if columns.split is not None:
                splits.append(split_in_row(row, values, columns.split, self.refused))
        if columns is None:
            raise SaccadeError(
                f"{self.path}: found no rows, expected one per image. For CSV, the first line "
                "names the columns."
            )
        if columns.split is not None:
            self.split_of = np.array(splits, dtype=np.int8)
        elif (split := split_in(self.path.name)) >= 0:
            self.split_of = np.full(len(self._files), split, dtype=np.int8)

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes of the file that the row names."""
        return self._root.read(self._files[row], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the row's number and path."""
        return numbered(row, self._files[row])


class PathTable(ListedFiles):
    """A table of paths and labels, and optionally of splits.

    Raises: SaccadeError if a column is missing, or a row has no path, label or known split.
    """

    def __init__(self, path: Path, given: DataDescription) -> None:
        super().__init__(path, given)
        labels = LabelColumn()
        for row, values, column in self.rows("label"):
            labels.add(label_in(row, values, column, self.refused))
        self.labels, self.class_names = labels.classes(given, self.refused)


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


_USUAL: Mapping[Beside, Sequence[str]] = {"label": LABELS, "sentence": SENTENCES, "mask": MASKS}


class TableColumns:
    """The columns of a table that are used; the values are labels, sentences or masks, or empty."""

    def __init__(self, image: str, value: str, split: str | None) -> None:
        self.image, self.value, self.split = image, value, split

    @property
    def used(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(filter(None, (self.image, self.value, self.split)))

    @classmethod
    def of(
        cls,
        path: Path,
        names: Sequence[str],
        images: Sequence[str] = PATHS,
        *,
        beside: Beside = "label",
    ) -> "TableColumns":
        """Find the columns by their usual names; there may be none of masks.

        Raises: SaccadeError if there is none of images, or none of labels or sentences.
        """
        image, value, told = (
            next((name for name in usual if name in names), None)
            for usual in (images, _USUAL[beside], SENTENCES)
        )
        shown = ", ".join(repr(name)[:60] for name in names[:20])
        if image is None:
            also = f", and for scores one of masks: {', '.join(MASKS)}" if beside == "mask" else ""
            raise SaccadeError(
                f"{path}: found the columns {shown}, expected one of images: "
                f"{', '.join(images)}{also}. Rename the column of images."
            )
        if value is None and beside == "sentence":
            raise SaccadeError(
                f"{path}: found the columns {shown}, expected one of sentences: "
                f"{', '.join(SENTENCES)}. Add the sentence about each image."
            )
        if value is None and beside == "label":
            what = f"sentences ({told}) without labels" if told else f"columns {shown}"
            raise SaccadeError(
                f"{path}: found {what}, expected a column of labels: {', '.join(LABELS)}. Add "
                "the class of each image."
            )
        split = next((name for name in SPLIT_COLUMNS if name in names), None)
        return cls(image, value or "", split)


def told_by(columns: Sequence[str]) -> bool:
    """Return whether one of these columns has sentences."""
    return any(column in SENTENCES for column in columns)


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
        raise Damaged(
            path,
            f"cannot be read as CSV ({error}), expected UTF-8 text with the names of the columns "
            "in the first line",
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
