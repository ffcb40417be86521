# SPDX-License-Identifier: Apache-2.0
"""Labeled files of any kind in class folders, and tables of labeled texts or pairs of texts."""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import read_regular
from saccade.models.data.samples.columnar import ColumnarTable, class_names_in, readable
from saccade.models.data.samples.folders import classes_of
from saccade.models.data.samples.labels import LabelColumn
from saccade.models.data.samples.manifests import (
    LABELS,
    SENTENCES,
    SPLIT_COLUMNS,
    label_in,
    split_in_row,
    table_rows,
)
from saccade.models.data.samples.masks import files_in
from saccade.models.data.samples.source import (
    DataDescription,
    SampleSource,
    left_out,
    numbered,
    split_in,
    split_named,
)

TEXTS = (*SENTENCES, "content", "review", "document", "input")
# The two texts of a row, as data sets of pairs call them.
PAIRS = (
    *((f"{name}_a", f"{name}_b") for name in ("text", "sentence")),
    *((f"{name}1", f"{name}2") for name in ("text", "sentence", "question")),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "document"),
)


class ClassFiles(SampleSource):
    """Files in folders that are called as classes, at any depth.

    A folder that is called as a split gives the split, above the class (train/chair/1.off) or in it
    (chair/train/1.off, as in ModelNet).

    Raises: SaccadeError if there is no such file, or one is in no class folder.
    """

    def __init__(self, path: Path, suffixes: Collection[str], given: DataDescription) -> None:
        self.path = path
        self._files: list[str] = []
        strays, classes, splits = [], list[str](), array("b")
        for name in files_in(path):
            folders = Path(name).parts[:-1]
            own = [folder for folder in folders if split_named(folder) is None]
            if Path(name).suffix.lower() not in suffixes or not own:
                strays.append(name)
                continue
            named = [split for split in map(split_named, folders) if split is not None]
            self._files.append(name)
            classes.append(own[0])
            splits.append(named[0] if named else -1)
        if not self._files:
            raise SaccadeError(
                f"{path}: found no {' '.join(sorted(suffixes))} files in class folders, expected "
                "one sub-folder per class."
            )
        self.class_names, index_of = classes_of(path, tuple(sorted(set(classes))), given)
        self.labels = np.array([index_of[name] for name in classes], dtype=np.int64)
        if -1 not in splits:
            self.split_of = np.array(splits, dtype=np.int8)
        elif any(split >= 0 for split in splits):
            odd = self._files[splits.index(-1)]
            raise SaccadeError(
                f"{path}: {odd} is in no folder of a split, but others are. Move it into train, "
                "val or test."
            )
        self.notes = left_out(path, strays, "that are of another kind, or in no class folder")

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes of the file."""
        return read_regular(self.path / self._files[row], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the file's path in the folder."""
        return self._files[row]


class TextTable(SampleSource):
    """Texts, or pairs of texts, with their labels: .csv, JSON lines, or tables of Parquet or Arrow.

    Texts are in memory.

    Raises: SaccadeError if a column is missing, or a row has no text, label or known split.
    """

    def __init__(
        self, path: Path, tables: Sequence[ColumnarTable], sets: int, given: DataDescription
    ) -> None:
        self.path, self._sets = path, sets
        self.texts: list[tuple[str, ...]] = []
        self._labels, self._splits = LabelColumn(), array("b")
        self._starts: list[int] = []
        self._tables = tuple(tables)
        known = None
        if tables:
            for table in tables:
                self._starts.append(len(self.texts))
                with readable(table.path, "a table"):
                    names = table.schema().names
                    self._add(self._rows_of(table), self._columns(table.path, names), table.split)
            column = self._columns(tables[0].path, tables[0].schema().names)[-2]
            known = class_names_in(tables[0].path, tables[0].schema(), column or "")
        else:
            rows = table_rows(path)
            first = next(rows, None)
            if first is not None:
                columns = self._columns(path, list(first))
                self._add(_again(first, rows), columns, split_in(path.name))
        if not self.texts:
            raise SaccadeError(f"{path}: found no rows, expected one per text.")
        self.labels, self.class_names = self._labels.classes(given, self.refused, known)
        if -1 not in self._splits:
            self.split_of = np.array(self._splits, dtype=np.int8)

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the first text of a row."""
        return self.texts[row][0].encode()

    def row_name(self, row: int) -> str:
        """Return the row's number, with its file if there are several."""
        if len(self._tables) < 2:
            return numbered(row)
        place = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self._tables[place].path.name}: {numbered(row - self._starts[place])}"

    def _rows_of(self, table: ColumnarTable) -> Iterator[Mapping[str, Any]]:
        columns = [name for name in self._columns(table.path, table.schema().names) if name]
        values = [table.column(name).to_pylist() for name in columns]
        for row in zip(*values, strict=True):
            yield dict(zip(columns, row, strict=True))

    def _columns(self, path: Path, names: Sequence[str]) -> tuple[str | None, ...]:
        """Return the columns of the texts, of labels, and of splits or None."""
        label = next((name for name in LABELS if name in names), None)
        split = next((name for name in SPLIT_COLUMNS if name in names), None)
        if self._sets == 2:
            both: tuple[str, ...] | None
            both = next((pair for pair in PAIRS if {*pair} <= {*names}), None)
            usual = ", ".join(f"{a} and {b}" for a, b in PAIRS)
        else:
            one = next((name for name in TEXTS if name in names), None)
            both, usual = None if one is None else (one,), ", ".join(TEXTS)
        if both is None or label is None:
            shown = ", ".join(repr(name)[:60] for name in list(names)[:20])
            what = f"texts: {usual}" if both is None else f"labels: {', '.join(LABELS)}"
            pairs = next((pair for pair in PAIRS if {*pair} <= {*names}), None)
            hint = " For pairs, pass --set input_sets=2." if pairs and self._sets == 1 else ""
            raise SaccadeError(
                f"{path}: found the columns {shown}, expected one of {what}.{hint} Rename the "
                "columns."
            )
        return (*both, label, split)

    def _add(
        self, rows: Iterator[Mapping[str, Any]], columns: tuple[str | None, ...], split: int
    ) -> None:
        *texts, label, own_split = columns
        for values in rows:
            row = len(self.texts)
            self.texts.append(("",) * self._sets)
            found = [values.get(column or "") for column in texts]
            for column, text in zip(texts, found, strict=True):
                if not isinstance(text, str) or not text:
                    raise self.refused(
                        row, f"found {text!r:.80} in column {column!r}, expected a text."
                    )
            self.texts[row] = tuple(map(str, found))
            self._labels.add(label_in(row, values, label or "", self.refused))
            if own_split:
                split = split_in_row(row, values, own_split, self.refused)
            self._splits.append(split)


def _again(first: Mapping[str, Any], rest: Iterator[Mapping[str, Any]]) -> Iterator[Any]:
    yield first
    yield from rest
