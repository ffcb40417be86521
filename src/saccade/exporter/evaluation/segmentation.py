# SPDX-License-Identifier: Apache-2.0
"""Score how well slots match objects: ARI with and without background, reconstruction error."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from saccade.errors import SaccadeError
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.decisions import Segments
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.examples import Answer, Asked, Samples, focus_of
from saccade.exporter.evaluation.load_inputs import Inputs, images_of
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.scenes import drawn_scenes, require_test_split, scenes_sha256
from saccade.exporter.policy.answers import MEASURES, mask_confidence
from saccade.models.data.datasets import load_data
from saccade.models.data.splits import SPLITS
from saccade.models.data.tetrominoes import tetrominoes
from saccade.models.data.user_data import is_unlabelled, unlabelled_images
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.scores.results import EvaluationResult, mean
from saccade.models.slot_attention.initial import initial_states

TEST_SCENES = 320  # as many as in the paper
CALIBRATION_SCENES = 2_000  # generated per split: a certificate needs more than a score
_CHUNK = 256


def ari(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score FG-ARI, ARI and, if the model reconstructs its scenes, the squared error per pixel.

    Raises: SaccadeError if there are no true masks for the data, or the model takes no image.
    """
    name = options.data or "tetrominoes"
    images, true, sha256 = masked_scenes(name, model.images(), options)
    states = _states(model, options, len(images))
    answers = model.component("")({"image": images, "initial_state": states})
    segments = answers["masks"].argmax(1)
    if segments.shape[1:] != true.shape[1:]:
        raise SaccadeError(
            f"{model.name}: masks are {segments.shape[1:]}, expected {true.shape[1:]}. "
            "Score a model whose masks have the size of its images."
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


def segments(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Segments:
    """Return the segmentations of one split, each from initial slots of its own.

    Raises: SaccadeError if the model takes no image, or answers with what is not a number.
    """
    images, name, sha256 = _images(model, options, split)
    # No two splits start from the same slots: what certifies a policy are independent draws.
    seed = options.seed + SPLITS.index(split)
    states = _states(model, replace(options, seed=seed), len(images))
    owners, sure = [], []
    for at in range(0, len(images), _CHUNK):  # masks of all images may need much memory
        part = slice(at, at + _CHUNK)
        answers = model.component("")(
            {"image": np.asarray(images[part]), "initial_state": states[part]}
        )
        masks = answers["masks"]
        if not np.isfinite(masks).all():
            raise SaccadeError(
                f"{model.name}: answers some samples with NaN or infinity. Run `saccade verify` "
                "on the folder, and leave the variant out of the export."
            )
        owners.append(masks.argmax(1).astype(np.uint8))
        sure.append(np.stack([mask_confidence(measure, masks) for measure in MEASURES]))
    return Segments(np.concatenate(owners), np.concatenate(sure, axis=1), name, sha256)


def _images(
    model: EvaluatedModel, options: EvaluateOptions, split: str
) -> tuple[np.ndarray, str, str]:
    """Return the images of one split, the data's name and its hash.

    Shapes: -> uint8 [n h w c].
    """
    name = options.data or "tetrominoes"
    if name == "tetrominoes":
        side_px, count = model.images().height_px, options.limit or CALIBRATION_SCENES
        images = tetrominoes(split, count, side_px=side_px).images
    elif name == "shapes":
        images = drawn_scenes(model.images(), options, CALIBRATION_SCENES, split).images
    elif is_unlabelled(Path(name)):
        images = unlabelled_images(Path(name), model.images())
    else:
        data = load_data(
            name,
            split,
            preprocessing=model.images(),
            also=("tetrominoes",),
            asked=options.asked,
        ).first(options.limit)
        return data.images, data.name, data.sha256
    return images, Path(name).name, hashlib.sha256(images.tobytes()).hexdigest()


def _states(model: EvaluatedModel, options: EvaluateOptions, count: int) -> np.ndarray:
    """Draw initial states of the slots for `count` scenes.

    Shapes: -> [count k s].
    """
    metadata = model.runtime_metadata
    slots = int(metadata["slots"])
    return initial_states(metadata["initial_state"], count, slots, seed=options.seed)


def _painted(images: np.ndarray) -> np.ndarray:
    """Scale images as in the decoder's training: from 0 to 1."""
    return images.astype(np.float64) / 255


def masked_scenes(
    name: str, preprocessing: Preprocessing, options: EvaluateOptions
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return test scenes, their true masks and their hash.

    Shapes: -> images uint8 [n h w c], masks [n h w].
    Raises: SaccadeError if there are no true masks for the data.
    """
    if name == "shapes":
        drawn = drawn_scenes(preprocessing, options, TEST_SCENES)
        return drawn.images, drawn.masks, scenes_sha256(drawn)
    if name == "tetrominoes":
        require_test_split(options)
        count = options.limit or TEST_SCENES
        side_px, positions = preprocessing.height_px, options.positions
        puzzles = tetrominoes("test", count, side_px=side_px, positions=positions)
        return puzzles.images, puzzles.masks, scenes_sha256(puzzles)
    raise SaccadeError(
        f"--data {name}: only generated scenes have true masks. Pass --data tetrominoes "
        "or --data shapes."
    )


def load_inputs(variant: VariantFiles, data: str, count: int) -> Inputs:
    """Return the first scenes with the initial states of the slots.

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


def ari_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> Asked:
    """Return the chosen scenes divided among slots."""
    images, _, _ = masked_scenes(options.data or "tetrominoes", models[0].images(), options)
    answers = []
    for model in models:
        # Each scene has its own initial state: draw them for all scenes, then select.
        states = _states(model, options, len(images))[chosen]
        outputs = model.component("")({"image": images[chosen], "initial_state": states})
        focus = focus_of(model, outputs)
        count = len(chosen)
        answers.append([Answer(focus=None if focus is None else focus[i]) for i in range(count)])
    return Samples(images[chosen], (), ()), answers
