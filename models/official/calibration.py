# SPDX-License-Identifier: Apache-2.0
"""Inputs to check a converted model with: generated scenes, the user's images, random tokens."""

from collections.abc import Iterable, Mapping

import numpy as np
from PIL import Image

from saccade.core.errors import SaccadeError
from saccade.models.data.own_calibration import OwnImages, samples_with
from saccade.models.data.splits import CALIBRATION_SAMPLES as SAMPLES
from saccade.models.interface import Component, TensorSpec
from saccade.models.preprocessing import Preprocessing

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
        f"{SAMPLES} generated scenes of colored shapes, not data of the authors, resized to "
        f"{preprocessing.height_px}x{preprocessing.width_px} px"
    )


def _scenes(preprocessing: Preprocessing) -> np.ndarray:
    from saccade.models.data.shapes import scenes
    from saccade.models.image_decoding import fit

    wanted = preprocessing.wanted()
    drawn = scenes("train", SAMPLES, side_px=_SCENE_PX).images
    return np.stack([fit(Image.fromarray(image), wanted) for image in drawn])


def _random(component: Component, missing: list[TensorSpec]) -> dict[str, np.ndarray]:
    if not missing:
        return {}
    rng = np.random.default_rng(0)
    if component.random is not None:
        drawn = component.random(rng, SAMPLES)
        return {spec.name: drawn[spec.name] for spec in missing}
    arrays: dict[str, np.ndarray] = {}
    for spec in missing:
        fixed = all(isinstance(axis, int) for axis in spec.shape[1:])
        if not fixed or spec.dtype not in ("uint8", "float32"):
            raise TypeError(f"input {spec.name} [{spec.axes}] needs a Component.random of its own")
        shape = (SAMPLES, *(int(axis) for axis in spec.shape[1:]))
        if spec.dtype == "uint8":
            arrays[spec.name] = rng.integers(0, 256, shape, dtype=np.uint8)
        else:
            arrays[spec.name] = rng.standard_normal(shape, dtype=np.float32)
    return arrays
