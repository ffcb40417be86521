# SPDX-License-Identifier: Apache-2.0
"""Parquet files, and folders that Hugging Face `datasets` saved: columns of images and labels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from saccade.core.errors import Damaged, SaccadeError, require
from saccade.core.files import read_regular
from saccade.core.json_text import parse_json
from saccade.core.limits import JSON_BYTES
from saccade.models.data.samples.labels import LabelColumn
from saccade.models.data.samples.manifests import TableColumns
from saccade.models.data.samples.masks import MaskSource, mask_in_file
from saccade.models.data.samples.source import (
    DataDescription,
    RowUnreadable,
    SampleSource,
    Texts,
    numbered,
    sentences_in,
    split_named,
)
from saccade.models.data.splits import SPLITS
from saccade.models.image_decoding import ImageInput

EXTRA = "bulk"
IMAGES = ("image", "img", "images", "bytes", "image_bytes", "png", "jpg", "jpeg", "webp")
_KEPT_GROUPS = 2  # row groups of Parquet in memory


class ColumnarTable:
    """One file of rows. Threads may read it at the same time."""

    def __init__(self, path: Path, split: int) -> None:
        self.path, self.split = path, split

    def __len__(self) -> int:
        """Return the number of rows."""
        raise NotImplementedError

    def schema(self) -> Any:
        """Return the columns and their types."""
        raise NotImplementedError

    def column(self, name: str) -> Any:
        """Return a whole column."""
        raise NotImplementedError

    def value(self, row: int, column: str) -> Any:
        """Return one value, in Python's types."""
        raise NotImplementedError


class RowGroups:
    """The rows of an open Parquet file; a few groups of rows are in memory at a time.

    Threads may read it at the same time.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        groups = range(file.metadata.num_row_groups)
        self._ends = list(accumulate(file.metadata.row_group(group).num_rows for group in groups))
        self._kept: dict[int, dict[str | None, Any]] = {}  # by group and column
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._ends[-1] if self._ends else 0

    def row(self, row: int, column: str | None = None) -> dict[str, Any]:
        """Return the values of a row, or of one column; the first reads the whole group."""
        with self._lock:
            group = int(np.searchsorted(self._ends, row, side="right"))
            if group not in self._kept and len(self._kept) >= _KEPT_GROUPS:
                del self._kept[next(iter(self._kept))]
            kept = self._kept.setdefault(group, {})
            if column not in kept:
                columns = None if column is None else [column]
                kept[column] = self._file.read_row_group(group, columns)
            table = kept[column]
        start = self._ends[group - 1] if group else 0
        found: list[dict[str, Any]] = table.slice(row - start, 1).to_pylist()
        if not found:
            raise OSError(f"found {table.num_rows} rows in group {group}, expected more")
        return found[0]


class ParquetFile(ColumnarTable):
    """A Parquet file, read by groups of rows."""

    def __init__(self, path: Path, split: int) -> None:
        super().__init__(path, split)
        parquet = require("pyarrow.parquet", extra=EXTRA)
        with readable(path, "Parquet"):
            self._file = parquet.ParquetFile(path)
            self._groups = RowGroups(self._file)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._groups)

    def schema(self) -> Any:
        """Return the columns and their types."""
        return self._file.schema_arrow

    def column(self, name: str) -> Any:
        """Return a whole column."""
        column = self._file.read(columns=[name]).column(0)
        if len(column) != len(self):
            raise OSError(f"found {len(column)} values in column {name!r}, expected {len(self)}")
        return column

    def value(self, row: int, column: str) -> Any:
        """Return one value; the first of a group reads the column of the whole group."""
        return self._groups.row(row, column)[column]


class ArrowFile(ColumnarTable):
    """An Arrow stream, mapped into memory: the system reads what is used."""

    def __init__(self, path: Path, split: int) -> None:
        super().__init__(path, split)
        pa = require("pyarrow", extra=EXTRA)
        with readable(path, "Arrow"):
            self._table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._table.num_rows)

    def schema(self) -> Any:
        """Return the columns and their types."""
        return self._table.schema

    def column(self, name: str) -> Any:
        """Return a whole column."""
        return self._table.column(name)

    def value(self, row: int, column: str) -> Any:
        """Return one value."""
        return self._table.column(column)[row].as_py()


class Tables(SampleSource):
    """The rows of one or more tables with equal columns: images with labels, sentences or masks.

    Raises: SaccadeError if a column is missing, or a row has no label or sentence.
    """

    def __init__(self, path: Path, tables: Sequence[ColumnarTable], given: DataDescription) -> None:
        self.path, self._tables = path, tuple(tables)
        with readable(tables[0].path, "a table"):
            first = tables[0].schema()
            columns = TableColumns.of(tables[0].path, first.names, IMAGES, beside=given.beside)
        self._columns, labels = columns, LabelColumn()
        self.sentences = sentences = Texts() if given.beside == "sentence" else None
        self._starts: list[int] = []
        counted = 0
        splits: list[int] = []
        for table in tables:
            names = table.schema().names
            if missing := [name for name in columns.used if name not in names]:
                raise SaccadeError(
                    f"{table.path}: has no column {missing[0]!r}, but {tables[0].path.name} has. "
                    "Use files with equal columns."
                )
            self._starts.append(counted)
            with readable(table.path, "a table"):
                if sentences is not None:
                    _add_sentences(table, columns.value, sentences)
                elif given.beside == "label":
                    _add_labels(table, columns.value, labels)
                else:
                    _check_count(table)
                splits += self._splits_of(table, counted)
            counted += len(table)
        if not counted:
            raise SaccadeError(f"{path}: found no rows, expected one per image.")
        if given.beside == "label":
            known = class_names_in(tables[0].path, first, columns.value)
            self.labels, self.class_names = labels.classes(given, self.refused, known)
        else:
            self.without_classes(counted)
        if -1 not in splits:
            self.split_of = np.array(splits, dtype=np.int8)

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes of the row's image."""
        return self._bytes(row, self._columns.image)

    def row_name(self, row: int) -> str:
        """Return the row's number, with its file if there are several."""
        place = int(np.searchsorted(self._starts, row, side="right")) - 1
        name = numbered(row - self._starts[place])
        return name if len(self._tables) == 1 else f"{self._tables[place].path.name}: {name}"

    def _bytes(self, row: int, column: str) -> bytes:
        place = int(np.searchsorted(self._starts, row, side="right")) - 1
        table = self._tables[place]
        with readable(table.path, "a table"):
            value = table.value(row - self._starts[place], column)
        # Hugging Face stores images as structures of bytes and a path.
        value = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(value, bytes) or not value:
            raise RowUnreadable(
                f"found {type(value).__name__} in column {column!r}, expected the bytes of an "
                "image file. Write the images into the table"
            )
        return value

    def _splits_of(self, table: ColumnarTable, start: int) -> list[int]:
        """Return the split of each row of a table, whose first one is row `start`."""
        column = self._columns.split
        if column is None:
            return [table.split] * len(table)
        names = table.column(column).to_pylist()
        return [self._split(start + row, name, column) for row, name in enumerate(names)]

    def _split(self, row: int, name: Any, column: str) -> int:
        split = split_named(name) if isinstance(name, str) else None
        if split is None:
            raise self.refused(
                row,
                f"found {name!r:.80} in column {column!r}, expected {', '.join(SPLITS)}. Correct "
                "the row, or remove the column.",
            )
        return split


class MaskTables(Tables, MaskSource):
    """Such rows, with masks in a column of PNG files if there is one."""

    def __init__(self, path: Path, tables: Sequence[ColumnarTable], given: DataDescription) -> None:
        super().__init__(path, tables, given)
        self.masked = bool(self._columns.value)

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return the indices in the PNG of the row."""
        column = self._columns.value
        return mask_in_file(self._bytes(row, column), f"in column {column!r}", wanted)


def _check_count(table: ColumnarTable) -> None:
    """Check the number of rows that a file declares; a column that is read whole says it too."""
    size = table.path.stat().st_size
    if len(table) > size:
        raise OSError(f"found {len(table):,} rows of images in {size:,} bytes")


def _add_sentences(table: ColumnarTable, column: str, sentences: Texts) -> None:
    for row, value in enumerate(table.column(column).to_pylist()):
        try:
            sentences.append(sentences_in(value))
        except ValueError as error:
            raise SaccadeError(
                f"{table.path}: {numbered(row)}: {error} in column {column!r}. Correct "
                "the row, or remove it."
            ) from error


def _add_labels(table: ColumnarTable, column: str, labels: LabelColumn) -> None:
    for row, value in enumerate(table.column(column).to_pylist()):
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise SaccadeError(
                f"{table.path}: {numbered(row)}: found {value!r:.80} in column {column!r}, "
                "expected a label, as text or number. Correct the row, or remove it."
            )
        labels.add(value)


def tables_as_source(path: Path, tables: Sequence[ColumnarTable], given: DataDescription) -> Tables:
    """Return the rows of tables with what is wanted of each image.

    Raises: as `Tables`.
    """
    return (MaskTables if given.beside == "mask" else Tables)(path, tables, given)


def saved_tables(folder: Path) -> list[ColumnarTable]:
    """Return the tables of a folder that `save_to_disk` of Hugging Face `datasets` wrote.

    Raises: SaccadeError if its files are not as described in it.
    """
    if not (folder / "dataset_dict.json").exists():
        return _arrow_files(folder, -1)
    splits = _object(folder / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not splits:
        raise Damaged(folder, "dataset_dict.json names no splits")
    tables: list[ColumnarTable] = []
    for name in splits:
        split = split_named(name) if isinstance(name, str) else None
        if split is None:
            raise SaccadeError(
                f"{folder}: has a split {name!r:.80}, expected train, validation or test. Name one "
                f"of its folders, such as {folder / str(name)}, or save it with other names."
            )
        tables += _arrow_files(folder / name, split)
    return tables


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _arrow_files(folder: Path, split: int) -> list[ColumnarTable]:
    state = _object(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise SaccadeError(
            f"{folder}: was saved as a selection of rows. Call flatten_indices() before "
            "save_to_disk."
        )
    files = state.get("_data_files")
    names = [file.get("filename") for file in files] if isinstance(files, list) else []
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise Damaged(
            folder,
            f"state.json names {names!r:.80}, expected .arrow files in the folder",
        )
    if strange := [name for name in names if not (folder / name).is_file()]:
        raise Damaged(folder, f"{strange[0]} is missing or not a file, but state.json names it")
    return [ArrowFile(folder / name, split) for name in names]


def _object(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_regular(path, JSON_BYTES))
    except (OSError, ValueError) as error:
        raise Damaged(
            path,
            f"cannot be read ({error}), expected what save_to_disk of Hugging Face wrote",
        ) from error
    return values if isinstance(values, dict) else {}


def class_names_in(path: Path, schema: Any, column: str) -> list[str] | None:
    """Return the names of the classes that Hugging Face writes into the schema, if any."""
    text = (schema.metadata or {}).get(b"huggingface")
    try:
        info = parse_json(text) if text else {}
        names = info["info"]["features"][column]["names"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Damaged(
            path,
            f"the class names of column {column!r} are {names!r:.80}, expected text",
        )
    return names


@contextmanager
def readable(path: Path, what: str) -> Iterator[None]:
    """Turn errors of pyarrow into one that names the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Damaged(path, f"cannot be read as {what} ({str(error)[:300]})") from error
