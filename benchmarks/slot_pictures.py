# SPDX-License-Identifier: Apache-2.0
"""Draw docs/sparo_slots.png: where slots of the shipped SPARO attend in scenes and sentences.

    python benchmarks/slot_pictures.py [checkpoint]

Each row is a slot, each column a scene with its sentence. Shown are pairs in which a slot has much
of its attention in the sentence on one word, and a cosine above 0.75 of its two codes. The slots
have most of such pairs, and different words. Source: Vani et al. 2024, figure 4, section 5.5.
"""

import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from claim_measures import ALIKE, slot_attention

from saccade.models.checkpoint import load
from saccade.models.data.scene_texts import captioned
from saccade.models.data.shapes import COLOURS, SHAPES, SIZES, TEXTURES, scenes

TARGET = Path(__file__).parents[1] / "docs" / "sparo_slots.png"
SLOTS, PAIRS, SCENES = 3, 4, 2_000
SHARP = 0.3  # the least share of the attention in a sentence on one word; our choice


def chosen(of_text: np.ndarray, cosines: np.ndarray, texts: list[str]) -> dict[int, list[int]]:
    """Return the first pairs of each slot with its most frequent word, which differ between slots.

    Shapes: of_text [n k words], cosines [n k].
    """
    pairs: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for pair, slot in np.argwhere((of_text.max(-1) >= SHARP) & (cosines > ALIKE)):
        words = dict(enumerate(texts[pair].split()))
        word = words.get(of_text[pair, slot].argmax(), "")
        if word in (*SHAPES, *COLOURS, *SIZES, *TEXTURES):
            pairs[int(slot)].append((int(pair), word))
    shown: dict[int, list[int]] = {}
    seen: set[str] = set()
    for slot, own in sorted(pairs.items(), key=lambda item: -len(item[1])):
        words_of = [word for _, word in own]
        usual = max(set(words_of), key=words_of.count)
        if usual not in seen and len(own) >= PAIRS and len(shown) < SLOTS:
            seen.add(usual)
            shown[slot] = [pair for pair, word in own if word == usual][:PAIRS]
    return shown


def shaded(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return an image that is darker where the weights are small.

    Shapes: [s s 3] uint8, [n n] with n a divisor of s -> [s s 3], from 0 to 1.
    """
    grown = np.kron(weights, np.ones((len(image) // len(weights),) * 2))
    return np.asarray(image / 255 * (0.25 + 0.75 * grown / max(weights.max(), 1e-12))[..., None])


def main() -> None:
    """Draw the picture."""
    model = load(sys.argv[1] if len(sys.argv) > 1 else "shipped:sparo-shapes").build().eval()
    side = model.config.height_px
    drawn = scenes("test", SCENES, side_px=side)
    texts = captioned(drawn).captions
    of_image, of_text, cosines = slot_attention(model, drawn.images, texts)
    shown = chosen(of_text, cosines, texts)
    size = (2.4 * PAIRS, 2.6 * len(shown))
    figure, axes = plt.subplots(
        len(shown), PAIRS, figsize=size, layout="constrained", squeeze=False
    )
    for row, (slot, pairs) in zip(axes, shown.items(), strict=True):
        for axis, pair in zip(row, pairs, strict=True):
            axis.imshow(shaded(drawn.images[pair], of_image[pair, slot]))
            axis.set(xticks=[], yticks=[])
            words = zip(texts[pair].split(), of_text[pair, slot], strict=False)
            marked = [rf"$\bf{{{word}}}$" if weight >= 0.2 else word for word, weight in words]
            lines = [" ".join(marked[i : i + 5]) for i in range(0, len(marked), 5)]
            axis.set_xlabel("\n".join(lines), fontsize=7)
        row[0].set_ylabel(f"slot {slot}", fontsize=9)
    figure.savefig(TARGET, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
