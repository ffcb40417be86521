# SPDX-License-Identifier: Apache-2.0
"""One split of the user's images with sentences, true and false, or with questions and answers."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.datasets import HELD_OUT, Dataset, split_of_source
from saccade.models.data.options import DataOptions, keeps_loaded
from saccade.models.data.samples.formats import (
    FORMATS,
    check_data,
    is_packed,
    matching,
    open_tables,
)
from saccade.models.data.samples.questions import QuestionSource, open_questions
from saccade.models.data.samples.sentences import (
    HardNegatives,
    Negative,
    has_lists,
    open_captions,
)
from saccade.models.data.samples.source import DataDescription, SampleSource
from saccade.models.data.samples.tables import columns_in
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.answers import soft_scores

EXPECTED = (
    "a .csv or .jsonl of images and sentences, a COCO captions .json, .parquet with a column of "
    "sentences, or WebDataset .tar with .txt"
)


@dataclass(frozen=True)
class SplitImages(Dataset):
    """The images of one split of a source with texts, without labels.

    Shapes: rows [n], of the source.
    """

    source: SampleSource = field(kw_only=True, repr=False)
    rows: np.ndarray = field(kw_only=True)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def named(self, place: int) -> str:
        """Return what the user calls the image at a place."""
        return self.source.row_name(int(self.rows[place]))


@dataclass(frozen=True)
class CaptionedImages(SplitImages):
    """The images of one split, each with one or more sentences."""

    def texts(self, place: int) -> tuple[str, ...]:
        """Return the sentences of the image at a place."""
        assert self.source.sentences is not None, "as from `open_captions`"
        return self.source.sentences[int(self.rows[place])]

    @cached_property
    def captions(self) -> list[tuple[str, ...]]:
        """The sentences of each image."""
        return [self.texts(place) for place in range(len(self))]

    def spread(self) -> tuple[list[str], np.ndarray]:
        """Return all sentences, and the place of the image of each.

        Shapes: -> [m] int64.
        """
        owner = np.repeat(np.arange(len(self)), [len(texts) for texts in self.captions])
        return [text for texts in self.captions for text in texts], owner

    def first(self, count: int | None) -> "CaptionedImages":
        """Return the first images; the hash stays that of the split."""
        most = slice(count)
        return replace(self, images=self.images[most], rows=self.rows[most])


@dataclass(frozen=True)
class Contrasts(SplitImages):
    """The images of one split, with true and false sentences about them.

    Shapes: owner [m], the place of the image of each pair of sentences.
    """

    owner: np.ndarray = field(kw_only=True)
    captions: list[str] = field(kw_only=True)
    negatives: list[str] = field(kw_only=True)
    kinds: list[str] = field(kw_only=True)


@dataclass(frozen=True)
class ImageQuestions(SplitImages):
    """Images with questions: question i of the split is about image `owner[i]`.

    Shapes: owner and places [q] int64; question i is `source.texts[places[i]]`.
    """

    source: QuestionSource = field(kw_only=True, repr=False)
    owner: np.ndarray = field(kw_only=True)
    places: np.ndarray = field(kw_only=True)

    def texts(self) -> Iterator[str]:
        """Return the questions."""
        return (self.source.texts[place] for place in self.places.tolist())

    def scores(self, question: int) -> dict[str, float]:
        """Return the accuracy of each answer that was given to a question."""
        return soft_scores(self.source.answers(int(self.places[question])))

    def named(self, question: int) -> str:
        """Return what the user calls the image of a question."""
        return super().named(int(self.owner[question]))


@keeps_loaded
def load_pairs(
    name: str,
    split: str,
    asked: DataOptions,
    preprocessing: Preprocessing | None,
    *,
    side_px: int = 32,
) -> CaptionedImages:
    """Load one split of the user's images with sentences; splits are drawn by image.

    Images are resized to the trained model's `preprocessing`, or to `side_px` for a new model.
    Raises: SaccadeError if there are no sentences, or a row cannot be used.
    """
    given = _given(name, asked)
    check_data(name, EXPECTED, (), ".json", *FORMATS)
    source = open_captions(name, given)
    return captioned_split(
        source, name, split, preprocessing=preprocessing, side_px=side_px, asked=asked
    )


@keeps_loaded
def load_contrasts(
    name: str,
    split: str | None,
    asked: DataOptions,
    preprocessing: Preprocessing,
    limit: int | None,
) -> Contrasts:
    """Load images with true and false sentences, of `limit` images at most.

    Without `split`, these are all images if the files name no splits, as in a benchmark.
    Raises: SaccadeError if there are no false sentences, or a row cannot be used.
    """
    source = HardNegatives.opened(name, _given(name, asked))
    by_row: dict[int, list[Negative]] = {}
    for one in source.negatives:
        by_row.setdefault(one.row, []).append(one)
    usual = "all" if source.split_of is None else HELD_OUT

    def texts(rows: list[int]) -> Iterator[str]:
        return (repr(by_row[row]) for row in rows)

    fields = _split(source, name, split or usual, texts, preprocessing, 0, asked)
    most = slice(limit)
    rows = fields["rows"][most]
    own = [(place, one) for place, row in enumerate(rows.tolist()) for one in by_row[row]]
    return Contrasts(
        **fields | {"images": fields["images"][most], "rows": rows},
        owner=np.array([place for place, _ in own]),
        captions=[one.caption for _, one in own],
        negatives=[one.negative for _, one in own],
        kinds=[one.kind for _, one in own],
    )


def _split(
    source: SampleSource,
    name: str,
    split: str,
    texts: Callable[[list[int]], Iterable[str]],
    preprocessing: Preprocessing | None,
    side_px: int,
    asked: DataOptions,
) -> dict[str, Any]:
    """Return the fields of `SplitImages`; `texts` returns what to hash of the images in rows."""
    preprocessing = preprocessing or asked.preprocessing
    split = "validation" if split == "val" else split
    data, rows = split_of_source(source, name, split, preprocessing, side_px, asked)

    def digest() -> str:
        whole = hashlib.sha256(data.sha256.encode())
        for text in texts(rows.tolist()):
            whole.update(text.encode() + b"\0")
        return whole.hexdigest()

    return {**vars(data), "digest": digest, "source": source, "rows": rows}


def _given(name: str, asked: DataOptions) -> DataDescription:
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
        table = next(open_tables(name), None)
        return table is not None and bool(
            columns_in(path, table.names, (), ("sentences",), table.usual)
        )
    except SaccadeError:
        return False  # the reader of labels says what is wrong


@keeps_loaded
def own_captions(
    name: str, split: str, preprocessing: Preprocessing, asked: DataOptions
) -> CaptionedImages:
    """Load one split of the user's images with captions, for a trained model.

    Raises: SaccadeError as `open_captions` and `split_of_source` do.
    """
    source = open_captions(name, DataDescription.of(asked.labels, asked.data_root))
    return captioned_split(source, name, split, preprocessing=preprocessing, asked=asked)


@keeps_loaded
def own_questions(
    name: str, split: str, preprocessing: Preprocessing, asked: DataOptions
) -> ImageQuestions:
    """Load one split of the user's images with questions, for a trained model.

    Raises: SaccadeError as `open_questions` and `split_of_source` do.
    """
    source = open_questions(name, DataDescription.of(asked.labels, asked.data_root))
    return question_split(source, name, split, preprocessing=preprocessing, asked=asked)


def captioned_split(
    source: SampleSource,
    name: str,
    split: str,
    *,
    preprocessing: Preprocessing | None = None,
    side_px: int = 32,
    asked: DataOptions,
) -> CaptionedImages:
    """Load one split of images with captions; drawn splits take whole images.

    Raises: SaccadeError as `split_of_source` does.
    """
    sentences = source.sentences
    assert sentences is not None, "as from `open_captions`"

    def texts(rows: list[int]) -> Iterator[str]:
        return ("\n".join(sentences[row]) for row in rows)

    return CaptionedImages(**_split(source, name, split, texts, preprocessing, side_px, asked))


def question_split(
    source: QuestionSource,
    name: str,
    split: str,
    *,
    preprocessing: Preprocessing | None = None,
    side_px: int = 32,
    asked: DataOptions,
) -> ImageQuestions:
    """Load one split of images with questions; drawn splits take whole images.

    Raises: SaccadeError as `split_of_source` does.
    """

    def texts(_: list[int]) -> Iterator[str]:
        return (f"{source.texts[q]}\n{' '.join(source.answers(q))}" for q in places.tolist())

    fields = _split(source, name, split, texts, preprocessing, side_px, asked)
    image_of = np.full(len(source), -1, dtype=np.int64)
    image_of[fields["rows"]] = np.arange(len(fields["rows"]))
    owner = image_of[source.owner]
    places = np.flatnonzero(owner >= 0)
    return ImageQuestions(**fields, owner=owner[places], places=places)
