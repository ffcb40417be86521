# SPDX-License-Identifier: Apache-2.0
"""Draw docs/augmentations.png: every augmentation on photographs that scikit-learn ships.

python benchmarks/augmentations_picture.py
"""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import sklearn
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from saccade.models.data.augment import CHANGES, Augment, ImageMix
from saccade.models.image_decoding import fit
from saccade.models.preprocessing import Preprocessing
from saccade.models.training.regularization import AFFINE

SIDE = 112
DRAWS = 3
WANTED = Preprocessing(SIDE, SIDE, 3, (0.0,) * 3, (1.0,) * 3).wanted()
# Shifts are in pixels: here those of an image of SIDE instead of 32.
USUAL = type(AFFINE)(AFFINE.shift_px * SIDE / 32, AFFINE.degrees, AFFINE.zoom)
TARGET = Path(__file__).resolve().parent.parent / "docs" / "augmentations.png"


def photograph(name: str) -> Image.Image:
    """Return one of scikit-learn's two photographs."""
    path = Path(sklearn.__file__).parent / "datasets" / "images" / f"{name}.jpg"
    return Image.open(path).convert("RGB")


def rows() -> dict[str, list[Any]]:
    """Return the pictures by name: the resized original, each word, mixup and cutmix.

    The last two have pairs of images and targets.
    """
    china, flower = photograph("china"), photograph("flower")
    resized = np.stack([fit(china, WANTED), fit(flower, WANTED)])
    drawn = {"original": [resized[0]]}
    for word in (*CHANGES, "crop,flip,randaugment,erasing=1"):
        # Rare changes are drawn always, to be seen.
        shown = {"flip": "flip=1", "erasing": "erasing=1"}.get(word, word)
        augment = Augment.of(shown.split(","), USUAL)
        numbers = [np.random.default_rng((2, index)) for index in range(DRAWS)]
        drawn[word.replace(",", ", ")] = [
            augment.from_original(china, WANTED, rng) if augment.crop else augment(resized[0], rng)
            for rng in numbers
        ]
    for name in ("mixup", "cutmix"):
        alphas = {"mixup": 0.0, "cutmix": 0.0} | {name: 1.0}
        drawn[name] = []
        for index in range(DRAWS):
            mix = ImageMix.draw(*resized.shape[1:3], np.random.default_rng((7, index)), **alphas)
            before = np.roll(resized, 1, 0)
            drawn[name].append((mix.images(resized, before), mix.targets(np.arange(2), 2)))
    return drawn


def main() -> None:
    """Draw a row of pictures per change."""
    drawn = rows()
    original = drawn.pop("original")[0]
    figure, axes = plt.subplots(
        len(drawn), DRAWS + 1, figsize=(5.2, 1.25 * len(drawn)), layout="constrained"
    )
    for row, (name, pictures) in zip(axes, drawn.items(), strict=True):
        for index, axis in enumerate(row):
            axis.set_xticks([])
            axis.set_yticks([])
            shown = pictures[index - 1] if index else original
            if index and name in ("mixup", "cutmix"):
                images, targets = shown
                shown = images[0]
                axis.set_xlabel(f"{targets[0][0]:.0%} temple", fontsize=8)
            axis.imshow(shown)
        row[0].set_ylabel(name.replace(", ", ",\n"), fontsize=9)
    figure.canvas.draw()
    whole = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    whole.quantize(256).save(TARGET, optimize=True)


if __name__ == "__main__":
    main()
