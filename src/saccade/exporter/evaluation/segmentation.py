# SPDX-License-Identifier: Apache-2.0
"""Agreement of slots with the objects: ARI on the foreground and on everything, and the error."""

import numpy as np

from saccade.errors import SaccadeError
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.load_inputs import Inputs, images_of
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.scenes import drawn_scenes, scenes_sha256
from saccade.models.data.tetrominoes import tetrominoes
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.scores.results import EvaluationResult, mean
from saccade.models.slot_attention.initial import initial_states

TEST_SCENES = 320  # as many as the paper scores


def ari(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """FG-ARI, ARI and the squared error of a pixel, where the model paints its scenes.

    Raises: SaccadeError if there are no true masks for the data, or the model takes no image.
    """
    name = options.data or "tetrominoes"
    images, true, sha256 = _masked(name, model.images(), options)
    metadata = model.runtime_metadata
    states = initial_states(
        metadata["initial_state"], len(images), int(metadata["slots"]), seed=options.seed
    )
    answers = model.component("")({"image": images, "initial_state": states})
    segments = answers["masks"].argmax(1)
    if segments.shape[1:] != true.shape[1:]:
        raise SaccadeError(
            f"{model.name}: masks are {segments.shape[1:]}, the true ones {true.shape[1:]}. "
            "Score a model that paints at the size of its images."
        )
    foreground = adjusted_rand_index(true, segments, foreground=True)
    scores = [
        mean("FG-ARI", foreground, unit="index"),
        mean("ARI", adjusted_rand_index(true, segments), unit="index"),
    ]
    if "reconstruction" in answers:
        error = np.square(answers["reconstruction"] - _painted(images)).mean(axis=(1, 2, 3))
        scores.append(mean("MSE", error, unit="squared", higher=False))
    data = name if options.positions == "anywhere" else f"{name} ({options.positions})"
    return EvaluationResult(model.name, "ari", data, sha256, tuple(scores), foreground)


def _painted(images: np.ndarray) -> np.ndarray:
    """The images as the decoder was taught to paint them: shares of full white, from 0 to 1."""
    return images.astype(np.float64) / 255


def _masked(
    name: str, preprocessing: Preprocessing, options: EvaluateOptions
) -> tuple[np.ndarray, np.ndarray, str]:
    if name == "shapes":
        drawn = drawn_scenes(preprocessing, options, TEST_SCENES)
        return drawn.images, drawn.masks, scenes_sha256(drawn)
    if name == "tetrominoes":
        count = options.limit or TEST_SCENES
        side_px, positions = preprocessing.height_px, options.positions
        puzzles = tetrominoes("test", count, side_px=side_px, positions=positions)
        return puzzles.images, puzzles.masks, scenes_sha256(puzzles)
    raise SaccadeError(
        f"--data {name}: true masks are only known of generated scenes. Pass --data tetrominoes "
        "or --data shapes."
    )


def load_inputs(variant: VariantFiles, data: str, count: int) -> Inputs:
    """The first scenes with the slots' initial states.

    Shapes: image [n h w c], initial_state [n k s], n at most `count`.
    Raises: SaccadeError if the model takes no image.
    """
    preprocessing, metadata = images_of(variant), variant.runtime_metadata
    if data == "tetrominoes":
        images = tetrominoes("test", count, side_px=preprocessing.height_px).images
    else:
        images = drawn_scenes(preprocessing, EvaluateOptions(limit=count), count).images
    states = initial_states(metadata["initial_state"], len(images), int(metadata["slots"]))
    return {"": {"image": images, "initial_state": states}}
