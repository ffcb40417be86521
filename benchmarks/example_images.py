# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/examples that the documents' commands are given.

    python benchmarks/example_images.py

All of them come from the test parts of the generated data, at the size that the shipped models
read, and the digit from scikit-learn's.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from saccade.models.data.datasets import load_data
from saccade.models.data.shapes import scenes
from saccade.models.data.tetrominoes import tetrominoes

OUT = Path("docs/examples")
SCENE, PIECES = 0, 0  # of the test split


def main() -> None:
    """Write them."""
    digits = load_data("digits", "test")
    seven = int(np.flatnonzero(digits.labels == 7)[0])
    pictures = {
        "seven": digits.images[seven, :, :, 0],
        "scene": scenes("test", SCENE + 1, side_px=48).images[SCENE],
        "tetrominoes": tetrominoes("test", PIECES + 1, side_px=20).images[PIECES],
    }
    OUT.mkdir(parents=True, exist_ok=True)
    for name, pixels in pictures.items():
        Image.fromarray(pixels).save(OUT / f"{name}.png")


if __name__ == "__main__":
    main()
