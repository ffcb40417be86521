# SPDX-License-Identifier: Apache-2.0
"""WebDataset shards as tables: tar files in which the members with one key are one sample."""

import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

from saccade.core.errors import Damaged, SaccadeError
from saccade.core.json_text import parse_json
from saccade.models.data.samples.source import SUFFIXES, RowUnreadable, is_hidden, numbered, reading
from saccade.models.data.samples.tables import MASKS, SENTENCES, USUAL, Table, Usual


class Member(NamedTuple):
    """A file in a shard: its sample, its kind, and where its bytes are."""

    key: str
    suffix: str
    offset: int
    size: int


_IMAGE, _OBJECT = "image", ".json"
_MOST = {_OBJECT: 2**20}  # bytes of a member with values
_MOST_TEXT = 4096
_DAMAGE = (RecursionError, OverflowError, MemoryError)  # headers of headers; sizes of 2^62
_TAR = "a tar file without compression (images are compressed already)"


class Shard(Table):
    """A WebDataset shard: the members of an uncompressed tar file with one key are one row.

    The columns are `image`, the suffixes of the other members, such as `.cls`, and the fields of
    the object in .json, such as `label`.
    Two reads find what the rows are; then each image is read from its place.
    """

    usual: ClassVar[Usual] = {
        **USUAL,
        "images": (_IMAGE,),
        "labels": (".cls", "label", "cls", "class", "class_name"),
        "sentences": (".txt", *SENTENCES),
        "masks": tuple(f".{name}.png" for name in (*MASKS, "seg")),
        "splits": (),
    }
    packed = True

    def __init__(self, path: Path, split: int = -1, root: Path | None = None) -> None:
        super().__init__(path, split, root)
        self._keys: list[str] = []
        self._places: dict[str, tuple[array, array]] = {}
        members, _ = next(self._samples(()), ({}, {}))
        fields = None
        if _OBJECT in members:
            # What another member says needs no object, so that this one may be damaged.
            alone = members.keys().isdisjoint((".cls", ".txt", *self.usual["masks"]))
            with nullcontext() if alone else suppress(SaccadeError):
                fields = next(self._samples((_OBJECT,)))[1][_OBJECT]
        self._form = frozenset(members)
        self.names = [*sorted(members), *(fields if isinstance(fields, dict) else ())]

    def rows(self, columns: Sequence[str], files: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the values of each sample."""
        self._keys, self._places = [], {name: (array("q"), array("q")) for name in files}
        for members, values in self._samples(columns):
            if members.keys() != self._form:
                shown, first = _shown(members), " ".join(sorted(self._form))
                raise SaccadeError(
                    f"{self.path}: sample {members[_IMAGE].key!r} has {shown}, but the samples "
                    f"before have {first}. Write shards whose samples all have the same members."
                )
            self._keys.append(members[_IMAGE].key)
            for name, (offsets, sizes) in self._places.items():
                offsets.append(members[name].offset)
                sizes.append(members[name].size)
            fields = values.get(_OBJECT)
            known = (fields if isinstance(fields, dict) else {}) | values
            yield tuple(_lines_of(name, known.get(name)) for name in columns)

    def read(self, row: int, column: str, most_bytes: int) -> bytes:
        """Return the bytes of a member."""
        offsets, sizes = self._places[column]
        with self.path.open("rb") as file:
            return read_member(file, offsets[row], min(sizes[row], most_bytes + 1))

    def row_name(self, row: int) -> str:
        """Return the sample's key."""
        return f"sample {self._keys[row]!r}" if row < len(self._keys) else numbered(row)

    def file_name(self, row: int, column: str) -> str:
        """Return the member's name."""
        return f"{self._keys[row]}{column}"

    def _samples(
        self, columns: Sequence[str]
    ) -> Iterator[tuple[dict[str, Member], dict[str, Any]]]:
        """Yield the members of each sample by column, and the values of those that are wanted.

        Raises: SaccadeError if a sample has not one image, or occurs again.
        """
        seen: set[str] = set()
        members: dict[str, Member] = {}
        values: dict[str, Any] = {}
        for member, file in shard_members(self.path):
            key = member.key
            if key not in seen:
                if members:
                    yield self._checked(members), values
                members, values = {}, {}
                seen.add(key)
            elif key != next(iter(members.values())).key:
                raise SaccadeError(
                    f"{self.path}: sample {key!r} occurs again after others, expected its members "
                    "next to each other. Write the shard sorted by name."
                )
            name = member.suffix
            members[name] = member
            fields = name == _OBJECT and any(not column.startswith(".") for column in columns)
            if name in columns or fields:
                values[name] = self._value(member, name, file)
        if members:
            yield self._checked(members), values

    def _checked(self, members: dict[str, Member]) -> dict[str, Member]:
        images = [name for name in members if name in SUFFIXES]
        if len(images) != 1 or len(members.keys() & {*self.usual["masks"]}) > 1:
            key = next(iter(members.values())).key
            raise Damaged(
                self.path,
                f"sample {key!r} has {_shown(members)}, expected one image ({', '.join(SUFFIXES)}) "
                "and at most one mask (.mask.png)",
            )
        members[_IMAGE] = members.pop(images[0])
        return members

    def _value(self, member: Member, name: str, file: IO[bytes]) -> Any:
        most = _MOST.get(name, _MOST_TEXT)
        with reading(f"{self.path}: {member.key}{member.suffix}", "text or a JSON object"):
            if member.size > most:
                raise ValueError(f"it has {member.size} bytes, expected at most {most}")
            data = file.read()
            return parse_json(data) if name == _OBJECT else data.decode().strip()


def _shown(members: Mapping[str, Member]) -> str:
    return " ".join(sorted(member.suffix for member in members.values()))


def _lines_of(name: str, value: Any) -> Any:
    """Return the sentences in a text, one per line, or in a list, without empty ones."""
    if name not in Shard.usual["sentences"] or not isinstance(value, str | list):
        return value
    lines = value.splitlines() if isinstance(value, str) else value
    return [line for line in lines if str(line).strip()]


def shard_members(path: Any) -> Iterator[tuple[Member, IO[bytes]]]:
    """Return the files of a shard that are not hidden, in their order, each opened.

    `path` is a path, or whatever opens alike, such as an object in a store.

    Raises: SaccadeError if it is not an uncompressed tar file, or has no end.
    """
    with (
        reading(path, _TAR, tarfile.TarError, *_DAMAGE),
        path.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:") as tar,
    ):
        for info in tar:
            if info.size < 0:  # tarfile would go back, and come by again
                raise tarfile.ReadError(f"{info.name!r:.80} has {info.size} bytes")
            parts = [part for part in info.name.split("/") if part not in ("", ".")]
            if info.isreg() and not info.issparse() and not any(map(is_hidden, parts)):
                key, suffix = key_and_suffix(info.name)
                member = Member(key, suffix, info.offset_data, info.size)
                yield member, tar.extractfile(info)  # type: ignore[misc]
            tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header
        # tarfile takes the end of a file for the end of the archive.
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it has no end, so that samples may be missing")


def read_member(file: Any, offset: int, size: int) -> bytes:
    """Return the bytes of a member of an open tar file.

    Raises: RowUnreadable if the file ends before.
    """
    file.seek(offset)
    data: bytes = file.read(size)
    if len(data) < size:
        raise RowUnreadable("the tar file ends inside this image. Copy it again")
    return data


def key_and_suffix(member: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its last part, as WebDataset does."""
    folder, slash, name = member.rpartition("/")
    key, point, suffix = name.partition(".")
    return folder + slash + key, (point + suffix).lower()
