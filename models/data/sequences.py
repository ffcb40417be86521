# SPDX-License-Identifier: Apache-2.0
"""The user's labeled samples other than images: points, texts, tokens, pairs, conditions."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError
from saccade.core.verbosity import note_once
from saccade.models.data.asked import DataAsked
from saccade.models.data.datasets import HELD_OUT
from saccade.models.data.loaded_once import keeps_loaded
from saccade.models.data.samples.source import RowUnreadable
from saccade.models.data.sequence_rows import (
    SECOND,
    PointRows,
    SequenceRows,
    Takes,
    open_rows,
    padded,
)
from saccade.models.data.splits import chosen_rows, held_out

LONGEST = 1024  # tokens, points or characters per input, unless more are asked for
_MOST_CHARACTERS = 4096  # different ones in a vocabulary
_SHOWN = 10  # unreadable rows in notes


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
    takes: Takes  # with the numbers that the data decided
    sha256: str = field(repr=False)
    skipped: int = 0  # unreadable rows that were left out


@keeps_loaded
def sequences(
    name: str, split: str, takes: Takes, asked: DataAsked | None = None, limit: int | None = None
) -> Sequences:
    """Load one split of the user's samples, in memory.

    Longer samples are cut: points to a random choice, everything else to its beginning. Points are
    moved and scaled into the unit sphere.

    Raises: SaccadeError if there is no such data, or it or one of its rows cannot be used,
        ShapeError if its arrays have other shapes than the model takes.
    """
    asked = asked or DataAsked()
    rows_of = open_rows(name, takes, asked)
    for text in rows_of.notes:
        note_once(text)
    split = {HELD_OUT: held_out(rows_of.split_of), "val": "validation"}.get(split, split)
    rows = chosen_rows(rows_of.path, split, rows_of.labels, rows_of.split_of)
    rows, samples = _read(name, split, rows_of, rows[:limit], asked.skip_bad)
    inputs, takes = _together(name, samples, takes, rows_of)
    if takes.conditioned:
        more, takes = rows_of.conditions(rows, takes)
        inputs |= more
    labels, names = rows_of.labels[rows], rows_of.class_names
    digest = hashlib.sha256(repr((names, sorted(inputs))).encode())
    for array in (*inputs.values(), labels):
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    skipped = rows_of.skipped
    return Sequences(
        inputs, labels, names, Path(name).name, split, takes, digest.hexdigest(), skipped
    )


def _read(
    name: str, split: str, rows_of: SequenceRows, rows: np.ndarray, most: int
) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
    """Return the rows that can be read, and their samples."""
    samples, bad = [], list[int]()
    for place, row in enumerate(rows.tolist()):
        try:
            samples.append(rows_of.read(row))
        except (RowUnreadable, OSError) as error:
            refused = rows_of.refused(row, f"{error}, or remove it.")
            if len(bad) >= most:
                hint = f" --skip-bad {most} leaves out at most {most} such rows." if most else ""
                raise SaccadeError(f"{refused}{hint}") from error
            bad.append(place)
            if len(bad) <= _SHOWN:
                note_once(f"left out: {refused}")
    if bad:
        note_once(f"{name}: left out {len(bad)} of {len(rows):,} rows of the split {split}")
    rows_of.skipped = len(bad)
    return np.delete(rows, bad), samples


def _together(
    name: str, samples: list[tuple[Any, ...]], takes: Takes, rows_of: SequenceRows
) -> tuple[dict[str, np.ndarray], Takes]:
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
        takes, samples = _characters(name, samples, takes, rows_of.vocabulary)
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
    if takes.kind == "points" or isinstance(rows_of, PointRows):
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
    name: str, samples: list[tuple[Any, ...]], takes: Takes, own: tuple[str, ...]
) -> tuple[Takes, list[tuple[Any, ...]]]:
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
