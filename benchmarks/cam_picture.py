# SPDX-License-Identifier: Apache-2.0
"""Draw docs/sot_cam.png: which words the class token, the word tokens, and both classify by.

    python benchmarks/cam_picture.py   # trains the arms of sot/cam with seed 0 if they are missing

As in Xie et al. 2021, figure S-4: scenes that both together classify right, in three groups: the
word tokens are wrong, the class token is wrong, both are wrong alone.
"""

from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from claim_measures import grad_cams
from claim_recipes import papers
from claims import checkpoint
from slot_pictures import shaded

from saccade.models.checkpoint import load
from saccade.models.data.scene_texts import scene_label
from saccade.models.data.shapes import scenes

TARGET = Path(__file__).parents[1] / "docs" / "sot_cam.png"
TITLES = {"class": "class token", "word": "word tokens", "both": "both"}
EACH, SCENES = 2, 1_000
RIGHT = {(True, False): "only the\nclass token", (False, True): "only the\nword tokens",
         (False, False): "neither\nalone"}  # fmt: skip


def main() -> None:
    """Draw the picture."""
    experiment = papers()["sot"].experiments["cam"]
    models = [load(checkpoint(experiment, arm, 0)).build().eval() for arm in TITLES]
    drawn = scenes("test", SCENES, side_px=models[0].config.height_px, objects=(1, 1))
    labels = torch.tensor([scene_label(objects) for objects in drawn.objects])
    with torch.inference_mode():
        right = [model(torch.from_numpy(drawn.images)).argmax(1) == labels for model in models]
    rows = [
        (words, int(place))
        for (of_class, of_words), words in RIGHT.items()
        for place in torch.nonzero(
            (right[0] == of_class) & (right[1] == of_words) & right[2]
        )[:EACH, 0]
    ]  # fmt: skip
    size = (1.6 * (len(models) + 1), 1.6 * len(rows))
    figure, axes = plt.subplots(len(rows), len(models) + 1, figsize=size, layout="constrained")
    for axis, title in zip(axes[0], ("image", *TITLES.values()), strict=True):
        axis.set_title(title, fontsize=9)
    for row, (words, place) in zip(axes, rows, strict=True):
        row[0].imshow(drawn.images[place])
        row[0].set_ylabel(words, fontsize=8)
        for axis, model in zip(row[1:], models, strict=True):
            (cam,) = grad_cams(model, drawn.images[place : place + 1])
            axis.imshow(shaded(drawn.images[place], cam))
        for axis in row:
            axis.set(xticks=[], yticks=[])
    figure.savefig(TARGET, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
