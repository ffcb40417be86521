# SPDX-License-Identifier: Apache-2.0
"""Load the user's images with sentences, true and false: one row per image."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.asked import DataAsked
from saccade.models.data.datasets import HELD_OUT, split_of_source
from saccade.models.data.loaded_once import keeps_loaded
from saccade.models.data.samples.formats import FORMATS, is_data, is_packed, matching, open_tables
from saccade.models.data.samples.images import Images
from saccade.models.data.samples.negatives import Negative, open_negatives
from saccade.models.data.samples.sentences import has_lists, open_captions
from saccade.models.data.samples.source import DataDescription, SampleSource, Texts
from saccade.models.data.samples.tables import columns_in
from saccade.models.preprocessing import Preprocessing

_LISTED = (".json", ".csv", ".jsonl", ".ndjson")
EXPECTED = (
    "a .csv or .jsonl of images and sentences, a COCO captions .json, .parquet with a column of "
    "sentences, or WebDataset .tar with .txt"
)


@dataclass(frozen=True)
class Told:
    """The images of one split of a source with texts.

    Shapes: images [n h w c] uint8, an array or `samples.images.Images`; rows [n], of the source.
    """

    images: np.ndarray
    rows: np.ndarray
    name: str
    split: str
    skipped: int  # unreadable rows that were left out
    digest: Callable[[], str] = field(repr=False, compare=False)
    # The same images in the size of their files; None if they have none of their own.
    originals: Images | None = field(default=None, kw_only=True, repr=False, compare=False)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    @property
    def sha256(self) -> str:
        """Return the hash of the pixels and of the sentences."""
        return self.digest()


@dataclass(frozen=True)
class Pairs(Told):
    """The images of one split, each with one or more sentences."""

    sentences: Sequence[tuple[str, ...]] | Texts  # of each row of the source

    def texts(self, place: int) -> tuple[str, ...]:
        """Return the sentences of the image at a place."""
        return self.sentences[int(self.rows[place])]

    def spread(self) -> tuple[list[str], np.ndarray]:
        """Return all sentences, and the place of the image of each.

        Shapes: -> [m] int64.
        """
        texts = [self.texts(place) for place in range(len(self))]
        owner = np.repeat(np.arange(len(self)), [len(own) for own in texts])
        return [text for own in texts for text in own], owner

    def first(self, count: int | None) -> "Pairs":
        """Return the first images; the hash stays that of the split."""
        most = slice(count)
        return replace(self, images=self.images[most], rows=self.rows[most])


@dataclass(frozen=True)
class Contrasts(Told):
    """The images of one split, with true and false sentences about them.

    Shapes: owner [m], the place of the image of each pair of sentences.
    """

    owner: np.ndarray
    captions: list[str]
    negatives: list[str]
    kinds: list[str]


@keeps_loaded
def load_pairs(
    name: str,
    split: str,
    asked: DataAsked,
    preprocessing: Preprocessing | None,
    *,
    side_px: int = 32,
) -> Pairs:
    """Load one split of the user's images with sentences; splits are drawn by image.

    Images are resized to the trained model's `preprocessing`, or to `side_px` for a new model.
    Raises: SaccadeError if there are no sentences, or a row cannot be used.
    """
    source = _open(name, asked)
    texts = source.sentences
    assert texts is not None, "asked for"
    told = _told(name, split, asked, source, preprocessing, side_px, lambda row: repr(texts[row]))
    return Pairs(**vars(told), sentences=texts)


@keeps_loaded
def load_contrasts(
    name: str, split: str | None, asked: DataAsked, preprocessing: Preprocessing, limit: int | None
) -> Contrasts:
    """Load images with true and false sentences, of `limit` images at most.

    Without `split`, these are all images if the files name no splits, as in a benchmark.
    Raises: SaccadeError if there are no false sentences, or a row cannot be used.
    """
    source = open_negatives(name, _given(name, asked))
    by_row: dict[int, list[Negative]] = {}
    for one in source.negatives:
        by_row.setdefault(one.row, []).append(one)
    usual = "all" if source.split_of is None else HELD_OUT
    told = _told(
        name, split or usual, asked, source, preprocessing, 0, lambda row: repr(by_row[row])
    )
    most = slice(limit)
    rows = told.rows[most]
    own = [(place, one) for place, row in enumerate(rows.tolist()) for one in by_row[row]]
    return Contrasts(
        **vars(replace(told, images=told.images[most], rows=rows)),
        owner=np.array([place for place, _ in own]),
        captions=[one.caption for _, one in own],
        negatives=[one.negative for _, one in own],
        kinds=[one.kind for _, one in own],
    )


def _told(
    name: str,
    split: str,
    asked: DataAsked,
    source: SampleSource,
    preprocessing: Preprocessing | None,
    side_px: int,
    text_of: Callable[[int], str],
) -> Told:
    """Return the images of a split; `text_of` returns what to hash besides the image of a row."""
    split = "validation" if split == "val" else split
    data, rows = split_of_source(source, name, split, preprocessing, side_px, asked)

    def digest() -> str:
        whole = hashlib.sha256(data.sha256.encode())
        for row in rows.tolist():
            whole.update(text_of(row).encode())
        return whole.hexdigest()

    files = data.originals
    return Told(data.images, rows, data.name, data.split, data.skipped, digest, originals=files)


def _given(name: str, asked: DataAsked) -> DataDescription:
    if asked.labels is not None:
        raise SaccadeError(
            f"--labels {asked.labels}: {name} has sentences, which need no names of classes. "
            "Leave it out."
        )
    return DataDescription(root=asked.data_root)


def has_sentences(name: str) -> bool:
    """Return whether this is data of the user with sentences, from its first row."""
    path = Path(name)
    try:
        if path.suffix.lower() == ".json" or has_lists(path):
            return path.exists() or bool(matching(name))
        if path.suffix.lower() not in FORMATS and not is_packed(name):
            return False
        table = open_tables(name)[0]
        return bool(columns_in(path, table.names, (), ("sentences",), table.usual))
    except SaccadeError:
        return False  # the reader of labels says what is wrong


def _open(name: str, asked: DataAsked) -> SampleSource:
    """Return the images with their sentences."""
    given = _given(name, asked)
    if Path(name).suffix.lower() not in _LISTED and not is_data(name):
        kind = "a file of another kind" if Path(name).is_file() else "neither a name nor a path"
        raise SaccadeError(f"data '{name}': found {kind}. Pass {EXPECTED}.")
    return open_captions(name, given)
