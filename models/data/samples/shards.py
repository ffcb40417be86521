# SPDX-License-Identifier: Apache-2.0
"""WebDataset shards: tar files in which the members with one key are one sample."""

import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from saccade.core.errors import Damaged, SaccadeError
from saccade.core.json_text import parse_json
from saccade.models.data.samples.folders import SUFFIXES
from saccade.models.data.samples.labels import LabelColumn
from saccade.models.data.samples.manifests import MASKS, SENTENCES
from saccade.models.data.samples.masks import MaskSource, mask_in_file
from saccade.models.data.samples.source import (
    Beside,
    DataDescription,
    RowUnreadable,
    SampleSource,
    Texts,
    is_hidden,
    sentences_in,
)
from saccade.models.image_decoding import ImageInput

_TEXT_BYTES, _JSON_BYTES = 4096, 2**20


class _MemberKind(NamedTuple):
    """What is wanted beside an image: the members that contain it, and the fields of an object.

    Without fields, the member is read when it is used.
    """

    name: str
    suffixes: tuple[str, ...]
    fields: tuple[str, ...] = ()


_LABEL = _MemberKind("label", (".cls", ".json"), ("label", "cls", "class", "class_name"))
_SENTENCE = _MemberKind("sentence", (".txt", ".json"), SENTENCES)
_MASK = _MemberKind("mask", tuple(f".{name}.png" for name in (*MASKS, "seg")))
_KINDS: Mapping[Beside, _MemberKind] = {"label": _LABEL, "sentence": _SENTENCE, "mask": _MASK}


class Member(NamedTuple):
    """A file in a shard: its sample, its kind, and where its bytes are."""

    key: str
    suffix: str
    offset: int
    size: int


class _Places:
    """Where the bytes of one member of each sample are."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self._shards = tuple(shards)
        self.shard, self._offset, self._size = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.shard)

    def add(self, shard: int, member: Member) -> None:
        """Add the member of the next sample."""
        self.shard.append(shard)
        self._offset.append(member.offset)
        self._size.append(member.size)

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes; of a larger member, the first ones beyond the limit."""
        size = min(self._size[row], most_bytes + 1)
        with self._shards[self.shard[row]].open("rb") as file:
            file.seek(self._offset[row])
            data = file.read(size)
        if len(data) < size:
            raise RowUnreadable("the tar file ends inside this image. Copy it again")
        return data


class TarShards(SampleSource):
    """Images with labels, sentences or masks in uncompressed tar files; `splits` are theirs, or -1.

    The files are read once from beginning to end, without the images. Then each image is read from
    its place.

    Raises: SaccadeError if a file is damaged, or its samples are not all of one form.
    """

    def __init__(
        self, path: Path, shards: Sequence[Path], splits: Sequence[int], given: DataDescription
    ) -> None:
        self.path, self._shards = path, tuple(shards)
        self._keys: list[str] = []
        self._images, self._masks = _Places(shards), _Places(shards)
        labels = LabelColumn()
        self.sentences = sentences = Texts() if given.beside == "sentence" else None
        self._kind = _KINDS[given.beside]
        self._form: frozenset[str] = frozenset()
        for index, shard in enumerate(shards):
            for key, members, value in _samples_of(shard, self._kind):
                image, mask = self._checked(shard, key, members)
                if sentences is not None:
                    sentences.append(_texts(shard, key, value))
                elif self._kind is _LABEL:
                    labels.add(_label(shard, key, value))
                elif mask is not None:
                    self._masks.add(index, mask)
                self._keys.append(key)
                self._images.add(index, image)
        if not self._keys:
            raise SaccadeError(
                f"{path}: found no samples, expected pairs such as a.jpg and "
                f"a{self._kind.suffixes[0]}."
            )
        if self._kind is _LABEL:
            self.labels, self.class_names = labels.classes(given, self.refused)
        else:
            self.without_classes(len(self._keys))
        if splits and splits[0] >= 0:
            self.split_of = np.array(splits, dtype=np.int8)[np.array(self._images.shard)]

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes of the image."""
        return self._images.read(row, most_bytes)

    def row_name(self, row: int) -> str:
        """Return shard and key."""
        return f"{self._shards[self._images.shard[row]].name}: {self._keys[row]}"

    def _checked(
        self, shard: Path, key: str, members: Mapping[str, Member]
    ) -> tuple[Member, Member | None]:
        """Return the image of a sample, and its mask if one is wanted and there.

        All samples have members of the same kinds.
        """
        kind = self._kind
        images = [suffix for suffix in members if suffix in SUFFIXES]
        beside = [suffix for suffix in members if suffix in kind.suffixes]
        shown = " ".join(sorted(members))
        if len(images) != 1 or (len(beside) > 1 if kind is _MASK else not beside):
            wanted = f"its {kind.name} ({kind.suffixes[0]}, or .json with a {kind.name})"
            if kind is _MASK:
                wanted = f"at most one mask ({kind.suffixes[0]})"
            raise Damaged(
                shard,
                f"sample {key!r} has {shown}, expected one image ({', '.join(SUFFIXES)}) and "
                f"{wanted}",
            )
        form = frozenset({*members} - {*images} | {"image"})
        self._form = self._form or form
        if form != self._form:
            first = " ".join(sorted(self._form))
            raise SaccadeError(
                f"{shard}: sample {key!r} has {shown}, but the samples before have {first}. Write "
                "shards whose samples all have the same members."
            )
        return members[images[0]], members[beside[0]] if kind is _MASK and beside else None


class MaskShards(TarShards, MaskSource):
    """Images with masks in PNG members, if there are any."""

    def __init__(
        self, path: Path, shards: Sequence[Path], splits: Sequence[int], given: DataDescription
    ) -> None:
        super().__init__(path, shards, splits, given)
        self.masked = len(self._masks) > 0
        self._suffix = next((one for one in _MASK.suffixes if one in self._form), "")

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return the indices in the PNG beside the image."""
        data = self._masks.read(row, wanted.max_image_mib * 2**20)
        return mask_in_file(data, f"{self._keys[row]}{self._suffix}", wanted)


def has_text(shard: Path) -> bool:
    """Return whether the first sample of a shard has sentences.

    Raises: as `TarShards`.
    """
    return next((value is not None for _, _, value in _samples_of(shard, _SENTENCE)), False)


def _samples_of(
    shard: Path, kind: _MemberKind = _LABEL
) -> Iterator[tuple[str, dict[str, Member], Any]]:
    """Return the key of each sample, its members by suffix, and its label as written or None.

    Raises: SaccadeError if the file is not an uncompressed tar file, or a key occurs again.
    """
    seen: set[str] = set()
    sample: dict[str, Member] = {}
    key, value = "", None
    try:
        with shard.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member, info in members_of(tar):
                if member.key != key or not sample:
                    if sample:
                        yield key, sample, value
                    key, sample, value = member.key, {}, None
                    if key in seen:
                        raise SaccadeError(
                            f"{shard}: sample {key!r} occurs again after others, expected its "
                            "members next to each other. Write the shard sorted by name."
                        )
                    seen.add(key)
                sample[member.suffix] = member
                # Of a text and an object, the text counts.
                wanted = kind.suffixes if value is None else kind.suffixes[:1]
                if kind.fields and member.suffix in wanted:
                    value = _written(shard, member, tar.extractfile(info), kind)
            # tarfile takes the end of a file for the end of the archive.
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it has no end, so that samples may be missing")
        if sample:
            yield key, sample, value
    except (tarfile.TarError, OSError, UnicodeDecodeError) as error:
        raise SaccadeError(
            f"{shard}: cannot be read as a tar file ({error}), expected an uncompressed one. "
            "Images are compressed already: pack them without compression."
        ) from error


def members_of(tar: tarfile.TarFile) -> Iterator[tuple[Member, tarfile.TarInfo]]:
    """Return the files of a shard that are not hidden, in their order."""
    for info in tar:
        parts = [part for part in info.name.split("/") if part not in ("", ".")]
        hidden = any(map(is_hidden, parts))
        if info.isreg() and not info.issparse() and not hidden:
            yield Member(*key_and_suffix(info.name), info.offset_data, info.size), info
        tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header


def key_and_suffix(member: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its last part, as WebDataset does."""
    folder, slash, name = member.rpartition("/")
    key, point, suffix = name.partition(".")
    return folder + slash + key, (point + suffix).lower()


def _written(shard: Path, member: Member, file: IO[bytes] | None, kind: _MemberKind) -> Any:
    """Return the label or sentence in a member: text, or the field of an object."""
    most = _JSON_BYTES if member.suffix == ".json" else _TEXT_BYTES
    if file is None or member.size > most:
        raise Damaged(
            shard,
            f"{member.key}{member.suffix} has {member.size} bytes, expected a {kind.name} of at "
            f"most {most}",
        )
    data = file.read()
    if member.suffix != ".json":
        return data.decode().strip()
    try:
        values = parse_json(data)
    except ValueError as error:
        raise Damaged(
            shard,
            f"{member.key}.json cannot be read ({error}), expected a JSON object with a "
            f"{kind.name}",
        ) from error
    fields = values if isinstance(values, dict) else {}
    return next((fields[name] for name in kind.fields if name in fields), None)


def _label(shard: Path, key: str, label: Any) -> str | int:
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise Damaged(
            shard,
            f"sample {key!r} has the label {label!r:.80}, expected a name or a number in .cls, or "
            f"in the field {_LABEL.fields[0]!r} of .json",
        )
    return label


def _texts(shard: Path, key: str, written: Any) -> list[str]:
    """Return the sentences of a sample: the lines of a text, or the field of an object."""
    lines = written.splitlines() if isinstance(written, str) else written
    try:
        return sentences_in([line for line in lines if line] if isinstance(lines, list) else lines)
    except ValueError as error:
        raise Damaged(
            shard,
            f"sample {key!r}: {error}, in .txt, one per line, or in the field 'caption' of .json",
        ) from error
