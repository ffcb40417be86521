# SPDX-License-Identifier: Apache-2.0
"""Write the images in docs/examples that the commands in the documentation use.

    python benchmarks/example_images.py

They come from the test splits of the generated data, in the size of the shipped models, and the
digit from scikit-learn's data.
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
    """Write the images."""
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
