# SPDX-License-Identifier: Apache-2.0
"""One split of the user's images with captions, or with questions and answers."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from saccade.models.data.asked import DataAsked
from saccade.models.data.datasets import Dataset, split_of_source
from saccade.models.data.loaded_once import keeps_loaded
from saccade.models.data.samples.questions import AskedImages, open_questions
from saccade.models.data.samples.sentences import open_captions
from saccade.models.data.samples.source import DataDescription, SampleSource
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.answers import soft_scores


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
    source: AskedImages
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
    name: str, split: str, preprocessing: Preprocessing, asked: DataAsked
) -> CaptionedImages:
    """Load one split of the user's images with captions, for a trained model.

    Raises: SaccadeError as `open_captions` and `split_of_source` do.
    """
    source = open_captions(name, DataDescription.of(asked.labels, asked.data_root))
    return captioned_split(source, name, split, preprocessing=preprocessing, asked=asked)


@keeps_loaded
def own_questions(
    name: str, split: str, preprocessing: Preprocessing, asked: DataAsked
) -> ImageQuestions:
    """Load one split of the user's images with questions, for a trained model.

    Raises: SaccadeError as `open_questions` and `split_of_source` do.
    """
    source = open_questions(name, DataDescription.of(asked.labels, asked.data_root))
    return asked_split(source, name, split, preprocessing=preprocessing, asked=asked)


def captioned_split(
    source: SampleSource,
    name: str,
    split: str,
    *,
    preprocessing: Preprocessing | None = None,
    side_px: int = 32,
    asked: DataAsked,
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


def asked_split(
    source: AskedImages,
    name: str,
    split: str,
    *,
    preprocessing: Preprocessing | None = None,
    side_px: int = 32,
    asked: DataAsked,
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
