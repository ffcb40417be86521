# SPDX-License-Identifier: Apache-2.0
"""One split of the user's images with sentences, true and false, or with questions and answers."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from saccade.models.data.samples.source import DataDescription, SampleSource, Texts
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

    rows: np.ndarray = field(kw_only=True)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)


@dataclass(frozen=True)
class Pairs(SplitImages):
    """The images of one split, each with one or more sentences."""

    sentences: Sequence[tuple[str, ...]] | Texts = field(kw_only=True)  # of each row of the source

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
class Contrasts(SplitImages):
    """The images of one split, with true and false sentences about them.

    Shapes: owner [m], the place of the image of each pair of sentences.
    """

    owner: np.ndarray = field(kw_only=True)
    captions: list[str] = field(kw_only=True)
    negatives: list[str] = field(kw_only=True)
    kinds: list[str] = field(kw_only=True)


@keeps_loaded
def load_pairs(
    name: str,
    split: str,
    asked: DataOptions,
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
    asked: DataOptions,
    source: SampleSource,
    preprocessing: Preprocessing | None,
    side_px: int,
    text_of: Callable[[int], str],
) -> SplitImages:
    """Return the images of a split; `text_of` returns what to hash besides the image of a row."""
    split = "validation" if split == "val" else split
    data, rows = split_of_source(source, name, split, preprocessing, side_px, asked)

    def digest() -> str:
        whole = hashlib.sha256(data.sha256.encode())
        for row in rows.tolist():
            whole.update(text_of(row).encode())
        return whole.hexdigest()

    return SplitImages(**{**vars(data), "digest": digest}, rows=rows)


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


def _open(name: str, asked: DataOptions) -> SampleSource:
    """Return the images with their sentences."""
    given = _given(name, asked)
    check_data(name, EXPECTED, (), ".json", *FORMATS)
    return open_captions(name, given)


@dataclass(frozen=True)
class CaptionedImages:
    """Images, each with one or more captions."""

    dataset: Dataset
    captions: list[tuple[str, ...]]
    named: list[str]  # what the user calls each image

    @property
    def sha256(self) -> str:
        """Return the hash of the images and captions."""
        return _joined(self.dataset, ["\n".join(texts) for texts in self.captions])


@dataclass(frozen=True)
class ImageQuestions:
    """Images with questions: question i of the split is about image `owner[i]`.

    Shapes: owner and places [q] int64; question i is `source.texts[places[i]]`.
    """

    dataset: Dataset
    source: QuestionSource
    owner: np.ndarray
    places: np.ndarray

    def texts(self) -> Iterator[str]:
        """Return the questions."""
        return (self.source.texts[place] for place in self.places.tolist())

    @property
    def sha256(self) -> str:
        """Return the hash of the images, questions and answers."""
        source = self.source
        places = self.places.tolist()
        said = [f"{source.texts[place]}\n{' '.join(source.answers(place))}" for place in places]
        return _joined(self.dataset, said)

    def scores(self, question: int) -> dict[str, float]:
        """Return the accuracy of each answer that was given to a question."""
        return soft_scores(self.source.answers(int(self.places[question])))

    def named(self, question: int) -> str:
        """Return what the user calls the image of a question."""
        return self.source.row_name(int(self.source.owner[self.places[question]]))


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
    data, rows = split_of_source(
        source, name, split, preprocessing or asked.preprocessing, side_px, asked
    )
    sentences, taken = source.sentences, rows.tolist()
    assert sentences is not None, "as from `open_captions`"
    texts = [sentences[row] for row in taken]
    return CaptionedImages(data, texts, [source.row_name(row) for row in taken])


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
    data, rows = split_of_source(
        source, name, split, preprocessing or asked.preprocessing, side_px, asked
    )
    image_of = np.full(len(source), -1, dtype=np.int64)
    image_of[rows] = np.arange(len(rows))
    owner = image_of[source.owner]
    places = np.flatnonzero(owner >= 0)
    return ImageQuestions(data, source, owner[places], places)


def _joined(data: Dataset, texts: list[str]) -> str:
    digest = hashlib.sha256(data.sha256.encode())
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
