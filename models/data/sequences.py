# SPDX-License-Identifier: Apache-2.0
"""The user's labeled samples other than images: points, texts, tokens, pairs, conditions."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError
from saccade.core.verbosity import note_once
from saccade.models.data.datasets import note_left_out, rows_of_split
from saccade.models.data.options import DataOptions, keeps_loaded
from saccade.models.data.samples.arrays import (
    ArrayForm,
    LabeledArrays,
    checked_images,
    distinct_texts,
    names_in,
    npz_arrays,
)
from saccade.models.data.samples.formats import (
    FORMATS,
    IMAGES,
    PACKED,
    TableRows,
    is_packed,
    open_tables,
)
from saccade.models.data.samples.point_clouds import (
    FILE_BYTES,
    READERS,
    in_unit_sphere,
    read_points,
)
from saccade.models.data.samples.source import (
    SKIP_HINT,
    ClassFolders,
    DataDescription,
    RowUnreadable,
    SampleSource,
)
from saccade.models.data.token_states import SUFFIXES, open_states

SECOND = "_b"  # suffix of the second input of a pair
LONGEST = 1024  # tokens, points or characters per input, unless more are asked for
_MOST_CHARACTERS = 4096  # different ones in a vocabulary
_SHOWN = 10  # unreadable rows in notes


@dataclass(frozen=True)
class SampleInputs:
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
    def of(cls, shapes: Mapping[str, Sequence[Any]], vocabulary: Any = ()) -> "SampleInputs":
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


_FORMS: Mapping[str, ArrayForm] = {
    "bytes": ArrayForm("uint8", "n m", "uint8 ({n}, bytes)"),
    "characters": ArrayForm("int uint", "n m", "whole numbers ({n}, characters)"),
    "points": ArrayForm("float", "n m 3+", "float32 ({n}, points, 3 or more), x, y, z per point"),
    "tokens": ArrayForm("float", "n m d", "float32 ({n}, tokens, width)"),
    "condition": ArrayForm("float", "n m d", "float32 ({n}, tokens, width)"),
}


class SequenceArrays(LabeledArrays):
    """The samples of an .npz; an array `split` of text may name the split of each.

    Shapes: images [n h w c] uint8; points [n m 3 or more]; tokens [n m d] float32; bytes [n m]
            uint8; characters [n m] of integers, vocabulary [k] of text; lengths [n]; condition
            [n m c] float32, condition_lengths [n]; second inputs of pairs end in _b.
    """

    def __init__(self, path: Path, takes: SampleInputs, given: DataDescription) -> None:
        names = _array_names(takes)
        also = ("lengths", "lengths" + SECOND, "condition_lengths", "split")
        arrays = npz_arrays(path, names, also)
        self._kind, self._names, count = takes.kind, names[: takes.sets], len(arrays[names[0]])
        super().__init__(path, arrays, count, given)
        self._lengths: dict[str, np.ndarray] = {}
        for name in self._names:
            if takes.kind == "image":
                arrays[name] = checked_images(path, arrays[name], name)
            else:
                self._check(name, takes.kind)
                own = "lengths" + (SECOND if name.endswith(SECOND) else "")
                self._lengths[name] = self.lengths(own, arrays[name].shape[1])
        texts = "vocabulary" in names and distinct_texts(path, "vocabulary", arrays["vocabulary"])
        self.vocabulary = tuple(texts or ())

    def _check(self, name: str, kind: str) -> None:
        array = self.arrays[name]
        _FORMS[kind].check(self.path, name, array.dtype, array.shape, n=len(self))

    def sample(self, row: int) -> tuple[Any, ...]:
        """Return the valid part of each input."""
        if self._kind == "image":
            return tuple(self.arrays[name][row] for name in self._names)
        found = []
        for name in self._names:
            part = _finite(self.arrays[name][row, : self._lengths[name][row]], name)
            found.append(in_unit_sphere(part)[:, :3] if self._kind == "points" else part)
        return tuple(found)

    def conditions(
        self, rows: np.ndarray, takes: SampleInputs
    ) -> tuple[dict[str, np.ndarray], SampleInputs]:
        """Return the condition tokens of these rows and their lengths."""
        self._check("condition", "condition")
        array = self.arrays["condition"]
        if not np.isfinite(array[rows]).all():
            raise SaccadeError(f"{self.path}: condition has NaN or infinity. Correct the values.")
        lengths = self.lengths("condition_lengths", array.shape[1])
        most = takes.condition_most or array.shape[1]
        tokens, length = padded([array[row, : lengths[row]] for row in rows.tolist()], most)
        more = {"condition": tokens.astype(np.float32), "condition_length": length}
        return more, replace(takes, condition_most=most)


def _array_names(takes: SampleInputs) -> tuple[str, ...]:
    """Return the arrays that an .npz must have; lengths of points and conditions may be absent."""
    first = "images" if takes.kind == "image" else takes.kind
    names = [first, first + SECOND][: takes.sets]
    if takes.kind in ("bytes", "characters", "tokens"):
        names += ["lengths", "lengths" + SECOND][: takes.sets]
    if takes.kind == "characters":
        names.append("vocabulary")
    return (*names, *(("condition",) if takes.conditioned else ()), "labels")


def _finite(part: np.ndarray, name: str) -> np.ndarray:
    if part.dtype.kind == "f" and not np.isfinite(part).all():
        raise RowUnreadable(f"found NaN or infinity in {name}. Correct the values")
    return part


@dataclass(frozen=True)
class _Samples:
    """A source, and how the sample in a row is read: an array, or a text, per input of a pair."""

    source: SampleSource
    read: Callable[[int], tuple[Any, ...]]
    points: bool = False  # in files


def _open(name: str, takes: SampleInputs, asked: DataOptions) -> _Samples:
    path, given = Path(name), DataDescription.of(asked.labels, asked.data_root)
    suffix = path.suffix.lower()
    if suffix == ".npz" and path.exists():
        arrays = SequenceArrays(path, takes, given)
        return _Samples(arrays, arrays.sample)
    if takes.plain_tokens and suffix in SUFFIXES and path.is_file():
        states = open_states(path, given)
        return _Samples(states, lambda row: (_finite(states.tokens.text(row), "tokens"),))
    tables = path.is_file() and suffix in FORMATS
    source: SampleSource
    if takes.kind in ("points", "tokens") and takes.sets == 1 and suffix not in PACKED:
        if path.is_dir():
            source = ClassFolders(path, given, tuple(READERS))
            return _Samples(source, partial(_points, source, takes.kind), points=True)
        if tables:
            source = TableRows(path, open_tables(name, given.root), IMAGES["label"], given)
            return _Samples(source, partial(_points, source, takes.kind), points=True)
    if takes.kind in ("bytes", "characters"):
        if is_packed(name) or tables:
            wanted = ("texts" if takes.sets == 1 else "pairs of texts", "labels")
            source = TableRows(path, open_tables(name), wanted, given)
            assert source.sentences is not None, "asked for"
            return _Samples(source, source.sentences.__getitem__)
        if path.is_dir() and takes.sets == 1:
            source = ClassFolders(path, given, (".txt",))
            return _Samples(source, partial(_text, source))
    found = f"found no {takes.kind}" if path.exists() else "found no such path"
    raise SaccadeError(
        f"data '{name}': {found}, but the model reads {takes.kind}. Pass {_expected(takes)}."
    )


def _expected(takes: SampleInputs) -> str:
    files = {
        "points": "a folder of class folders, a .csv or a .jsonl of point files "
        f"({' '.join(sorted(READERS))}), or ",
        "tokens": "a .safetensors or .parquet of token states, files of points, or ",
        **dict.fromkeys(
            ("bytes", "characters"),
            "a .csv, .jsonl or .parquet of texts, class folders of .txt files, or ",
        ),
    }
    if takes.sets == 2:
        text = takes.kind in ("bytes", "characters")
        files = {takes.kind: "a .csv, .jsonl or .parquet of pairs of texts, or " if text else ""}
    return f"{files.get(takes.kind, '')}an .npz of {', '.join(_array_names(takes))}"


def _points(source: SampleSource, kind: str, row: int) -> tuple[np.ndarray]:
    """Return the points in the unit sphere: their coordinates, or for tokens all columns."""
    suffix = Path(source.row_name(row)).suffix.lower()
    if suffix not in READERS:
        raise RowUnreadable(f"is not a file of points ({' '.join(sorted(READERS))}). Convert it")
    points = in_unit_sphere(read_points(source.read(row, FILE_BYTES), suffix))
    return (points[:, :3] if kind == "points" else points,)


def _text(source: SampleSource, row: int) -> tuple[str]:
    try:
        text = source.read(row, FILE_BYTES).decode("utf-8-sig")
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


def has_conditions(name: str | None) -> bool:
    """Return whether this is an .npz with condition tokens."""
    path = Path(name or "")
    return path.suffix.lower() == ".npz" and "condition" in names_in(path)


@dataclass(frozen=True)
class Sequences:
    """One split of labeled samples.

    Shapes: inputs by name [n ...], padded with 0, with lengths [n] int64; labels [n] int64, indices
            into class_names.
    """

    inputs: dict[str, np.ndarray]
    labels: np.ndarray
    class_names: tuple[str, ...]
    name: str
    split: str
    takes: SampleInputs  # with the numbers that the data decided
    sha256: str = field(repr=False)
    skipped: int = 0  # unreadable rows that were left out


@keeps_loaded
def sequences(
    name: str,
    split: str,
    takes: SampleInputs,
    asked: DataOptions | None = None,
    limit: int | None = None,
) -> Sequences:
    """Load one split of the user's samples, in memory.

    Longer samples are cut: points to a random choice, everything else to its beginning. Points are
    moved and scaled into the unit sphere.

    Raises: SaccadeError if there is no such data, or it or one of its rows cannot be used,
        ShapeError if its arrays have other shapes than the model takes.
    """
    asked = asked or DataOptions()
    opened = _open(name, takes, asked)
    source = opened.source
    split, rows = rows_of_split(source, split)
    kept, samples = _read(opened, rows[:limit], asked.skip_bad)
    note_left_out(name, split, len(rows[:limit]), len(kept))
    inputs, takes = _together(name, samples, takes, opened)
    if takes.conditioned:
        if not isinstance(source, SequenceArrays):
            raise SaccadeError(
                f"{source.path}: found no conditions, but the model takes some. Pass an .npz with "
                "condition (samples, tokens, width), next to its other arrays."
            )
        more, takes = source.conditions(kept, takes)
        inputs |= more
    labels, names = source.labels[kept], source.class_names
    digest = hashlib.sha256(repr((names, sorted(inputs))).encode())
    for array in (*inputs.values(), labels):
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    skipped = len(rows[:limit]) - len(kept)
    return Sequences(
        inputs, labels, names, Path(name).name, split, takes, digest.hexdigest(), skipped
    )


def _read(
    opened: _Samples, rows: np.ndarray, most: int
) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
    """Return the rows that can be read, and their samples."""
    samples, bad = [], list[int]()
    for place, row in enumerate(rows.tolist()):
        try:
            samples.append(opened.read(row))
        except (RowUnreadable, OSError) as error:
            refused = opened.source.refused(row, f"{error}, or remove it.")
            if len(bad) >= most:
                hint = (
                    f" --skip-bad {most} leaves out at most {most} such rows."
                    if most
                    else SKIP_HINT
                )
                raise SaccadeError(f"{refused}{hint}") from error
            bad.append(place)
            if len(bad) <= _SHOWN:
                note_once(f"left out: {refused}")
    return np.delete(rows, bad), samples


def _together(
    name: str, samples: list[tuple[Any, ...]], takes: SampleInputs, opened: _Samples
) -> tuple[dict[str, np.ndarray], SampleInputs]:
    """Return the samples as padded arrays by input name, and what they decide."""
    if takes.kind == "image":
        both = [np.stack([sample[place] for sample in samples]) for place in range(takes.sets)]
        if takes.image not in ((), both[0].shape[1:]) or len({i.shape for i in both}) > 1:
            shapes = " and ".join(str(images.shape[1:]) for images in both)
            raise ShapeError(
                f"{name}: images are {shapes} (height, width, channels), expected "
                f"{takes.image or 'one size'}. Pass images of that size."
            )
        takes = replace(takes, image=both[0].shape[1:])
        return dict(zip(("image", "image" + SECOND), both, strict=False)), takes
    if takes.kind == "characters":
        takes, samples = _characters(name, samples, takes, getattr(opened.source, "vocabulary", ()))
    elif takes.kind == "bytes":
        samples = [tuple(map(_as_bytes, sample)) for sample in samples]
    widths = {part.shape[-1] for sample in samples for part in sample}
    if takes.kind == "tokens":
        if len(widths) > 1 or takes.width not in (0, *widths):
            raise ShapeError(
                f"{name}: tokens have {' and '.join(map(str, sorted(widths)))} values, expected "
                f"{takes.width or 'the same for all'}. Pass the data that the model was trained on."
            )
        takes = replace(takes, width=widths.pop())
    longest = max(len(part) for sample in samples for part in sample)
    most = takes.most or min(longest, LONGEST)
    cut = sum(any(len(part) > most for part in sample) for sample in samples)
    if cut:
        note_once(
            f"{name}: cut {cut:,} of {len(samples):,} samples to {most:,} {takes.kind} (the "
            f"longest has {longest:,}); --set max_tokens={longest} trains a model that takes all"
        )
    if takes.kind == "points" or opened.points:
        samples = [(_fewer(sample[0], most), *sample[1:]) for sample in samples]
    inputs: dict[str, np.ndarray] = {}
    dtype = {"bytes": np.uint8, "characters": np.int64}.get(takes.kind, np.float32)
    for place, suffix in enumerate(("", SECOND)[: takes.sets]):
        whole, length = padded([sample[place] for sample in samples], most)
        inputs[takes.kind + suffix] = whole.astype(dtype, copy=False)
        inputs["length" + suffix] = length
    return inputs, replace(takes, most=most)


def _fewer(points: np.ndarray, most: int) -> np.ndarray:
    """Choose points at random, the same each time, in their order."""
    if len(points) <= most:
        return points
    return points[np.sort(np.random.default_rng(0).permutation(len(points))[:most])]


def _as_bytes(text: Any) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8) if isinstance(text, str) else text


def _characters(
    name: str, samples: list[tuple[Any, ...]], takes: SampleInputs, own: tuple[str, ...]
) -> tuple[SampleInputs, list[tuple[Any, ...]]]:
    """Return the samples as indices into the vocabulary, which is that of the model or the data."""
    texts = isinstance(samples[0][0], str)
    if not texts:
        if takes.vocabulary not in ((), own):
            raise SaccadeError(
                f"{name}: its vocabulary of {len(own)} is not that of the model, which has "
                f"{len(takes.vocabulary)} characters. Pass the data that it was trained on."
            )
        return replace(takes, vocabulary=own), samples
    vocabulary = takes.vocabulary or tuple(sorted({c for both in samples for t in both for c in t}))
    if len(vocabulary) > _MOST_CHARACTERS:
        raise SaccadeError(
            f"{name}: found {len(vocabulary):,} different characters, expected at most "
            f"{_MOST_CHARACTERS}. Train on bytes, with --set input=bytes."
        )
    index_of = {character: index for index, character in enumerate(vocabulary)}
    unknown = len(vocabulary)
    encoded = [
        tuple(np.array([index_of.get(c, unknown) for c in text], np.int64) for text in both)
        for both in samples
    ]
    return replace(takes, vocabulary=vocabulary), encoded
