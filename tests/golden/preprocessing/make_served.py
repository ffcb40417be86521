# SPDX-License-Identifier: Apache-2.0
"""Photographs at the sizes of the tests' tiny models, by the authors' transforms; see README.md.

reference/bin/python tests/golden/preprocessing/make_served.py older        # served.npz
tensorflow/bin/python tests/golden/preprocessing/make_served.py tensorflow  # served_slots.npz
"""

import sys
from pathlib import Path

import numpy as np
import photographs
from PIL import Image

FOLDER = Path(__file__).parent
SIDES = {
    "open-clip": 16,
    "sparo-clip": 32,
    "sparo-dino": 12,
    "sot": 28,
    "vit": 12,
    "deit": 12,
    "swin": 32,
    "nac": 24,
}
SLOTS_PX = 16
NAMES = (*photographs.PACKAGED, *photographs.PHOTOGRAPHS, "rocket_640x32.jpg")


def main() -> None:
    """Write one of the two files; its keys are source/photograph, its values uint8 [h w c]."""
    if sys.argv[1] == "tensorflow":
        slots = {f"invariant-slot-attention/{name}": _resize_small(name) for name in NAMES}
        np.savez_compressed(FOLDER / "served_slots.npz", **slots)
        return
    from make import _open, _pixels, _scaling
    from pipelines import PIPELINES

    made = {}
    for source, side in SIDES.items():
        transform = PIPELINES[source].make((side, side))
        for name in NAMES:
            image = _open(name, as_opened=source.endswith("-clip"))
            made[f"{source}/{name}"] = _pixels(transform(image).numpy(), *_scaling(transform))
    np.savez_compressed(FOLDER / "served.npz", **made)


def _resize_small(name: str) -> np.ndarray:
    """tf.image.resize to the smaller side as ResizeSmall, then the centre as torchvision crops it.

    Source: google-research/invariant_slot_attention, lib/preprocessing.py: get_resize_small_shape.
    """
    import tensorflow as tf

    folder = photographs.SKLEARN if name in photographs.PACKAGED else photographs.FOLDER
    with Image.open(folder / name) as image:
        levels = np.asarray(image.convert("RGB"), np.float32)
    sides = tf.constant(levels.shape[:2], tf.float32)
    ratio = tf.constant(SLOTS_PX, tf.float32) / tf.reduce_min(sides)
    to = tf.cast(tf.round(sides * ratio), tf.int32)
    resized = tf.image.resize(levels, to).numpy()
    top, left = (round((side - SLOTS_PX) / 2) for side in resized.shape[:2])
    return np.rint(resized[top : top + SLOTS_PX, left : left + SLOTS_PX]).astype(np.uint8)


if __name__ == "__main__":
    main()
