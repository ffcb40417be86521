# SPDX-License-Identifier: Apache-2.0
"""Inputs of a job: images, tables, tar shards or arrays. They are listed once and read by row.

A listing has columns: `id`; `file`, the name of a file in the source; `path` of an image that a
table names; `row` of a table, an array or a tar; `offset` and `size` of contiguous bytes; `text`, a
question.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from posixpath import dirname
from typing import Any

import numpy as np

from saccade.core.archives import read_arrays
from saccade.core.errors import SaccadeError, require
from saccade.core.sizes import counted
from saccade.core.verbosity import note
from saccade.models.data.samples.shards import read_member, shard_members
from saccade.models.data.samples.source import SUFFIXES, RowUnreadable, reading
from saccade.models.data.samples.tables import TEXT_TABLES, RowGroups, image_bytes, lines, readable
from saccade.serving.bulk.place import EXTRA, Place
from saccade.serving.bulk.plan import Columns, ModelInputs
from saccade.serving.client.images import encoded

_IMAGE_COLUMNS = ("image", "path", "file", "file_name", "filename", "jpg", "png")
_KEPT_FILES = 4  # files with many inputs that are open at the same time
_NAMED = 3  # duplicate ids to name in a message
_TEXTS, _NUMBERS = ("id", "file", "path", "text"), ("row", "offset", "size")


class Kind(ABC):
    """One kind of file. An instance is one file, opened on first use."""

    def __init__(
        self, place: Place, columns: Columns, wanted: ModelInputs, root: tuple[Place, str]
    ) -> None:
        self.place, self.columns, self.wanted = place, columns, wanted
        self.root, self.folder = root  # what rows may not leave, and where in it their paths begin
        self._file: Any = None

    @abstractmethod
    def entries(self, name: str) -> Mapping[str, Any]:
        """Return the columns of the listing of this file, called `name` in the source."""

    @abstractmethod
    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of one entry by the model's input: bytes of an image, or an array.

        Raises: RowUnreadable.
        """

    def close(self) -> None:
        """Close the file, or release the arrays."""
        if hasattr(self._file, "close"):
            self._file.close()
        self._file = None

    @property
    def most_bytes(self) -> int:
        """Size of the largest image file that the model takes."""
        return self.wanted.max_image_mib * 2**20

    def image(self) -> str:
        """Return the model's input if it takes one image and nothing else.

        Raises: SaccadeError otherwise.
        """
        wanted = self.wanted
        if not wanted.images_alone:
            needs = [*wanted.encoded, *wanted.numbers, *(["question"] if wanted.question else [])]
            raise SaccadeError(
                f"{self.place}: has images only, but the model takes {' and '.join(needs)}. Use "
                ".npz or .parquet files with arrays or columns of these names."
            )
        return wanted.encoded[0]


class ImageFile(Kind):
    """An image file."""

    def entries(self, name: str) -> Mapping[str, Any]:
        """Return one entry."""
        self.image()
        return {"id": [name or self.place.last], "file": [name]}

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file's bytes."""
        return {self.image(): _filled(self.place.read(self.most_bytes))}


class Tar(Kind):
    """A WebDataset shard: the members with one key are one input, and one of them is an image."""

    def entries(self, name: str) -> Mapping[str, Any]:
        """Return one entry per image, with the position of its bytes."""
        self.image()
        shard = name or self.place.last
        wanted = (self.columns.image,) if self.columns.image else SUFFIXES
        ends = tuple("." + suffix.lstrip(".").lower() for suffix in wanted)
        names = ("id", "file", "row", "offset", "size")
        rows = [
            (f"{shard}/{member.key}", name, row, member.offset, member.size)
            for row, (member, _) in enumerate(shard_members(self.place))
            if member.suffix.endswith(ends)
        ]
        return {column: [row[i] for row in rows] for i, column in enumerate(names)}

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the member's bytes."""
        self._file = self._file or self.place.open()
        size = min(entry["size"], self.most_bytes + 1)
        return {self.image(): read_member(self._file, entry["offset"], size)}


class Rows(Kind):
    """Rows of columns, each an input: CSV or JSON lines, whose images are files that they name."""

    what = "column"
    _rows = 0

    def names(self) -> Sequence[str]:
        """Return the names of the columns."""
        return list(self._columns())

    def column(self, name: str) -> Any:
        """Return a column, as a list or an array of Arrow."""
        return self._columns()[name]

    def _columns(self) -> dict[str, list[Any]]:
        """Return all columns of all rows; those that no listing uses are empty."""
        if self._file is None:
            own, self._rows = self.columns, 0
            used = {own.image, own.id or "id", own.question or "question"}
            used |= {*self.wanted.encoded, *_IMAGE_COLUMNS}
            self._file = dict[str, list[Any]]()
            for line in lines(self.place):
                for name in line:
                    if name not in self._file:
                        self._file[name] = [None] * self._rows if name in used else []
                for name in used & self._file.keys():
                    self._file[name].append(_as_text(line.get(name)))
                self._rows += 1
        return dict(self._file)

    def count(self) -> int:
        """Return the number of rows."""
        self._columns()
        return self._rows

    def paths(self) -> str | None:
        """Return the column of paths, if the images are files that the rows name."""
        if len(self.wanted.encoded) != 1 or self.wanted.numbers:
            self.image()
        return self.image_column()

    def entries(self, name: str) -> Mapping[str, Any]:
        """Return one entry per row."""
        rows = self.count()
        if not self.names():  # as in a .csv of a header alone
            return {"id": []}
        own, paths = self.columns, self.paths()
        shown = name or self.place.last
        columns: dict[str, Any] = {
            "file": [name] * rows,
            "row": list(range(rows)),
            "id": [f"{shown}#{row}" for row in range(rows)],
        }
        if paths is not None:
            columns["path"] = columns["id"] = self.column(paths)
        if own.id is not None or "id" in self.names():
            columns["id"] = self.column(self.existing(own.id or "id", "--id-column"))
        if self.wanted.question:
            column = self.existing(own.question or "question", "--question-column")
            columns["text"] = self.column(column)
        return columns

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the bytes of the file that the row names."""
        if not entry["path"]:
            raise RowUnreadable("the table names no file in this row")
        data = self.root.read_named(entry["path"], self.folder, self.most_bytes)
        return {self.wanted.encoded[0]: _filled(data)}

    def image_column(self) -> str:
        """Return the column of images.

        Raises: SaccadeError if there is none.
        """
        if self.columns.image is not None:
            return self.existing(self.columns.image, "--column")
        usual, names = (*self.wanted.encoded, *_IMAGE_COLUMNS), self.names()
        if (found := next((name for name in usual if name in names), None)) is None:
            raise SaccadeError(
                f"{self.place}: no {self.what} of images; it has {_shown(names)}. Choose one with "
                "--column."
            )
        return found

    def existing(self, name: str, flag: str = "") -> str:
        """Return the name of a column, which `flag` chooses, if there is one.

        Raises: SaccadeError if there is no such column.
        """
        if name not in (names := self.names()):
            choice = f", or choose one with {flag}" if flag else ""
            raise SaccadeError(
                f"{self.place}: no {self.what} {name!r}; it has {_shown(names)}. Write it under "
                f"that name{choice}."
            )
        return name


class Parquet(Rows):
    """Parquet: a column with bytes or paths of image files, or one column per model input."""

    _groups: RowGroups | None = None

    def names(self) -> Sequence[str]:
        """Return the names of the columns."""
        names: list[str] = self._opened().schema.names
        return names

    def column(self, name: str) -> Any:
        """Return a column."""
        with readable(self.place):
            return self._opened().read([name])[name]

    def count(self) -> int:
        """Return the number of rows."""
        return len(self._opened())

    def paths(self) -> str | None:
        """Return the column of paths, if there is one."""
        for number in self.wanted.numbers:
            self.existing(number)
        if self.wanted.numbers:
            return None
        types = require("pyarrow", extra=EXTRA).types
        column = self.image_column()
        kind = self._opened().schema.field(column).type
        text = types.is_string(kind) or types.is_large_string(kind)
        return super().paths() if text else None

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row's values."""
        if entry["path"] is not None:
            return super().read(entry)
        with readable(self.place):
            values = self._opened().row(entry["row"])
        inputs: dict[str, Any] = {name: np.array(values[name]) for name in self.wanted.numbers}
        if self.wanted.encoded:
            column = self.image_column()
            inputs[self.wanted.encoded[0]] = image_bytes(values[column], column)
        return inputs

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._groups = None

    def _opened(self) -> RowGroups:
        if self._groups is None:
            parquet = require("pyarrow.parquet", extra=EXTRA)
            with readable(self.place):
                opened = self.place.open()
                self._file = parquet.ParquetFile(opened)
                self._groups = RowGroups(self._file, opened.size())
        return self._groups


class Arrays(Rows):
    """An .npz file of NumPy: one array per model input, and arrays of ids and questions."""

    what = "array"

    def column(self, name: str) -> Any:
        """Return the texts of an array."""
        return [str(value) for value in self._columns()[name].tolist()]

    def count(self) -> int:
        """Return the number of rows.

        Raises: SaccadeError if arrays differ in it.
        """
        arrays, own = self._columns(), self.columns
        images = map(self._images_of, self.wanted.encoded)
        used = {*map(self.existing, self.wanted.numbers)}
        used |= {self.existing(name, "--column") for name in images}
        texts = [own.id or "id", *([own.question or "question"] if self.wanted.question else [])]
        used |= {*texts} & {*arrays}
        rows = {name: len(arrays[name]) for name in sorted(used)}
        if len(set(rows.values())) != 1:
            counts = ", ".join(f"{key} {count}" for key, count in rows.items())
            raise SaccadeError(f"{self.place}: rows of arrays differ ({counts}), expected equal.")
        return next(iter(rows.values()))

    def paths(self) -> str | None:
        """Return None: an array has pixels."""
        return None

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of each array; pixels are encoded as an image file."""
        arrays, row = self._columns(), entry["row"]
        inputs: dict[str, Any] = {name: arrays[name][row] for name in self.wanted.numbers}
        for name in self.wanted.encoded:
            inputs[name] = encoded([arrays[self._images_of(name)][row]])[0]
        return inputs

    def _images_of(self, name: str) -> str:
        return self.columns.image or name

    def _columns(self) -> dict[str, Any]:
        if self._file is None:
            with (
                reading(self.place, "an .npz of np.savez, without arrays of objects"),
                self.place.on_this_machine() as path,
            ):
                self._file = read_arrays(path)
        return dict(self._file)


_KINDS: dict[str, type[Kind]] = {
    **dict.fromkeys(SUFFIXES, ImageFile),
    **dict.fromkeys(TEXT_TABLES, Rows),
    ".parquet": Parquet,
    ".tar": Tar,
    ".npz": Arrays,
}


class BulkSource:
    """A file, or all files of one kind in a folder."""

    def __init__(
        self, place: Place, columns: Columns, wanted: ModelInputs, data_root: str | None = None
    ) -> None:
        self.place, self._columns, self._wanted = place, columns, wanted
        self._root = None if data_root is None else Place(data_root)
        self._open: dict[str, Kind] = {}

    def entries(self) -> Any:
        """Return the listing of all inputs.

        Raises: SaccadeError if there is no input, a folder has both images and packed files, a
            column is missing, or an id occurs twice.
        """
        pa = require("pyarrow", extra=EXTRA)
        files = self._files()
        images = [entry for entry in files if self._kind(entry[0]) is ImageFile]
        packed = [name for name, _ in files if self._kind(name) not in (None, ImageFile)]
        if packed and images:
            raise SaccadeError(
                f"{self.place}: contains {counted(len(images), 'image')} next to "
                f"{packed[0]}. Name a folder of images only, or files that contain or list images."
            )
        if images and images[0][0]:
            self._file(images[0][0]).image()
            names, sizes = zip(*images, strict=True)
            columns = {"id": list(names), "file": list(names), "size": list(sizes)}
            tables = [_listing(columns, self.place)]
        else:
            tables = [
                _listing(self._file(name).entries(name), self.place.join(name))
                for name in [*packed, *(name for name, _ in images)]
            ]
        self.close()
        table = pa.concat_tables(tables) if tables else _listing({"id": []}, self.place)
        _check_ids(table, self.place)
        return table

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of one entry of the listing.

        Raises: RowUnreadable; SaccadeError if the store no longer answers.
        """
        try:
            return self._file(entry["file"]).read(entry)
        except FileNotFoundError:
            raise RowUnreadable("no such file") from None
        except (OSError, SaccadeError, ValueError) as error:
            # If the store no longer answers, this input is not to blame.
            for flag, place in (("--input", self.place), ("--data-root", self._root)):
                if place is not None:
                    place.reach(flag)
            raise RowUnreadable(str(error)[:300]) from error

    def close(self) -> None:
        """Close all files."""
        for kind in self._open.values():
            kind.close()
        self._open.clear()

    def _file(self, name: str) -> Kind:
        if name not in self._open:
            while len(self._open) >= _KEPT_FILES:
                self._open.pop(next(iter(self._open))).close()
            kind = self._kind(name)
            assert kind is not None, "a listing has only files of known kinds"
            root = self._root or (self.place if name else self.place.parent)
            folder = "" if self._root else dirname(name)
            place = self.place.join(name)
            self._open[name] = kind(place, self._columns, self._wanted, (root, folder))
        return self._open[name]

    def _kind(self, name: str) -> type[Kind] | None:
        return _KINDS.get(PurePosixPath(name or str(self.place)).suffix.lower())

    def _files(self) -> list[tuple[str, int]]:
        try:
            if self.place.is_file():
                return [("", 0)]
            if not self.place.exists():
                raise SaccadeError(f"{self.place}: no such file or folder. Name one with --input.")
            files = self.place.files(recursive=True)
            shown = [entry for entry in files if "/." not in f"/{entry[0]}"]
            others = [name for name, _ in shown if self._kind(name) is None]
            if linked := [name for name in others if self.place.join(name).is_linked_folder()]:
                note(
                    f"{self.place}: left out {counted(len(linked), 'link')} to folders, such as "
                    f"{linked[0]}. To answer what they contain, pass their targets as --input."
                )
            return shown
        except OSError as error:
            raise SaccadeError(
                f"{self.place}: cannot be listed ({str(error)[:300]}). Choose an --input that can "
                "be read, and set the credentials that its store needs."
            ) from error


def _listing(columns: Mapping[str, Any], place: Place) -> Any:
    """Return a listing with these columns (lists or arrays); missing columns are null.

    Raises: SaccadeError if one of them has no text.
    """
    pa = require("pyarrow", extra=EXTRA)
    names = ("id", "file", "path", *_NUMBERS, "text")
    schema = pa.schema([(name, pa.string() if name in _TEXTS else pa.int64()) for name in names])
    count = len(columns["id"])
    try:
        filled = [
            pa.array(columns[field.name], field.type)
            if isinstance(columns.get(field.name), list)
            else columns[field.name].cast(field.type)
            if field.name in columns
            else pa.nulls(count, field.type)
            for field in schema
        ]
    except (ValueError, TypeError, NotImplementedError) as error:
        raise SaccadeError(
            f"{place}: ids, paths or questions are not text ({str(error)[:200]}). Choose other "
            "columns with --id-column or --column, or rename the files."
        ) from error
    return pa.table(filled, schema=schema)


def _check_ids(listing: Any, source: Place) -> None:
    """Check that there are inputs, each with a unique id.

    Raises: SaccadeError that names some duplicate ids.
    """
    pc = require("pyarrow.compute", extra=EXTRA)
    if listing.num_rows == 0:
        raise SaccadeError(
            f"{source}: found no input. Expected images ({', '.join(SUFFIXES)}), or .parquet, "
            ".csv, .jsonl, .tar or .npz files."
        )
    ids = listing["id"]
    if missing := ids.null_count + pc.sum(pc.equal(pc.utf8_length(ids), 0)).as_py():
        raise SaccadeError(
            f"{source}: {missing} of {listing.num_rows} inputs {'has' if missing == 1 else 'have'} "
            "no id. Fill in the id column, or choose another one with --id-column."
        )
    if pc.count_distinct(ids).as_py() == listing.num_rows:
        return
    counts = pc.value_counts(ids)
    twice = [entry["values"].as_py() for entry in counts if entry["counts"].as_py() > 1]
    raise SaccadeError(
        f"{source}: {len(twice)} id{' occurs' if len(twice) == 1 else 's occur'} more than once, "
        f"such as {', '.join(map(repr, twice[:_NAMED]))}. Each input needs a unique id: choose "
        "another column with --id-column, or leave it out for ids from file and row."
    )


def _filled(data: bytes) -> bytes:
    if not data:
        raise RowUnreadable("the file has 0 bytes")
    return data


def _as_text(value: Any) -> Any:
    """Return a number as text; the listing refuses lists and objects."""
    return str(value) if isinstance(value, int | float) else value


def _shown(names: Sequence[str]) -> str:
    return ", ".join(repr(name)[:60] for name in names[:20]) or "none"
