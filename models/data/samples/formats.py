# SPDX-License-Identifier: Apache-2.0
"""Which source a path or pattern is: by its suffix, or by what is in the folder."""

import glob
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.checks import did_you_mean
from saccade.core.errors import SaccadeError
from saccade.core.files import read_regular
from saccade.core.json_text import parse_json
from saccade.core.limits import JSON_BYTES
from saccade.models.data.samples.arrays import ArrayFile
from saccade.models.data.samples.masks import mask_in_file
from saccade.models.data.samples.shards import Shard
from saccade.models.data.samples.source import (
    LABEL,
    SENTENCES,
    SPLIT,
    TEXT,
    Beside,
    Cell,
    ClassFolders,
    DataDescription,
    LabelColumn,
    RowUnreadable,
    SampleSource,
    Texts,
    given_splits,
    reading,
    split_in,
    split_named,
    visible,
)
from saccade.models.data.samples.tables import (
    TEXT_TABLES,
    ArrowTable,
    Columns,
    Lines,
    ParquetTable,
    Table,
    columns_in,
)
from saccade.models.image_decoding import ImageInput

IMAGES: Mapping[Beside, tuple[str, ...]] = {
    "label": ("images", "labels"),
    "sentence": ("images", "sentences"),
    "mask": ("images",),
}


class TableRows(SampleSource):
    """The rows of tables with equal columns; `wanted` are names in `tables.USUAL`.

    Raises: SaccadeError if a column is missing, or a row has no text, label or known split.
    """

    def __init__(
        self, path: Path, tables: Iterable[Table], wanted: Sequence[str], given: DataDescription
    ) -> None:
        self.path, self._tables = path, tuple(tables)
        self._starts, self._columns = list[int](), Columns()
        self._labels, splits, texts = LabelColumn(), array("b"), Texts()
        also = ("masks", "splits") if given.beside == "mask" else ("splits",)
        for table in self._tables:
            self._starts.append(len(splits))
            if not table.names:
                continue
            self._columns = self._columns or columns_in(
                table.path, table.names, wanted, also, table.usual
            )
            used = [name for names in self._columns.values() for name in names]
            if missing := [name for name in used if name not in table.names]:
                raise SaccadeError(
                    f"{table.path}: has no column {missing[0]!r}, but "
                    f"{self._tables[0].path.name} has. Use files with equal columns."
                )
            own = columns_in(table.path, table.names, (), also, table.usual)
            if more := sorted(own.keys() - self._columns.keys()):
                raise SaccadeError(
                    f"{table.path}: has a column of {more[0]} ({own[more[0]][0]}), but "
                    f"{self._tables[0].path.name} has none. Use files with equal columns."
                )
            self._add(table, texts, splits)
        if not splits:
            raise SaccadeError(f"{path}: found no rows, expected one per sample.")
        if "labels" in wanted:
            known = self._tables[0].class_names(self._columns["labels"][0])
            self.labels, self.class_names = self._labels.classes(given, self.refused, known)
        else:
            self.without_classes(len(splits))
        self.sentences = texts if len(texts) else None
        self.split_of = given_splits(splits)
        self.masked = "masks" in self._columns

    def _add(self, table: Table, texts: Texts, splits: array) -> None:
        columns = self._columns
        files = [name for what in ("images", "masks") for name in columns.get(what, ())]
        values = {name: cell for what, cell in _CELLS.items() for name in columns.get(what, ())}
        for cells in table.rows([*values], files):
            split, said, refused = table.split, list[str](), partial(self.refused, len(splits))
            for (name, cell), value in zip(values.items(), cells, strict=True):
                checked = cell(value, refused, name)
                if cell is SPLIT:
                    split = checked
                elif cell is LABEL:
                    self._labels.add(checked)
                else:
                    said += [checked] if cell is TEXT else checked
            splits.append(split)
            if said:
                texts.append(said)

    def _place(self, row: int) -> tuple[Table, int]:
        """Return the table of a row, and the row in it."""
        place = bisect_right(self._starts, row) - 1
        return self._tables[place], row - self._starts[place]

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes of the row's image."""
        table, own = self._place(row)
        return table.read(own, self._columns["images"][0], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the row's number or key, with its file if there are several."""
        table, own = self._place(row)
        name = table.row_name(own)
        return name if len(self._tables) == 1 else f"{table.path.name}: {name}"

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return the indices in the PNG of the row."""
        table, own = self._place(row)
        column = self._columns["masks"][0]
        name = table.file_name(own, column)
        try:
            data = table.read(own, column, wanted.max_image_mib * 2**20)
        except RowUnreadable as error:
            raise RowUnreadable(f"its mask {name}: {error}") from None
        return mask_in_file(data, name, wanted)


_CELLS: Mapping[str, Cell] = {
    "sentences": SENTENCES,
    "texts": TEXT,
    "pairs of texts": TEXT,
    "labels": LABEL,
    "splits": SPLIT,
}


FORMATS: Mapping[str, type[Table]] = {
    **dict.fromkeys(TEXT_TABLES, Lines),
    ".parquet": ParquetTable,
    ".tar": Shard,
}
PACKED = tuple(suffix for suffix, table in FORMATS.items() if table.packed)
EXPECTED = (
    "a folder of class folders, an .npz, .csv, .jsonl, .parquet or .tar file, or a folder that "
    "save_to_disk of Hugging Face wrote"
)
PATTERN = re.compile(r"[*?\[]|\{.*\}")
_RANGE = re.compile(r"\{([^{}]*)\}")
_MOST_FILES = 100_000


def is_data(name: str) -> bool:
    """Return whether this is a path or a pattern of samples."""
    path = Path(name)
    if path.is_dir():
        return True
    there = path.exists() or bool(PATTERN.search(name))
    return path.suffix.lower() in (".npz", *FORMATS) and there


def check_data(name: str, expected: str, names: Sequence[str] = (), *also: str) -> None:
    """Check that this is a path or a pattern of samples, or a file with one of the suffixes `also`.

    Raises: SaccadeError that says what is expected, and the `names` of data that were meant.
    """
    if not is_data(name) and Path(name).suffix.lower() not in also:
        kind = "a file of another kind" if Path(name).is_file() else "neither a name nor a path"
        raise SaccadeError(
            f"data '{name}': found {kind}.{did_you_mean(name, names)} Pass "
            f"{', '.join((*names, expected))}."
        )


def open_source(name: str, given: DataDescription) -> SampleSource:
    """List the samples of a file, a folder, or a pattern such as `data/train-{000..009}.tar`.

    Raises: SaccadeError if there is none, or they cannot be used.
    """
    path = Path(name)
    if path.suffix.lower() == ".npz" and path.exists() and not path.is_dir():
        return ArrayFile(path, given)
    if tables := [*open_tables(name, given.root)]:
        return TableRows(path, tables, IMAGES[given.beside], given)
    return ClassFolders(path, given)


def open_tables(name: str, root: Path | None = None) -> Iterator[Table]:
    """Yield the tables that a path or a pattern names; none in a folder without packed files.

    Raises: SaccadeError if a pattern names no file, or the files are of several kinds or of none
        of FORMATS.
    """
    path = Path(name)
    if path.is_dir() and is_saved(path):
        yield from _saved(path)
        return
    files = _packed_in(path) if path.is_dir() else matching(name)
    kinds = {file.suffix.lower() for file in files}
    if len(kinds) > 1:
        raise SaccadeError(
            f"{path}: found {' and '.join(sorted(kinds))} files, expected one kind. Name one of "
            "them, or a pattern such as 'data/*.tar'."
        )
    if other := kinds - FORMATS.keys():
        raise SaccadeError(
            f"{path}: found {other.pop()} files, expected {EXPECTED}. Name one of them."
        )
    for file, split in zip(files, splits_of(path, files), strict=True):
        yield FORMATS[file.suffix.lower()](file, split, root)


def is_packed(name: str) -> bool:
    """Return whether these are Parquet files, shards, or a folder that Hugging Face saved."""
    path = Path(name)
    if path.is_dir():
        return is_saved(path) or bool(_packed_in(path))
    return path.suffix.lower() in PACKED


def _packed_in(path: Path) -> list[Path]:
    """Return the packed files in a folder, or else in its sub-folders."""
    inside = [path / entry.name for entry in visible(path)]
    found = [file for file in inside if file.suffix.lower() in PACKED and not file.is_dir()]
    folders = [] if found else [file for file in inside if file.is_dir()]
    deeper = [folder / entry.name for folder in folders for entry in visible(folder)]
    return found + [file for file in deeper if file.suffix.lower() in PACKED]


def splits_of(path: Path, files: Sequence[Path]) -> list[int]:
    """Return the split that each file's name contains, or -1 for all if none contains one.

    Raises: SaccadeError if only some contain one, or one is a pipe or device.
    """
    named = []
    for file in files:
        if not file.is_file():
            raise SaccadeError(
                f"{file}: found a pipe or device, expected a file. Write the data into a file."
            )
        inside = file.relative_to(path).as_posix() if path.is_dir() else file.name
        split = split_in(inside)
        if split < 0 and len(files) > 1 and (folder := split_named(file.parent.name)) is not None:
            split = folder
        named.append(split)
    if any(split < 0 for split in named) and any(split >= 0 for split in named):
        odd = files[named.index(-1)]
        raise SaccadeError(
            f"{path}: {odd.name} has no split in its name, but others have, such as "
            f"{next(f.name for f, s in zip(files, named, strict=True) if s >= 0)}. Rename it, or "
            "name the files of one split with a pattern."
        )
    return named


def matching(pattern: str) -> list[Path]:
    """Return the files that a path, or a pattern with *, ?, {a,b} or {000..009}, names.

    Each part of a list is sorted.

    Raises: SaccadeError if a part of it names no file.
    """
    if Path(pattern).exists():
        return [Path(pattern)]
    files: list[Path] = []
    for one in _expanded(pattern):
        found = sorted(glob.glob(one))  # noqa: PTH207  Path.glob takes no absolute patterns
        if not found:
            raise SaccadeError(
                f"data '{pattern}': found no file {one}. Correct the pattern; relative paths begin "
                f"in {Path.cwd()}."
            )
        files += [Path(file) for file in found]
    return files


def _expanded(pattern: str) -> list[str]:
    """Return the pattern with every {...} replaced, as a shell does."""
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, dots, last = match[1].partition("..")
    if dots and first.isdigit() and last.isdigit():
        count = int(last) - int(first) + 1
        if not 0 < count <= _MOST_FILES:
            raise SaccadeError(
                f"data '{pattern}': {match[0]} names {count} files, expected 1 to {_MOST_FILES}."
            )
        values = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    else:
        values = match[1].split(",")
    before, after = pattern[: match.start()], pattern[match.end() :]
    rests = _expanded(after)
    return [f"{before}{value}{rest}" for value in values for rest in rests]


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of Hugging Face `datasets` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _saved(folder: Path) -> Iterator[Table]:
    """Yield the tables of such a folder.

    Raises: SaccadeError if its files are not as described in it.
    """
    if not (folder / "dataset_dict.json").exists():
        yield from _arrow_files(folder, -1)
        return
    names = _object(folder / "dataset_dict.json").get("splits")
    names = names if isinstance(names, list) else []
    splits = [split_named(name) for name in names]
    if not splits or None in splits:
        raise SaccadeError(
            f"{folder}: has the splits {names!r:.80}, expected train, validation or test. Name one "
            "of its folders, or save it with other names."
        )
    for name, split in zip(names, splits, strict=True):
        yield from _arrow_files(folder / name, split or 0)


def _arrow_files(folder: Path, split: int) -> Iterator[Table]:
    state = _object(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise SaccadeError(
            f"{folder}: was saved as a selection of rows. Call flatten_indices() before "
            "save_to_disk."
        )
    files = state.get("_data_files")
    names = [file.get("filename") for file in files] if isinstance(files, list) else []
    if not names or not all(_is_in(folder, name) for name in names):
        raise SaccadeError(
            f"{folder}: state.json names {names!r:.80}, expected .arrow files in the folder. Save "
            "the data again."
        )
    yield from (ArrowTable(folder / name, split) for name in names)


def _is_in(folder: Path, name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and (folder / name).is_file()


def _object(path: Path) -> dict[str, Any]:
    with reading(path, "what save_to_disk of Hugging Face wrote"):
        values = parse_json(read_regular(path, JSON_BYTES))
    return values if isinstance(values, dict) else {}
