# SPDX-License-Identifier: Apache-2.0
"""Calibration samples for the gate and the ranges of int8: own images, scenes, noise."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.core.errors import SaccadeError
from saccade.models.budget import ComputeBudget
from saccade.models.checkpoint import Checkpoint, save
from saccade.models.checkpoint_format import AUTHORS_DATA, Header
from saccade.models.data.datasets import is_unlabelled, load_data, unlabelled_images
from saccade.models.data.options import DataOptions, keeps_loaded
from saccade.models.data.samples.images import at_size
from saccade.models.data.splits import CALIBRATION_SAMPLES, EmptySplit
from saccade.models.interface import Arrays, Component, TensorSpec
from saccade.models.preprocessing import Preprocessing

LEAST = 16
_ON = "calibrated_on"  # in the card of a checkpoint whose samples are the user's
_ANSWERS = ("labels", "masks")  # calibration arrays that are right answers, not inputs


@dataclass(frozen=True)
class OwnImages:
    """At most 256 of the user's images, drawn with a fixed seed.

    Shapes: images [n h w c] uint8; labels [n] int64 into the model's labels, None if the data has
            none or other ones.
    """

    images: np.ndarray
    labels: np.ndarray | None
    name: str
    described: str

    @property
    def card(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's card."""
        return {_ON: {"data": self.name, "samples": len(self.images)}}


@keeps_loaded
def own_images(
    data: str, preprocessing: Preprocessing | None, labels: tuple[str, ...]
) -> OwnImages:
    """Read the images of `--calibrate-on`: any `--data`, or a folder of images without labels.

    Of labeled data with splits, they are training images, or all if there are none.

    Raises: SaccadeError if the model takes no image, or the data cannot be read or has fewer than
        LEAST images.
    """
    if preprocessing is None:
        raise SaccadeError(
            f"--calibrate-on {data}: names images, but this model takes no image. Leave it out."
        )
    if is_unlabelled(Path(data)):
        images = unlabelled_images(Path(data), preprocessing, CALIBRATION_SAMPLES)
        return _of(Path(data).name, images, None, "images without labels")
    asked = DataOptions(most=CALIBRATION_SAMPLES)
    kind = "training images"
    try:
        try:
            dataset = load_data(data, "train", preprocessing=preprocessing, asked=asked)
        except EmptySplit:  # such as of a folder that only has val
            dataset = load_data(data, "all", preprocessing=preprocessing, asked=asked)
            kind = "images (none of them for training)"
    except SaccadeError as error:
        raise SaccadeError(
            f"--calibrate-on {error} Labels are not needed: a folder may also have images alone."
        ) from error
    if not set(dataset.class_names) <= set(labels):
        return _of(dataset.name, dataset.images, None, f"{kind}, whose labels are not the model's,")
    index = np.array([labels.index(name) for name in dataset.class_names], dtype=np.int64)
    known = index[dataset.labels]
    return _of(dataset.name, dataset.images, known, f"{kind} with labels")


def _of(name: str, images: np.ndarray, labels: np.ndarray | None, kind: str) -> OwnImages:
    if len(images) < LEAST:
        raise SaccadeError(
            f"--calibrate-on {name}: found {len(images)} {kind.rstrip(',')}, expected at least "
            f"{LEAST}, better {CALIBRATION_SAMPLES}. Add images."
        )
    pixels = np.asarray(images[np.arange(len(images))])
    return OwnImages(pixels, labels, name, f"{len(pixels)} {kind} of {name}")


def samples_with(own: OwnImages, others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return calibration arrays: the images, and as many samples of each of the other inputs.

    Right answers among the others belonged to other images. The user's labels are used if the
    image is the only input.
    """
    inputs = {name: array for name, array in others.items() if name not in (*_ANSWERS, "image")}
    count = min([len(own.images), *map(len, inputs.values())])
    chosen = np.linspace(0, len(own.images) - 1, count).astype(np.int64)  # of all classes
    arrays = {name: array[:count] for name, array in inputs.items()}
    arrays["image"] = own.images[chosen]
    if own.labels is not None and not inputs:
        arrays["labels"] = own.labels[chosen]
    return arrays


def recalibrated(
    checkpoint: Checkpoint, data: str, out: Path, *, replace: bool = True
) -> tuple[Checkpoint, str]:
    """Write the checkpoint with the user's images as calibration samples; also describe them.

    Raises: SaccadeError as `own_images` and `save`.
    """
    own = own_images(data, checkpoint.preprocessing, checkpoint.labels)
    origin = {"calibration": own.described, "recalibrated_from_sha256": checkpoint.sha256}
    written = save(
        out,
        family=checkpoint.family,
        config=checkpoint.config,
        weights=checkpoint.weights,
        preprocessing=checkpoint.preprocessing,
        labels=checkpoint.labels,
        calibration=samples_with(own, checkpoint.calibration),
        card=checkpoint.card | own.card | origin,
        replace=replace,
    )
    return written, own.described


def sized(samples: Mapping[str, np.ndarray], preprocessing: Preprocessing | None) -> Arrays:
    """Return calibration arrays, images among them resized for a variant that takes smaller ones.

    Shapes: images uint8 [n H W c] -> [n h w c].
    """
    if preprocessing is None or not preprocessing.trained_px:
        return samples
    pixels = {name: x for name, x in samples.items() if x.ndim == 4 and x.dtype == np.uint8}
    return {**samples, **{name: at_size(x, preprocessing) for name, x in pixels.items()}}


def at_budget(checkpoint: Checkpoint, budget: ComputeBudget) -> Checkpoint:
    """Return the checkpoint with the preprocessing and samples of a variant's images."""
    taken = checkpoint.preprocessing
    if budget.part is None or taken is None:
        return checkpoint
    taken = taken.at_height(budget.kept)
    samples = sized(checkpoint.calibration, taken)
    return dataclasses.replace(checkpoint, preprocessing=taken, calibration=dict(samples))


def has_training_samples(checkpoint: Checkpoint) -> bool:
    """Return whether the calibration samples are of the data that saccade trained it on."""
    card = checkpoint.card
    return "train" in (card.get("data_sha256") or {}) and _ON not in card


def check_calibrated(where: object, checkpoint: Checkpoint | Header) -> None:
    """Check that int8 can be calibrated: a converted model has no images of its own data.

    Raises: SaccadeError naming the option.
    """
    converted = checkpoint.card.get("data") == AUTHORS_DATA and checkpoint.preprocessing
    if converted and _ON not in checkpoint.card:
        raise SaccadeError(
            f"{where}: --precision int8 needs images like those that the model will see, and this "
            f"converted checkpoint has only {checkpoint.card.get('calibration')}. Pass your "
            f"own, best {CALIBRATION_SAMPLES}: --calibrate-on FOLDER. Labels are not needed."
        )


_SCENE_PX = 64


def calibration_for(
    components: Iterable[Component],
    preprocessing: Preprocessing | None,
    given: Mapping[str, np.ndarray],
    own: OwnImages | None,
) -> tuple[dict[str, np.ndarray], str]:
    """Return arrays for the inputs of every component without its own, and a description of them.

    Raises: SaccadeError if there are images for a model whose converter has its own.
    """
    if own is not None and "image" in given:
        raise SaccadeError(
            f"--calibrate-on {own.name}: the converter of this source brings its own images. "
            "Leave it out."
        )
    arrays = dict(given)
    said = [f"{name} by the converter" for name in arrays]
    for component in components:
        missing = [spec for spec in component.inputs if spec.name not in arrays]
        if any(spec.name == "image" for spec in missing) and preprocessing is not None:
            arrays["image"] = _scenes(preprocessing) if own is None else own.images
            said.append(_generated(preprocessing) if own is None else own.described)
        if component.real is not None:
            continue  # it computes the other inputs itself
        drawn = _random(component, [spec for spec in missing if spec.name not in arrays])
        said += [f"random {name} (seed 0)" for name in drawn]
        arrays |= drawn
    return arrays if own is None else samples_with(own, arrays), "; ".join(said)


def _generated(preprocessing: Preprocessing) -> str:
    return (
        f"{CALIBRATION_SAMPLES} generated scenes of colored shapes, not data of the authors, "
        f"resized to {preprocessing.height_px}x{preprocessing.width_px} px"
    )


def _scenes(preprocessing: Preprocessing) -> np.ndarray:
    from saccade.models.data.shapes import scenes
    from saccade.models.image_decoding import fit

    wanted = preprocessing.wanted()
    drawn = scenes("train", CALIBRATION_SAMPLES, side_px=_SCENE_PX).images
    return np.stack([fit(Image.fromarray(image), wanted) for image in drawn])


def _random(component: Component, missing: list[TensorSpec]) -> dict[str, np.ndarray]:
    if not missing:
        return {}
    rng = np.random.default_rng(0)
    if component.random is not None:
        drawn = component.random(rng, CALIBRATION_SAMPLES)
        return {spec.name: drawn[spec.name] for spec in missing}
    arrays: dict[str, np.ndarray] = {}
    for spec in missing:
        fixed = all(isinstance(axis, int) for axis in spec.shape[1:])
        if not fixed or spec.dtype not in ("uint8", "float32"):
            raise TypeError(f"input {spec.name} [{spec.axes}] needs a Component.random of its own")
        shape = (CALIBRATION_SAMPLES, *(int(axis) for axis in spec.shape[1:]))
        if spec.dtype == "uint8":
            arrays[spec.name] = rng.integers(0, 256, shape, dtype=np.uint8)
        else:
            arrays[spec.name] = rng.standard_normal(shape, dtype=np.float32)
    return arrays
