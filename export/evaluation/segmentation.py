# SPDX-License-Identifier: Apache-2.0
"""Score how well slots match objects (ARI), or how well they paint the image again (PSNR)."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.verbosity import note_once
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.decisions import Segmenter
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, chunks
from saccade.exporter.evaluation.examples import (
    ExampleAnswers,
    ExampleSamples,
    VariantAnswer,
    focus_of,
)
from saccade.exporter.evaluation.scenes import (
    SceneImages,
    drawn_scenes,
    require_test_split,
    scenes_sha256,
)
from saccade.exporter.evaluation.tasks import EvaluateOptions, Inputs
from saccade.models.data.datasets import HELD_OUT, is_unlabelled, unlabelled_images
from saccade.models.data.options import keeps_loaded
from saccade.models.data.samples.images import Images, fitting
from saccade.models.data.segmented_images import MASKED, SegmentedImages, segmented_images
from saccade.models.data.splits import SPLITS
from saccade.models.data.tetrominoes import tetrominoes
from saccade.models.interface import Arrays
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.scores.results import EvaluationResult, mean
from saccade.models.slot_attention.initial import initial_states

TEST_SCENES = 320  # as many as in the paper
CALIBRATION_SCENES = 2_000  # generated per split: a certificate needs more than a score
_CHUNK = 256  # masks of all images may need much memory
_LEAST_ERROR = 1e-10  # an image without error has 100 dB, not infinitely many


def ari(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score FG-ARI, ARI and, if the model reconstructs its scenes, the squared error per pixel.

    Images whose mask shows no object are left out: every segmentation of them would be right.

    Raises: SaccadeError if there are no true masks for the data, or the model takes no image.
    """
    data = masked_images(model.images(), options)
    states = _states(model, options, len(data.images))
    parts = [_scored(model, data, rows, states[rows]) for rows in chunks(len(data.images), _CHUNK)]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    _check_objects(data, len(data.images) - len(found["ARI"]))
    scores = [mean(name, found[name], unit="index") for name in ("FG-ARI", "ARI")]
    if "MSE" in found:
        scores.append(mean("MSE", found["MSE"], unit="squared", higher=False))
    return model.result("ari", data, scores, found["FG-ARI"])


def _scored(
    model: EvaluatedModel, data: SegmentedImages, rows: np.ndarray, states: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the scores of each of these images that shows an object.

    Shapes: rows [r], states [r k s] -> by name [at most r].
    """
    assert data.masks is not None
    images, true = np.asarray(data.images[rows]), data.masks[rows]
    answers = model.component("")({"image": images, "initial_state": states})
    found = answers["masks"].argmax(1)
    if found.shape[1:] != true.shape[1:]:
        raise SaccadeError(
            f"{model.name}: masks are {found.shape[1:]}, expected {true.shape[1:]}. "
            "Score a model whose masks have the size of its images."
        )
    seen = true.any((1, 2))
    scores = {
        "FG-ARI": adjusted_rand_index(true[seen], found[seen], foreground=True),
        "ARI": adjusted_rand_index(true[seen], found[seen]),
    }
    if "reconstruction" in answers:
        scores["MSE"] = _errors(model, images, answers["reconstruction"])[seen]
    return scores


def _check_objects(data: SegmentedImages, empty: int) -> None:
    if empty == len(data.images):
        raise SaccadeError(
            f"{data.name}: no mask of the split {data.split} shows an object, expected the index "
            "of an object per pixel. Name the values that are background with --background."
        )
    if empty:
        note_once(f"{data.name}: left out {empty:,} images whose masks show no object")


def reconstruction(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score the peak signal-to-noise ratio of the painted images, which needs no masks.

    Values are from 0 to 1, so that the ratio of an image is -10 log10 of its squared error per
    value, in dB. The squared error is reported next to it.

    Raises: SaccadeError if the data does not fit, or the model takes no image.
    """
    data = scene_images(model.images(), options)
    states = _states(model, options, len(data.images))
    parts = []
    for rows in chunks(len(data.images), _CHUNK):
        images = np.asarray(data.images[rows])
        answers = model.component("")({"image": images, "initial_state": states[rows]})
        parts.append(_errors(model, images, _painting(model, answers)))
    errors = np.concatenate(parts)
    ratios = -10 * np.log10(np.maximum(errors, _LEAST_ERROR))
    scores = mean("PSNR", ratios, unit="dB"), mean("MSE", errors, unit="squared", higher=False)
    return model.result("reconstruction", data, scores, ratios)


def _painting(model: EvaluatedModel, answers: Arrays) -> np.ndarray:
    """Return the painted images, by the component that paints slots if no output has them."""
    if "reconstruction" in answers:
        return answers["reconstruction"]
    decode = model.component("decode")
    slots = {spec.name: answers[spec.name] for spec in decode.inputs}
    return decode(slots)["reconstruction"]


def _errors(model: EvaluatedModel, images: np.ndarray, painting: np.ndarray) -> np.ndarray:
    """Return the squared error per value of each image.

    Shapes: images uint8 [r h w c], painting [r h w c] -> [r].
    """
    if painting.shape != images.shape:
        raise SaccadeError(
            f"{model.name}: paints {painting.shape[1:]}, expected {images.shape[1:]}. Score a "
            "model that paints images of the size that it takes."
        )
    return np.asarray(np.square(painting - _as_painted(images)).mean(axis=(1, 2, 3)))


def segments(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Segmenter:
    """Return the images of one split for a calibration, each with initial slots of its own.

    Raises: SaccadeError if the model takes no image.
    """
    images, name, sha256 = _images(model, options, split)
    # No two splits start from the same slots: what certifies a policy are independent draws.
    seed = options.seed + SPLITS.index(split)
    states = _states(model, replace(options, seed=seed), len(images))
    return Segmenter(images, states, name, sha256)


def masked_segments(model: EvaluatedModel, options: EvaluateOptions) -> Segmenter:
    """Return the images that `ari` scores, which show objects, and the same initial slots."""
    data = masked_images(model.images(), options)
    return _scored_segments(model, options, data, _with_objects(data))


def painted_segments(model: EvaluatedModel, options: EvaluateOptions) -> Segmenter:
    """Return the images that `reconstruction` scores, and the same initial slots."""
    data = scene_images(model.images(), options)
    return _scored_segments(model, options, data, np.arange(len(data.images)))


def _scored_segments(
    model: EvaluatedModel, options: EvaluateOptions, data: SegmentedImages, rows: np.ndarray
) -> Segmenter:
    states = _states(model, options, len(data.images))[rows]
    within: tuple[str, ...] = () if data.split else ("test",)  # a calibration draws more scenes
    if data.split and is_unlabelled(Path(options.data or "")):
        within = SPLITS  # it takes all images, whatever the split
    return Segmenter(data.images[rows], states, data.name, data.images_sha256, within)


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
        data = _own(model.images(), options, split).first(options.limit)
        return data.images, data.name, data.images_sha256
    return images, Path(name).name, hashlib.sha256(images.tobytes()).hexdigest()


def _own(preprocessing: Preprocessing, options: EvaluateOptions, split: str) -> SegmentedImages:
    return segmented_images(
        options.data or "",
        split,
        preprocessing=preprocessing,
        also=("tetrominoes", "shapes"),
        asked=options.asked,
    )


def _states(model: EvaluatedModel, options: EvaluateOptions, count: int) -> np.ndarray:
    """Draw initial states of the slots for `count` scenes.

    Shapes: -> [count k s].
    """
    metadata = model.runtime_metadata
    slots = int(metadata["slots"])
    return initial_states(metadata["initial_state"], count, slots, seed=options.seed)


def _as_painted(images: np.ndarray) -> np.ndarray:
    """Scale images as in the decoder's training: from 0 to 1."""
    return images.astype(np.float64) / 255


def scene_images(preprocessing: Preprocessing, options: EvaluateOptions) -> SegmentedImages:
    """Return generated test scenes, or one split of the user's images, whose masks are not read."""
    if options.data in (None, "shapes", "tetrominoes"):
        return masked_images(preprocessing, options)
    data = _own(preprocessing, options, options.split or HELD_OUT)
    return replace(data, masks=None, digests=data.digests[:1]).first(options.limit)


def masked_images(preprocessing: Preprocessing, options: EvaluateOptions) -> SegmentedImages:
    """Return generated test scenes, or one split of the user's images, with their true masks.

    Raises: SaccadeError if there are no true masks for the data.
    """
    name = options.data or "tetrominoes"
    if name not in ("shapes", "tetrominoes"):
        return _own_masked(name, preprocessing, options)
    require_test_split(options)
    side_px, positions = preprocessing.height_px, options.positions
    drawn: SceneImages
    if name == "shapes":
        drawn = drawn_scenes(preprocessing, options, TEST_SCENES)
    else:
        count = options.limit or TEST_SCENES
        drawn = tetrominoes("test", count, side_px=side_px, positions=positions)
    shown = name if positions == "anywhere" else f"{name} ({positions})"
    sha256 = scenes_sha256(drawn)
    return SegmentedImages(drawn.images, drawn.masks, shown, (lambda: sha256,), split="")


@keeps_loaded
def _with_masks(preprocessing: Preprocessing, options: EvaluateOptions) -> SegmentedImages:
    """Return the user's images and masks, of which all variants need all."""
    data = _own(preprocessing, options, options.split or HELD_OUT)
    masks = data.masks
    return replace(data, masks=fitting(masks)) if isinstance(masks, Images) else data


def _own_masked(
    name: str, preprocessing: Preprocessing, options: EvaluateOptions
) -> SegmentedImages:
    if options.positions != "anywhere":
        raise SaccadeError(
            f"--positions {options.positions}: only generated scenes have it, but the data is "
            f"'{name}'. Leave it out."
        )
    data = _with_masks(preprocessing, options)
    if data.masks is None:
        raise SaccadeError(
            f"--data {name}: found no masks, with which segmentations are compared. Add --task "
            "reconstruction, which scores how well the images are painted and needs none, or pass "
            f"data with masks: {MASKED}; or --data tetrominoes or shapes, whose masks are "
            "generated."
        )
    return data.first(options.limit)


def load_inputs(variant: VariantFiles, data: str, count: int, skip_bad: int = 0) -> Inputs:
    """Return the first scenes with the initial states of the slots.

    Shapes: image [n h w c], initial_state [n k s], n at most `count`.
    Raises: SaccadeError if the model takes no image.
    """
    preprocessing, metadata = variant.images(), variant.runtime_metadata
    options = EvaluateOptions(data=data, limit=max(2, count), skip_bad=skip_bad)
    if data in ("shapes", "tetrominoes"):
        images = masked_images(preprocessing, options).images
    else:
        images = np.asarray(_own(preprocessing, options, HELD_OUT).first(count).images)
    states = initial_states(metadata["initial_state"], len(images), int(metadata["slots"]))
    return {"": {"image": images, "initial_state": states}}


def ari_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> ExampleAnswers:
    """Return the chosen scenes, of those with objects, divided among slots."""
    return _examples(models, masked_segments(models[0], options), chosen)


def reconstruction_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> ExampleAnswers:
    """Return the chosen images, divided among slots."""
    return _examples(models, painted_segments(models[0], options), chosen)


def _examples(
    models: Sequence[EvaluatedModel], scored: Segmenter, chosen: np.ndarray
) -> ExampleAnswers:
    images = np.asarray(scored.images[chosen])
    inputs = {"image": images, "initial_state": scored.states[chosen]}
    answers = []
    for model in models:
        focus = focus_of(model, model.component("")(inputs))
        count = len(chosen)
        answers.append(
            [VariantAnswer(focus=None if focus is None else focus[i]) for i in range(count)]
        )
    return ExampleSamples(images, (), ()), answers


def _with_objects(data: SegmentedImages) -> np.ndarray:
    """Return the rows of the images whose masks show an object."""
    assert data.masks is not None
    seen = [data.masks[rows].any((1, 2)) for rows in chunks(len(data.images), _CHUNK)]
    return np.flatnonzero(np.concatenate(seen))
