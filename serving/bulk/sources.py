# SPDX-License-Identifier: Apache-2.0
"""Inputs of a job: images, tables, tar shards or arrays. They are listed once and read by row."""

import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from saccade.core.archives import read_arrays
from saccade.core.errors import SaccadeError
from saccade.models.data.samples.shards import key_and_suffix
from saccade.models.data.samples.tables import RowGroups
from saccade.serving.bulk import listing
from saccade.serving.bulk.place import Place
from saccade.serving.client.images import encoded

_IDS, _QUESTIONS = "id", "question"
_IMAGE_COLUMNS = ("image", "path", "file", "file_name", "filename", "jpg", "png")
_KEPT_FILES = 4  # files with many inputs that are open at the same time


class Unreadable(Exception):
    """Raised for an input that cannot be read; the message gives the reason."""


@dataclass(frozen=True)
class Columns:
    """Names of columns. Defaults: `id`, `question`, and the first usual name for images."""

    image: str | None = None
    id: str | None = None
    question: str | None = None


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of the model: for encoded images, for numbers, and for a question."""

    encoded: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    question: bool = False

    @property
    def images_alone(self) -> bool:
        """True if a request consists of one image."""
        return len(self.encoded) == 1 and not self.numbers and not self.question


class Kind(ABC):
    """One kind of file. An instance is one file, opened on first use."""

    def __init__(self, place: Place, columns: Columns, wanted: ModelInputs) -> None:
        self.place, self.columns, self.wanted = place, columns, wanted
        self._file: Any = None

    @abstractmethod
    def entries(self, name: str) -> Any:
        """Return the listing of this file, whose name in the source is `name`."""

    @abstractmethod
    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of one entry by the model's input: bytes of an image, or an array.

        Raises: Unreadable.
        """

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class ImageFile(Kind):
    """An image file."""

    def entries(self, name: str) -> Any:
        """Return one entry."""
        _only_image(self.place, self.wanted)
        own = name or PurePosixPath(self.place.root).name
        return listing.table_of({"id": [own], "file": [name]})

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file's bytes."""
        return {_only_image(self.place, self.wanted): _bytes_of(self.place)}


class ImageTable(Kind):
    """CSV or JSON lines: each row names an image file, relative to the table or by address."""

    def entries(self, name: str) -> Any:
        """Return one entry per row."""
        return self._of(_read_table(self.place), name)

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the bytes of the file that the row names."""
        return {self.wanted.encoded[0]: _bytes_of(_beside(self.place, entry["path"]))}

    def _of(self, table: Any, name: str) -> Any:
        if len(self.wanted.encoded) != 1 or self.wanted.numbers:
            _only_image(self.place, self.wanted)
        column = self._image_column(table.column_names)
        columns = {"path": table[column], "file": _repeated(name, table.num_rows)}
        columns["row"] = list(range(table.num_rows))
        return self._with_ids(table, columns, default=table[column])

    def _image_column(self, names: Sequence[str]) -> str:
        if self.columns.image is not None:
            return self._existing(self.columns.image, "--column", names)
        usual = (*self.wanted.encoded, *_IMAGE_COLUMNS)
        if (found := next((name for name in usual if name in names), None)) is None:
            raise SaccadeError(
                f"{self.place}: no column of images; it has {_shown(names)}. Choose one with "
                "--column."
            )
        return found

    def _with_ids(self, table: Any, columns: dict[str, Any], default: Any) -> Any:
        names = table.column_names
        if self.columns.id is not None or _IDS in names:
            default = table[self._existing(self.columns.id or _IDS, "--id-column", names)]
        if self.wanted.question:
            own = self.columns.question or _QUESTIONS
            columns["text"] = table[self._existing(own, "--question-column", names)]
        try:
            return listing.table_of({"id": default, **columns})
        except (ValueError, TypeError, NotImplementedError) as error:
            raise SaccadeError(
                f"{self.place}: the columns of ids, paths or questions do not contain text "
                f"({str(error)[:200]}). Choose others with --id-column or --column."
            ) from error

    def _existing(self, name: str, flag: str, names: Sequence[str]) -> str:
        if name not in names:
            raise SaccadeError(
                f"{self.place}: no column {name!r}; it has {_shown(names)}. Choose one with {flag}."
            )
        return name


class Parquet(ImageTable):
    """Parquet: a column with bytes or paths of image files, or one column per model input."""

    _groups: RowGroups | None = None

    def entries(self, name: str) -> Any:
        """Return one entry per row, reading only ids, paths and questions."""
        with _said_of(self.place):
            file = self._opened()
            schema = file.schema_arrow
            column = None if self.wanted.numbers else self._image_column(schema.names)
            texts = [self.columns.id or _IDS]
            if self.columns.id is not None:
                self._existing(self.columns.id, "--id-column", schema.names)
            if self.wanted.question:
                own = self.columns.question or _QUESTIONS
                texts.append(self._existing(own, "--question-column", schema.names))
            read = [text for text in texts if text in schema.names]
            if column is not None and _is_text(schema.field(column).type):
                return self._of(file.read(columns=[*read, column]), name)
            for number in self.wanted.numbers:
                self._existing(number, "the model's inputs", schema.names)
            rows = file.metadata.num_rows
            table = file.read(columns=read)
        ids = [f"{name or PurePosixPath(self.place.root).name}#{row}" for row in range(rows)]
        columns = {"file": _repeated(name, rows), "row": list(range(rows))}
        return self._with_ids(table, columns, default=ids)

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row's values."""
        if entry["path"] is not None:
            return super().read(entry)
        with _said_of(self.place):
            self._groups = self._groups or RowGroups(self._opened())
            values = self._groups.row(entry["row"])
        given: dict[str, Any] = {name: np.array(values[name]) for name in self.wanted.numbers}
        if self.wanted.encoded:
            value = values[self._image_column(list(values))]
            # Hugging Face stores images as structures of bytes and a path.
            value = value.get("bytes") if isinstance(value, dict) else value
            if not isinstance(value, bytes) or not value:
                raise Unreadable("the column of images has no bytes in this row")
            given[self.wanted.encoded[0]] = value
        return given

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._groups = None

    def _opened(self) -> Any:
        import pyarrow.parquet as pq

        if self._file is None:
            self._file = pq.ParquetFile(self.place.open())
        return self._file


class Tar(Kind):
    """A WebDataset shard: the members with one key are one input, and one of them is an image."""

    def entries(self, name: str) -> Any:
        """Return one entry per image, with the position of its bytes."""
        _only_image(self.place, self.wanted)
        shard = name or PurePosixPath(self.place.root).name
        columns: dict[str, list[Any]] = {key: [] for key in ("id", "file", "row", "offset", "size")}
        wanted = (self.columns.image,) if self.columns.image else listing.SUFFIXES
        ends = tuple("." + suffix.lstrip(".").lower() for suffix in wanted)
        try:
            with self.place.open() as file, tarfile.open(fileobj=file, mode="r:") as tar:
                for row, member in enumerate(tar):
                    key, suffix = key_and_suffix(member.name)
                    if member.isreg() and suffix.endswith(ends):
                        entry = (f"{shard}/{key}", name, row, member.offset_data, member.size)
                        for column, value in zip(columns.values(), entry, strict=True):
                            column.append(value)
        except (tarfile.TarError, OSError) as error:
            raise SaccadeError(
                f"{self.place}: cannot be read as a tar file ({error}), expected an uncompressed "
                "one. Images are compressed already: pack them without compression."
            ) from error
        return listing.table_of(columns)

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the member's bytes."""
        if self._file is None:
            self._file = self.place.open()
        self._file.seek(entry["offset"])
        data = self._file.read(entry["size"])
        if len(data) != entry["size"]:
            raise Unreadable("the tar file ends inside this member")
        return {self.wanted.encoded[0]: data}


class Arrays(Kind):
    """An .npz file of NumPy: one array per model input, and arrays of ids and questions."""

    _arrays: dict[str, np.ndarray] | None = None

    def entries(self, name: str) -> Any:
        """Return one entry per row of the arrays."""
        arrays = self._opened()
        names = [*self.wanted.numbers, *map(self._images_of, self.wanted.encoded)]
        if self.wanted.question:
            names.append(self.columns.question or _QUESTIONS)
        if self.columns.id is not None:
            names.append(self.columns.id)
        if missing := [name for name in names if name not in arrays]:
            raise SaccadeError(
                f"{self.place}: no array {missing[0]!r}; it has {_shown(list(arrays))}. Write it "
                "with np.savez under that name."
            )
        own = self.columns.id or _IDS
        rows = {name: len(arrays[name]) for name in {*names, *({own} & set(arrays))}}
        if len(set(rows.values())) != 1:
            counts = ", ".join(f"{key} {count}" for key, count in sorted(rows.items()))
            raise SaccadeError(f"{self.place}: rows of arrays differ ({counts}), expected equal.")
        count = next(iter(rows.values()))
        shown = name or PurePosixPath(self.place.root).name
        columns: dict[str, Any] = {
            "id": [str(value) for value in arrays[own].tolist()]
            if own in arrays
            else [f"{shown}#{row}" for row in range(count)],
            "file": _repeated(name, count),
            "row": list(range(count)),
        }
        if self.wanted.question:
            questions = arrays[self.columns.question or _QUESTIONS]
            columns["text"] = [str(value) for value in questions.tolist()]
        return listing.table_of(columns)

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of each array; pixels are encoded as an image file."""
        arrays, row = self._opened(), entry["row"]
        given: dict[str, Any] = {name: arrays[name][row] for name in self.wanted.numbers}
        for name in self.wanted.encoded:
            given[name] = encoded([arrays[self._images_of(name)][row]])[0]
        return given

    def close(self) -> None:
        """Release the arrays."""
        self._arrays = None

    def _images_of(self, name: str) -> str:
        return self.columns.image or name

    def _opened(self) -> dict[str, np.ndarray]:
        if self._arrays is None:
            try:
                with _on_this_machine(self.place) as path:
                    self._arrays = read_arrays(path)
            except (OSError, ValueError) as error:
                raise SaccadeError(
                    f"{self.place}: cannot be read ({error}). Write it with np.savez, without "
                    "arrays of objects."
                ) from error
        return self._arrays


_KINDS: dict[str, type[Kind]] = {
    **dict.fromkeys(listing.SUFFIXES, ImageFile),
    **dict.fromkeys((".csv", ".jsonl", ".ndjson"), ImageTable),
    ".parquet": Parquet,
    ".tar": Tar,
    ".npz": Arrays,
}


class BulkSource:
    """A file, or all files of one kind in a folder."""

    def __init__(self, place: Place, columns: Columns, wanted: ModelInputs) -> None:
        self.place, self._columns, self._wanted = place, columns, wanted
        self._open: dict[str, Kind] = {}

    def entries(self) -> Any:
        """Return the listing of all inputs.

        Raises: SaccadeError if there is no input, a folder has both images and packed files, a
            column is missing, or an id occurs twice.
        """
        import pyarrow as pa

        files = self._files()
        images = [entry for entry in files if self._kind(entry[0]) is ImageFile]
        packed = [name for name, _ in files if self._kind(name) not in (None, ImageFile)]
        if packed and images:
            raise SaccadeError(
                f"{self.place}: contains {len(images)} image{'s' * (len(images) != 1)} next to "
                f"{packed[0]}. Name a folder of images only, or files that contain or list images."
            )
        if images and images[0][0]:
            _only_image(self.place, self._wanted)
            names, sizes = zip(*images, strict=True)
            tables = [
                listing.table_of({"id": list(names), "file": list(names), "size": list(sizes)})
            ]
        else:
            tables = [self._file(name).entries(name) for name in [*packed, *(n for n, _ in images)]]
        self.close()
        table = pa.concat_tables(tables) if tables else listing.table_of({"id": []})
        listing.check_ids(table, self.place)
        return table

    def read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of one entry of the listing.

        Raises: Unreadable.
        """
        try:
            return self._file(entry["file"]).read(entry)
        except FileNotFoundError:
            raise Unreadable("no such file") from None
        except (OSError, SaccadeError, ValueError) as error:
            raise Unreadable(str(error)[:300]) from error

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
            place = self.place.join(name) if name else self.place
            self._open[name] = kind(place, self._columns, self._wanted)
        return self._open[name]

    def _kind(self, name: str) -> type[Kind] | None:
        return _KINDS.get(PurePosixPath(name or str(self.place)).suffix.lower())

    def _files(self) -> list[tuple[str, int]]:
        try:
            if self.place.is_file():
                return [("", 0)]
            if not self.place.exists():
                raise SaccadeError(f"{self.place}: no such file or folder. Name one with --input.")
            return [entry for entry in self.place.files(recursive=True) if not _hidden(entry[0])]
        except OSError as error:
            raise SaccadeError(
                f"{self.place}: cannot be listed ({str(error)[:300]}). Choose an --input that can "
                "be read, and set the credentials that its store needs."
            ) from error


def _only_image(place: Place, wanted: ModelInputs) -> str:
    """Return the model's input if it takes one image and nothing else.

    Raises: SaccadeError otherwise.
    """
    if not wanted.images_alone:
        needs = [*wanted.encoded, *wanted.numbers, *(["question"] if wanted.question else [])]
        raise SaccadeError(
            f"{place}: has images only, but the model takes {' and '.join(needs)}. Use .npz or "
            ".parquet files with arrays or columns of these names."
        )
    return wanted.encoded[0]


def _bytes_of(place: Place) -> bytes:
    data = place.read()
    if not data:
        raise Unreadable("the file has 0 bytes")
    return data


def _beside(table: Place, path: str | None) -> Place:
    """Return the file that a table names: an address, a path, or a path relative to the table."""
    if not path:
        raise Unreadable("the table names no file in this row")
    if "://" in path or path.startswith("/"):
        return Place(path)
    if table.name:
        return Place(table.root, str(PurePosixPath(table.name).parent / path))
    head, mark, query = table.root.partition("?")
    return Place(f"{head.rpartition('/')[0] or '.'}{mark}{query}", path)


def _read_table(place: Place) -> Any:
    import pyarrow as pa
    from pyarrow import csv, json

    try:
        with place.open() as file:
            if str(place).endswith(".csv"):
                return csv.read_csv(
                    file, convert_options=csv.ConvertOptions(strings_can_be_null=True)
                )
            return json.read_json(file)
    except (pa.ArrowException, OSError) as error:
        raise SaccadeError(
            f"{place}: cannot be read as a table ({str(error)[:300]}), expected CSV with a header "
            "line, or one JSON object per line."
        ) from error


@contextmanager
def _said_of(place: Place) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise SaccadeError(
            f"{place}: cannot be read as Parquet ({str(error)[:300]}). Write it again."
        ) from error


@contextmanager
def _on_this_machine(place: Place) -> Iterator[Path]:
    if place.is_local:
        yield place.path
        return
    with NamedTemporaryFile(prefix="saccade-bulk-", suffix=".npz") as copy:
        copy.write(place.read())
        copy.flush()
        yield Path(copy.name)


def _repeated(name: str, count: int) -> Any:
    import pyarrow as pa

    return pa.repeat(pa.scalar(name), count)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _shown(names: Sequence[str]) -> str:
    return ", ".join(repr(name)[:60] for name in names[:20]) or "none"
