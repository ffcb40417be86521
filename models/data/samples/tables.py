# SPDX-License-Identifier: Apache-2.0
"""Tables of samples, rows with columns: CSV, JSON lines, Parquet and Arrow.

A further format is a subclass of `Table` and a line in `formats.FORMATS`.
"""

import csv
import io
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache, partial
from itertools import accumulate, repeat
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from saccade.core import limits
from saccade.core.archives import most_unpacked
from saccade.core.errors import Damaged, SaccadeError, require
from saccade.core.files import FileRefused, read_regular
from saccade.core.json_text import parse_json
from saccade.models.data.samples.source import (
    PATH,
    RowUnreadable,
    numbered,
    reading,
    refusal,
    split_in,
)

EXTRA = "bulk"
_KEPT_GROUPS = 2  # row groups of Parquet in memory
_MOST_STEP, _STEPS = 2**16, 8  # rows of one step; steps of what is allowed
# Usual names of columns, by what they have; the first that a table has counts. Two names are the
# columns of a pair of texts, as data sets of pairs call them.
Usual = Mapping[str, Sequence[str | tuple[str, str]]]
PATHS = ("path", "file", "file_name", "filename", "image", "image_path", "filepath")
BYTES = ("image", "img", "images", "bytes", "image_bytes", "png", "jpg", "jpeg", "webp")
MASKS = ("mask", "masks", "mask_path", "mask_file", "instance_mask", "segmentation", "instances")
SENTENCES = ("sentence", "sentences", "caption", "captions", "text")
LABELS = ("label", "labels", "class", "category", "target", "cls", "fine_label")
USUAL: Usual = {
    "images": PATHS,
    "labels": LABELS,
    "sentences": SENTENCES,
    "captions": SENTENCES,
    "masks": MASKS,
    "splits": ("split", "subset"),
    "texts": (*SENTENCES, "content", "review", "document", "input"),
    "pairs of texts": (
        *((f"{name}_a", f"{name}_b") for name in ("text", "sentence")),
        *((f"{name}1", f"{name}2") for name in ("text", "sentence", "question")),
        ("premise", "hypothesis"),
        ("question", "sentence"),
        ("question", "passage"),
        ("query", "document"),
    ),
    "tokens": ("tokens",),
    "questions": ("question", "questions"),
    "answers": ("answer", "answers", "label"),
    "false sentences": (
        *("negative_caption", "negative", "negatives", "negative_captions"),
        "false_caption",
    ),
}
Columns = dict[str, tuple[str, ...]]  # names by what the columns have


def columns_in(
    path: Any, names: Sequence[str], wanted: Sequence[str], also: Sequence[str], usual: Usual
) -> Columns:
    """Return the columns of what is wanted, and of what is in `also` if there are some.

    Raises: SaccadeError if one is missing.
    """
    found = {what: _first(usual[what], names) for what in (*wanted, *also)}
    for what in wanted:
        if not found[what]:
            shown = ", ".join(repr(name)[:60] for name in names[:20])
            listed = ", ".join(
                name if isinstance(name, str) else " and ".join(name) for name in usual[what]
            )
            raise SaccadeError(
                f"{path}: found the columns {shown}, expected one of {what}: {listed}."
                f"{_hint(what, names, usual)} Rename or add the column."
            )
    return {what: columns for what, columns in found.items() if columns}


def _first(usual: Sequence[str | tuple[str, str]], names: Sequence[str]) -> tuple[str, ...]:
    alternatives = ((name,) if isinstance(name, str) else name for name in usual)
    return next((columns for columns in alternatives if {*columns} <= {*names}), ())


def _hint(what: str, names: Sequence[str], usual: Usual) -> str:
    if what == "texts" and _first(usual["pairs of texts"], names):
        return " For pairs, pass --set input_sets=2."
    if what == "labels" and (told := _first(usual["sentences"], names)):
        return f" It has sentences ({told[0]}) without labels."
    return ""


class Table(ABC):
    """Rows of columns in one file; `split` is that of all rows, or -1.

    Small values are listed, files and images are read by row. Threads may read at the same time.
    """

    usual: ClassVar[Usual] = USUAL
    packed: ClassVar[bool] = False  # True: it contains its images, and a folder has several
    names: Sequence[str]

    def __init__(self, path: Path, split: int = -1, root: Path | None = None) -> None:
        self.path, self.split, self.root = path, split, root

    @abstractmethod
    def rows(self, columns: Sequence[str], files: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the values of each row, and keep where the bytes of `files` are.

        Raises: SaccadeError if the file or a row cannot be read.
        """

    @abstractmethod
    def read(self, row: int, column: str, most_bytes: int) -> bytes:
        """Return the bytes in one of `files`; of larger ones, the first beyond the limit.

        Raises: RowUnreadable, OSError.
        """

    def row_name(self, row: int) -> str:
        """Return what the user calls this row."""
        return numbered(row)

    def file_name(self, row: int, column: str) -> str:
        """Return what the user calls the bytes in a column of a row."""
        return f"in column {column!r}"

    def class_names(self, column: str) -> list[str] | None:
        """Return the names of the classes that the file gives, if any."""
        return None


class Lines(Table):
    """A .csv with a header, or JSON lines. Its files are beside it, or in the root."""

    def __init__(self, path: Path, split: int = -1, root: Path | None = None) -> None:
        super().__init__(path, split if split >= 0 else split_in(path.name), root)
        self.names = tuple(next(lines(path), {}))
        self._root = Root(root or path.parent)
        self._files: dict[str, list[str]] = {}

    def rows(self, columns: Sequence[str], files: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the values of each line."""
        self._files = {name: [] for name in files}
        for row, line in enumerate(lines(self.path)):
            for name, paths in self._files.items():
                refused = refusal(f"{self.path}: {self.row_name(row)}")
                paths.append(PATH(line.get(name), refused, name))
            yield tuple(line.get(name) for name in columns)

    def read(self, row: int, column: str, most_bytes: int) -> bytes:
        """Return the bytes of the file that the row names."""
        return self._root.read(self._files[column][row], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the row's number and first file."""
        paths = next(iter(self._files.values()), [])
        return numbered(row, paths[row] if row < len(paths) else "")

    def file_name(self, row: int, column: str) -> str:
        """Return the path."""
        return self._files[column][row]


LEADS_OUT = (
    "leads out of {}. Move the file into this folder, or name the folder that contains all images "
    "with --data-root"
)


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
        except ValueError:  # half of a surrogate pair
            raise RowUnreadable(f"found {name!r:.80}, expected a path. Correct the row") from None
        if not file.is_relative_to(self._real):
            raise RowUnreadable(LEADS_OUT.format(self.path))
        try:
            return read_regular(file, most_bytes)
        except FileNotFoundError:
            raise RowUnreadable(
                f"no such file in {self.path}, in which the paths begin. Correct the row, or name "
                "another folder with --data-root"
            ) from None


TEXT_TABLES = (".csv", ".jsonl", ".ndjson")  # what `lines` reads


def lines(path: Any) -> Iterator[Mapping[str, Any]]:
    """Return the rows of a .csv with a header, or of JSON lines, one after the other.

    `path` is a path, or whatever opens alike, such as an object in a store.

    Raises: SaccadeError if the file or a row cannot be read.
    """
    if str(path).lower().endswith(".csv"):
        read, what = _csv_rows, "CSV, UTF-8 text with the names of the columns in the first line"
    else:
        read, what = _json_rows, "one JSON object per line"
    row = 0
    with (
        reading(lambda: f"{path}: {numbered(row)}", what, csv.Error),
        path.open("rb") as file,
    ):
        for values in read(io.BufferedReader(file)):
            yield values
            row += 1


def _csv_rows(file: io.BufferedReader) -> Iterator[Mapping[str, Any]]:
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    if not (header := text.readline(limits.TABLE_LINE)):
        raise ValueError("the file is empty")
    text.seek(0)
    # Spreadsheets separate by semicolons where the comma is a decimal point.
    mark = next((mark for mark in ",;\t" if mark in header), ",")
    csv.field_size_limit(limits.TABLE_LINE)
    for values in csv.DictReader(text, delimiter=mark, strict=True, restval=None):
        if None in values:
            raise ValueError(
                f"found {len(values) - 1 + len(values[None])} values, expected "
                f"{len(values) - 1} as in the first line, and quotation marks around values that "
                "contain a comma"
            )
        yield {(name or "").strip(): value for name, value in values.items()}


def _json_rows(file: io.BufferedReader) -> Iterator[Mapping[str, Any]]:
    while line := file.readline(limits.TABLE_LINE + 1):
        if not line.strip():
            continue
        if len(line) > limits.TABLE_LINE:
            raise ValueError(f"the line is longer than {limits.TABLE_LINE} bytes")
        values = parse_json(line)
        if not isinstance(values, dict):
            raise ValueError(f"found {values!r:.80}")
        yield values


class RowGroups:
    """The rows of an open Parquet file; a few groups of rows are in memory at a time.

    Threads may read it at the same time.

    Raises: OSError if it declares more rows than a file of `size` bytes may have.
    """

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._lock, self._size = file, Lock(), size
        self.schema = file.schema_arrow
        groups = range(file.metadata.num_row_groups)
        self._ends = list(accumulate(file.metadata.row_group(group).num_rows for group in groups))
        # The columns of each group, which are read when they are used.
        self._group = lru_cache(_KEPT_GROUPS)(lambda at: cache(partial(self._read_one, at)))
        if len(self) > max(limits.TABLE_FREE_ROWS, size):
            raise OSError(f"found {len(self):,} rows in {size:,} bytes")

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._ends[-1] if self._ends else 0

    def read(self, columns: Sequence[str] | None = None, groups: Sequence[int] = ()) -> Any:
        """Return all columns or these, of all groups or these.

        Equal values are stored once, so a few bytes can become many: the groups are read in steps
        that are smaller than what is allowed for all, and the sizes of their values are added.

        Raises: FileRefused if they unpack to more than a file of this size may; OSError.
        """
        pa = require("pyarrow", extra=EXTRA)
        most = left = most_unpacked(self._size)
        groups = groups or range(len(self._ends))
        parts = [self._file.metadata.row_group(at) for at in groups]
        chunks = (part.column(index) for part in parts for index in range(part.num_columns))
        largest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
        step, batches = min(max(1, most // max(1, _STEPS * largest)), _MOST_STEP), []
        for batch in self._file.iter_batches(step, row_groups=[*groups], columns=columns):
            left -= batch.nbytes
            if left < 0:
                raise FileRefused(
                    f"unpacks to more than {most:,} bytes, the most for a file of {self._size:,}"
                )
            batches.append(batch)
        fields = [field for field in self.schema if columns is None or field.name in columns]
        return pa.Table.from_batches(batches, pa.schema(fields))

    def _read_one(self, at: int, columns: Sequence[str] | None = None) -> Any:
        """Return a group, or the reason to refuse it, which takes long to find out."""
        try:
            return self.read(columns, (at,))
        except FileRefused as error:
            return str(error)

    def row(self, row: int, column: str | None = None) -> dict[str, Any]:
        """Return the values of a row, or of one column; the first reads the whole group."""
        group = bisect_right(self._ends, row)
        with self._lock:
            table = self._group(group)(None if column is None else (column,))
        if isinstance(table, str):
            raise FileRefused(table)
        start = self._ends[group - 1] if group else 0
        found: list[dict[str, Any]] = table.slice(row - start, 1).to_pylist()
        if not found:
            raise OSError(f"found {table.num_rows} rows in group {group}, expected more")
        return found[0]


class ParquetTable(Table):
    """A Parquet file, read by groups of rows. Its images are bytes."""

    usual: ClassVar[Usual] = {**USUAL, "images": BYTES}
    packed = True

    def __init__(self, path: Path, split: int = -1, root: Path | None = None) -> None:
        super().__init__(path, split, root)
        with readable(path):
            self._open()

    def _open(self) -> None:
        self._file = require("pyarrow.parquet", extra=EXTRA).ParquetFile(self.path)
        self._groups = RowGroups(self._file, self.path.stat().st_size)
        self.schema = self._groups.schema
        self.names = self.schema.names

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._groups)

    def column(self, name: str) -> Any:
        """Return a whole column."""
        column = self._groups.read([name]).column(0)
        if len(column) != len(self):
            raise OSError(f"found {len(column)} values in column {name!r}, expected {len(self)}")
        return column

    def value(self, row: int, column: str) -> Any:
        """Return one value; the first of a group reads the column of the whole group."""
        return self._groups.row(row, column)[column]

    def rows(self, columns: Sequence[str], files: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the values of each row."""
        with readable(self.path):
            listed = [self.column(name).to_pylist() for name in columns]
        yield from zip(*listed, strict=True) if columns else repeat((), len(self))

    def read(self, row: int, column: str, most_bytes: int) -> bytes:
        """Return the bytes in a column of a row."""
        with readable(self.path):
            value = self.value(row, column)
        return image_bytes(value, column)

    def class_names(self, column: str) -> list[str] | None:
        """Return the names of the classes that Hugging Face writes into the schema, if any.

        Raises: SaccadeError if they are not text.
        """
        text = (self.schema.metadata or {}).get(b"huggingface")
        try:
            info = parse_json(text) if text else {}
            names = info["info"]["features"][column]["names"]
        except (ValueError, KeyError, TypeError):
            return None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            why = f"the class names of column {column!r} are {names!r:.80}, expected text"
            raise Damaged(self.path, why)
        return names


class ArrowTable(ParquetTable):
    """An Arrow stream, mapped into memory: the system reads what is used."""

    def _open(self) -> None:
        pa = require("pyarrow", extra=EXTRA)
        self._table = pa.ipc.open_stream(pa.memory_map(str(self.path))).read_all()
        self.schema = self._table.schema
        self.names = self.schema.names

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._table.num_rows)

    def column(self, name: str) -> Any:
        """Return a whole column."""
        return self._table.column(name)

    def value(self, row: int, column: str) -> Any:
        """Return one value."""
        return self._table.column(column)[row].as_py()


def image_bytes(value: Any, column: str) -> bytes:
    """Return the bytes of an image in a column; Hugging Face has structures of bytes and a path.

    Raises: RowUnreadable if there are none.
    """
    value = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(value, bytes) or not value:
        raise RowUnreadable(
            f"found {type(value).__name__} in column {column!r}, expected the bytes of an "
            "image file. Write the images into the table"
        )
    return value


def readable(path: Any) -> AbstractContextManager[None]:
    """Turn errors of pyarrow into one that names the file.

    Raises: SaccadeError.
    """
    pa = require("pyarrow", extra=EXTRA)
    return reading(path, "Parquet or Arrow", pa.ArrowException)
