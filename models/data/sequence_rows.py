# SPDX-License-Identifier: Apache-2.0
"""Sources of labeled samples other than images: what a model takes, and rows of that."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.archives import array_names
from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.data.asked import DataAsked
from saccade.models.data.samples.arrays import check_whole, checked_images, npz_arrays
from saccade.models.data.samples.formats import tables_of
from saccade.models.data.samples.labels import numbered_classes
from saccade.models.data.samples.manifests import PathTable
from saccade.models.data.samples.point_clouds import (
    FILE_BYTES,
    READERS,
    in_unit_sphere,
    read_points,
)
from saccade.models.data.samples.source import (
    DataDescription,
    RowUnreadable,
    SampleSource,
    numbered,
)
from saccade.models.data.samples.texts import ClassFiles, TextTable
from saccade.models.data.token_states import SUFFIXES, split_indices, state_arrays

_TABLES = (".csv", ".jsonl", ".ndjson")
SECOND = "_b"  # suffix of the second input of a pair


@dataclass(frozen=True)
class Takes:
    """The inputs of a model. A number that is 0 is left to the data, as is an empty vocabulary."""

    kind: str  # image, tokens, points, characters or bytes
    sets: int = 1  # 2: pairs
    most: int = 0  # tokens, points, characters or bytes per input
    width: int = 0  # of a token
    vocabulary: tuple[str, ...] = ()  # of characters
    image: tuple[int, ...] = ()  # height, width, channels
    conditioned: bool = False  # with condition tokens
    condition_most: int = 0  # condition tokens per sample

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[Any]], vocabulary: Any = ()) -> "Takes":
        """Return what inputs of these names and shapes take; the first axis is the batch.

        `vocabulary` is that of characters; of other inputs, it is ignored.
        """
        lengths = ("length", "condition")
        names = [name for name in shapes if not name.startswith(lengths)]
        shape = shapes[names[0]]
        varies = names[0] != "image"
        condition = shapes.get("condition")
        return cls(
            names[0],
            len(names),
            int(shape[1]) if varies else 0,
            int(shape[2]) if names[0] == "tokens" else 0,
            tuple(vocabulary) if names[0] == "characters" else (),
            () if varies else tuple(int(side) for side in shape[1:]),
            condition is not None,
            int(condition[1]) if condition is not None else 0,
        )

    @property
    def plain_tokens(self) -> bool:
        """Return whether the only input is one sequence of tokens."""
        return self.kind == "tokens" and self.sets == 1 and not self.conditioned

    @property
    def is_image(self) -> bool:
        """Return whether the only input is one image."""
        return self.kind == "image" and self.sets == 1 and not self.conditioned


class SequenceRows(ABC):
    """Labeled samples of any source.

    Shapes: labels [n] int64, split_of [n] int8 or None.
    """

    path: Path
    labels: np.ndarray
    class_names: tuple[str, ...]
    split_of: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    skipped: int = 0

    @abstractmethod
    def read(self, row: int) -> tuple[Any, ...]:
        """Return the sample: an array, or a text, per input of a pair.

        Raises: RowUnreadable, OSError.
        """

    @abstractmethod
    def refused(self, row: int, reason: str) -> SaccadeError:
        """Return the error about a row."""

    def conditions(self, rows: np.ndarray, takes: Takes) -> tuple[dict[str, np.ndarray], Takes]:
        """Return the condition tokens of these rows and their lengths.

        Raises: SaccadeError if there are none.
        """
        raise SaccadeError(
            f"{self.path}: found no conditions, but the model takes some. Pass an .npz with "
            "condition (samples, tokens, width), next to its other arrays."
        )


def open_rows(name: str, takes: Takes, asked: DataAsked) -> SequenceRows:
    path, given = Path(name), DataDescription.of(asked.labels, asked.data_root)
    suffix = path.suffix.lower()
    if suffix == ".npz" and path.exists():
        return _ArrayRows(path, takes, given)
    if takes.plain_tokens and suffix in SUFFIXES and path.is_file():
        return _StateRows(path, given)
    if takes.sets == 1 and takes.kind in ("points", "tokens"):
        if path.is_dir():
            return PointRows(ClassFiles(path, READERS, given), takes.kind)
        if path.is_file() and suffix in _TABLES:
            return PointRows(PathTable(path, given), takes.kind)
    if takes.kind in ("bytes", "characters"):
        tables = tables_of(name)
        if tables or (path.is_file() and suffix in _TABLES):
            return _TextRows(TextTable(path, tables, takes.sets, given))
        if path.is_dir() and takes.sets == 1:
            return _TextRows(ClassFiles(path, (".txt",), given))
    found = f"found no {takes.kind}" if path.exists() else "found no such path"
    raise SaccadeError(
        f"data '{name}': {found}, but the model reads {takes.kind}. Pass {_expected(takes)}."
    )


def _expected(takes: Takes) -> str:
    arrays = ", ".join(_array_names(takes))
    files = {
        "points": "a folder of class folders, a .csv or a .jsonl of point files "
        f"({' '.join(sorted(READERS))}), or ",
        "tokens": "a .safetensors or .parquet of token states, files of points, or ",
    }
    texts = "a .csv, .jsonl or .parquet of {}, "
    if takes.sets == 2:
        text, before = texts.format("pairs of texts"), ""
    else:
        text = texts.format("texts") + "class folders of .txt files, "
        before = files.get(takes.kind, "")
    before = text + "or " if takes.kind in ("bytes", "characters") else before
    return f"{before}an .npz of {arrays}"


def _array_names(takes: Takes) -> tuple[str, ...]:
    """Return the arrays that an .npz must have; lengths of points and conditions may be absent."""
    first = "images" if takes.kind == "image" else takes.kind
    names = [first, first + SECOND][: takes.sets]
    if takes.kind in ("bytes", "characters", "tokens"):
        names += ["lengths", "lengths" + SECOND][: takes.sets]
    if takes.kind == "characters":
        names.append("vocabulary")
    return (*names, *(("condition",) if takes.conditioned else ()), "labels")


class _ArrayRows(SequenceRows):
    """The samples of an .npz; an array `split` of text may name the split of each.

    Shapes: images [n h w c] uint8; points [n m 3 or more]; tokens [n m d] float32; bytes [n m]
            uint8; characters [n m] of integers, vocabulary [k] of text; lengths [n]; condition
            [n m c] float32, condition_lengths [n]; second inputs of pairs end in _b.
    """

    def __init__(self, path: Path, takes: Takes, given: DataDescription) -> None:
        self.path, self._kind = path, takes.kind
        names = _array_names(takes)
        also = ("lengths", "lengths" + SECOND, "condition_lengths", "split")
        self._arrays = arrays = npz_arrays(path, names, also)
        self._names = names[: takes.sets]
        count = len(arrays[self._names[0]])
        check_whole(path, "labels", arrays["labels"], count, "samples")
        classes = arrays.get("class_names") if given.labels is None else np.array(given.labels)
        self.labels, self.class_names = numbered_classes(str(path), arrays["labels"], classes)
        for name in self._names:
            self._check(name, count)
        if "vocabulary" in names:
            self.vocabulary = _vocabulary(path, arrays["vocabulary"])
        if "split" in arrays:
            if arrays["split"].shape != (count,):
                raise ShapeError(
                    f"{path}: split is {arrays['split'].shape}, expected one name for each of the "
                    f"{count} samples."
                )
            self.split_of = split_indices(path, arrays["split"].tolist())

    def _check(self, name: str, count: int) -> None:
        array = self._arrays[name]
        if self._kind == "image":
            self._arrays[name] = checked_images(self.path, array, name)
            return
        axes, kinds = {"bytes": (2, "u"), "characters": (2, "iu")}.get(self._kind, (3, "f"))
        least = {"points": 3, "tokens": 1}.get(self._kind)
        wrong = self._kind == "bytes" and array.dtype != np.uint8
        if array.ndim != axes or array.dtype.kind not in kinds or 0 in array.shape or wrong:
            expected = {
                "bytes": "uint8 (samples, bytes)",
                "characters": "whole numbers (samples, characters)",
                "points": "float32 (samples, points, 3 or more)",
                "tokens": "float32 (samples, tokens, width)",
            }[self._kind]
            raise ShapeError(
                f"{self.path}: {name} are {array.dtype} {array.shape}, expected {expected}."
            )
        if len(array) != count or (least and array.shape[2] < least):
            raise ShapeError(
                f"{self.path}: {name} are {array.shape}, expected {count} samples"
                f"{' of x, y, z per point' if least == 3 else ''}, as many as labels."
            )
        lengths = "lengths" + (SECOND if name.endswith(SECOND) else "")
        self._arrays[lengths] = self._lengths(lengths, array.shape[1], count)

    def _lengths(self, name: str, most: int, count: int) -> np.ndarray:
        lengths = self._arrays.get(name, np.full(count, most))
        check_whole(self.path, name, lengths, count, "samples")
        if not 1 <= lengths.min() <= lengths.max() <= most:
            raise SaccadeError(
                f"{self.path}: {name} range from {lengths.min()} to {lengths.max()}, expected 1 "
                f"to {most}. Leave empty samples out."
            )
        return lengths

    def read(self, row: int) -> tuple[Any, ...]:
        """Return the valid part of each input."""
        if self._kind == "image":
            return tuple(self._arrays[name][row] for name in self._names)
        found = []
        for name in self._names:
            length = self._arrays["lengths" + (SECOND if name.endswith(SECOND) else "")][row]
            part = self._arrays[name][row, : int(length)]
            if part.dtype.kind == "f" and not np.isfinite(part).all():
                raise RowUnreadable(f"found NaN or infinity in {name}. Correct the values")
            found.append(in_unit_sphere(part)[:, :3] if self._kind == "points" else part)
        return tuple(found)

    def refused(self, row: int, reason: str) -> SaccadeError:
        """Return the error about a row."""
        return SaccadeError(f"{self.path}: {numbered(row)}: {reason}")

    def conditions(self, rows: np.ndarray, takes: Takes) -> tuple[dict[str, np.ndarray], Takes]:
        """Return the condition tokens of these rows and their lengths."""
        array = self._arrays["condition"]
        if array.ndim != 3 or array.dtype.kind != "f" or len(array) != len(self.labels):
            raise ShapeError(
                f"{self.path}: condition is {array.dtype} {array.shape}, expected float32 "
                f"({len(self.labels)}, tokens, width)."
            )
        if not np.isfinite(array[rows]).all():
            raise SaccadeError(f"{self.path}: condition has NaN or infinity. Correct the values.")
        lengths = self._lengths("condition_lengths", array.shape[1], len(array))
        most = takes.condition_most or array.shape[1]
        tokens, length = padded([array[row, : lengths[row]] for row in rows.tolist()], most)
        more = {"condition": tokens.astype(np.float32), "condition_length": length}
        return more, replace(takes, condition_most=most)


class _StateRows(SequenceRows):
    """The samples of a file of token states."""

    def __init__(self, path: Path, given: DataDescription) -> None:
        self.path = path
        self._states = states = state_arrays(path, given)
        self.labels, self.class_names = states.labels, states.class_names
        self.split_of = states.split_of

    def read(self, row: int) -> tuple[Any, ...]:
        """Return the valid tokens."""
        part = np.asarray(self._states.tokens[np.array([row])][0, : self._states.length[row]])
        if not np.isfinite(part).all():
            raise RowUnreadable("found NaN or infinity in tokens. Correct the values")
        return (part,)

    def refused(self, row: int, reason: str) -> SaccadeError:
        """Return the error about a row."""
        return SaccadeError(f"{self.path}: {numbered(row)}: {reason}")


class _FileRows(SequenceRows):
    """The samples of a source whose rows are read one by one."""

    def __init__(self, source: SampleSource) -> None:
        self._source, self.path, self.notes = source, source.path, source.notes
        self.labels, self.class_names = source.labels, source.class_names
        self.split_of = source.split_of

    def refused(self, row: int, reason: str) -> SaccadeError:
        """Return the error about a row."""
        return self._source.refused(row, reason)


class PointRows(_FileRows):
    """Files of points; for points their coordinates, for tokens also the further columns."""

    def __init__(self, source: SampleSource, kind: str) -> None:
        super().__init__(source)
        self._most = 3 if kind == "points" else None

    def read(self, row: int) -> tuple[Any, ...]:
        """Return the points in the unit sphere."""
        suffix = Path(self._source.row_name(row)).suffix.lower()
        if suffix not in READERS:
            raise RowUnreadable(
                f"is not a file of points ({' '.join(sorted(READERS))}). Convert it"
            )
        points = read_points(self._source.read(row, FILE_BYTES), suffix)
        return (in_unit_sphere(points)[:, : self._most],)


class _TextRows(_FileRows):
    """Texts in a table or in files."""

    def read(self, row: int) -> tuple[Any, ...]:
        """Return the text, or both texts of a pair."""
        if isinstance(self._source, TextTable):
            return self._source.texts[row]
        try:
            text = self._source.read(row, FILE_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RowUnreadable(f"is not UTF-8 text ({error.reason}). Save it as UTF-8") from None
        if not text:
            raise RowUnreadable("is empty, expected a text. Write one")
        return (text,)


def padded(parts: Sequence[np.ndarray], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut or pad arrays to one length, and return their lengths.

    Shapes: [m ...] each -> [n most ...], lengths int64 [n].
    """
    whole = np.zeros((len(parts), most, *parts[0].shape[1:]), dtype=parts[0].dtype)
    lengths = np.array([min(len(part), most) for part in parts], dtype=np.int64)
    for row, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        whole[row, :length] = part[:length]
    return whole, lengths


def _vocabulary(path: Path, words: np.ndarray) -> tuple[str, ...]:
    if words.ndim != 1 or words.dtype.kind != "U" or len(set(words.tolist())) != words.size:
        raise SaccadeError(
            f"{path}: vocabulary is {words.dtype} {words.shape}, expected distinct strings."
        )
    return tuple(words.tolist())


def has_conditions(name: str | None) -> bool:
    """Return whether this is an .npz with condition tokens."""
    path = Path(name or "")
    try:
        return path.suffix.lower() == ".npz" and "condition" in array_names(path)
    except (OSError, ValueError):
        return False
