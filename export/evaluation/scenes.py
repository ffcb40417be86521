# SPDX-License-Identifier: Apache-2.0
"""Generated test scenes in a model's image size, with sentences and questions about them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.data.samples.images import at_size
from saccade.models.data.scene_texts import CaptionedScenes, Question, caption, captioned, questions
from saccade.models.data.shapes import Object, Scenes, scenes
from saccade.models.preprocessing import Preprocessing

CAPTIONED_SCENES, REFERENCES = 500, 5
QUESTIONS_A_SCENE = 2


@dataclass(frozen=True)
class SceneCaptions(CaptionedScenes):
    """Scenes with one sentence each, and the hash that identifies them."""

    data: str
    sha256: str


def described_scenes(preprocessing: Preprocessing, options: EvaluateOptions) -> SceneCaptions:
    """Return the test scenes with a sentence each.

    Raises: SaccadeError if the data is not `shapes`, or the model's images are not square.
    """
    drawn = drawn_scenes(preprocessing, options, CAPTIONED_SCENES)
    said = captioned(drawn, options.seed)
    fields = vars(said) | {"images": at_size(said.images, preprocessing)}
    return SceneCaptions(**fields, data="shapes", sha256=scenes_sha256(drawn, said.captions))


@dataclass(frozen=True)
class SceneQuestions:
    """Scenes and questions: question i is about image `owner[i]`."""

    images: np.ndarray
    owner: np.ndarray
    questions: list[Question]
    data: str
    sha256: str


def asked_scenes(preprocessing: Preprocessing, options: EvaluateOptions) -> SceneQuestions:
    """Return the test scenes with two questions each."""
    drawn = drawn_scenes(preprocessing, options, None)
    rng = np.random.default_rng(options.seed)
    asked, owner = [], []
    for index, objects in enumerate(drawn.objects):
        for question in questions(objects, rng, QUESTIONS_A_SCENE):
            asked.append(question)
            owner.append(index)
    sha256 = scenes_sha256(drawn, [f"{question.text} {question.answer}" for question in asked])
    return SceneQuestions(drawn.images, np.array(owner), asked, "shapes", sha256)


def references(objects: Sequence[Object], rng: np.random.Generator) -> list[str]:
    """Return true sentences about a scene, with which a caption is compared."""
    return [caption(objects, rng) for _ in range(REFERENCES)]


def drawn_scenes(
    preprocessing: Preprocessing, options: EvaluateOptions, usual: int | None, split: str = "test"
) -> Scenes:
    """Return the first scenes of a split in the size of the images that the model learned from.

    Raises: SaccadeError if the data is not `shapes`, or the model's images are not square RGB.
    """
    if options.data not in (None, "shapes"):
        raise SaccadeError(
            f"--data {options.data}: this task needs sentences or questions, which only generated "
            "data has. Pass --data shapes."
        )
    require_test_split(options)
    side_px, width_px = preprocessing.array_px
    if width_px != side_px or preprocessing.channels != 3:
        raise SaccadeError(
            f"--data shapes: the model's images are {side_px}x{width_px} px with "
            f"{preprocessing.channels} channels, expected square images with 3 channels."
        )
    count = usual if options.limit is None else options.limit
    return scenes(split, count, side_px=side_px, positions=options.positions)


def require_test_split(options: EvaluateOptions) -> None:
    """Check that no other split is asked for.

    Raises: SaccadeError otherwise.
    """
    if options.split not in (None, "test"):
        raise SaccadeError(
            f"--split {options.split}: the scenes of this task are generated for the test split. "
            "Leave it out."
        )


class SceneImages(Protocol):
    """Scenes of any kind: images and true masks."""

    @property
    def images(self) -> np.ndarray:
        """Return the images.

        Shapes: [n h w c].
        """
        ...

    @property
    def masks(self) -> np.ndarray:
        """Return the true masks.

        Shapes: [n h w].
        """
        ...


def scenes_sha256(drawn: SceneImages, texts: Sequence[str] = ()) -> str:
    """Return a hash of the images, their masks and their sentences."""
    digest = hashlib.sha256(drawn.images.tobytes())
    digest.update(drawn.masks.tobytes())
    digest.update("\n".join(texts).encode())
    return digest.hexdigest()
