# SPDX-License-Identifier: Apache-2.0
"""Photographs resized without antialiasing, by tf.image and by OpenCV; see README.md."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import photographs
import tensorflow as tf
from PIL import Image

FOLDER = Path(__file__).parent
THIN = 14
NAMES = (
    "china.jpg",
    "astronaut.jpg",
    "clock.png",
    "coffee_225x301.jpg",
    "rocket_640x32.jpg",
    "chelsea_17x13.png",
)
OPENCV = {"bilinear": cv2.INTER_LINEAR, "nearest": cv2.INTER_NEAREST}


def main() -> None:
    """Write unaliased.npz and unaliased.json."""
    cases = [_clevr(side, at) for side in (128, 32) for at in ((29, 64), (24, 64))]
    for name in NAMES:
        for side in (224, 32):
            cases += [_tensorflow(name, side, way) for way in ("bilinear", "nearest")]
            cases += [_opencv(name, side, way) for way in OPENCV]
    tensors = {f"{number:03d}": _kept(case.pop("levels")) for number, case in enumerate(cases)}
    for name, case in zip(tensors, cases, strict=True):
        case["levels"] = name
    lines = ",\n  ".join(json.dumps(case) for case in cases)
    made = json.dumps({"tensorflow": tf.__version__, "cv2": cv2.__version__})
    text = f'{{\n "made_with": {made},\n "thin": {THIN},\n "cases": [\n  {lines}\n ]\n}}\n'
    (FOLDER / "unaliased.json").write_text(text)
    np.savez_compressed(FOLDER / "unaliased.npz", **tensors)


def _kept(levels: np.ndarray) -> np.ndarray:
    return levels if levels.shape[0] <= 64 else np.ascontiguousarray(levels[::THIN, ::THIN])


def _pixels(name: str) -> np.ndarray:
    folder = photographs.SKLEARN if name in photographs.PACKAGED else photographs.FOLDER
    with Image.open(folder / name) as image:
        return np.asarray(image.convert("RGB"))


def _clevr(side: int, at: tuple[int, int]) -> dict[str, Any]:
    """Invariant slot attention on CLEVR's 320 x 240: a crop of 192, then resize_small.

    Source: google-research/invariant_slot_attention, lib/preprocessing.py (ResizeSmall,
            TopLeftCrop, CentralCrop); configs/clevr_with_masks has (29, 64), configs/clevrtex
            the centre, (24, 64).
    """
    name = "coffee_320x240.jpg"
    image = tf.image.convert_image_dtype(tf.constant(_pixels(name)), tf.float32)
    image = tf.image.crop_to_bounding_box(image, *at, 192, 192)
    resized = tf.image.resize(image, [side, side], method="bilinear")
    return {
        "pipeline": "invariant-slot-attention",
        "photograph": name,
        "crop": [*at, 192, 192],
        "height_px": side,
        "width_px": side,
        "interpolation": "bilinear",
        "levels": resized.numpy() * 255,
    }


def _tensorflow(name: str, side: int, way: str) -> dict[str, Any]:
    image = tf.constant(_pixels(name).astype(np.float32))
    resized = tf.image.resize(image, [side, side], method=way)
    return _squashed("tf.image.resize", name, side, way) | {"levels": resized.numpy()}


def _opencv(name: str, side: int, way: str) -> dict[str, Any]:
    resized = cv2.resize(_pixels(name), (side, side), interpolation=OPENCV[way])
    return _squashed("cv2.resize", name, side, way) | {"levels": resized}


def _squashed(pipeline: str, name: str, side: int, way: str) -> dict[str, Any]:
    return {
        "pipeline": pipeline,
        "photograph": name,
        "height_px": side,
        "width_px": side,
        "interpolation": way,
    }


if __name__ == "__main__":
    main()
