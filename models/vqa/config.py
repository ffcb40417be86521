# SPDX-License-Identifier: Apache-2.0
"""The configuration of a network that answers questions about images, and its named sizes."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from saccade.core.schema import Count, Natural, NonNegative, Positive, Range
from saccade.models.config_values import ConfigValues, ImageFields
from saccade.models.resnet_sizes import ResNetName
from saccade.models.trunks import ResNetPort

SOURCE = "Martins et al. 2021, Sparse and Structured Visual Attention"
Image = Literal["grid", "boxes", "both"]
Features = Literal["image", "given"]
Encoder = Literal["cells", ResNetName]
Layout = Literal["grid", "flat"]
Attention = Literal["softmax", "sparsemax", "tvmax"]
Sparse = Literal["softmax", "sparsemax"]
Solver = Literal["exact", "authors"]
Norm = Literal["variance", "spread"]
Answer = Literal["softmax", "sigmoid"]
Vocabulary = Literal["words", "listed"]


@dataclass(frozen=True)
class VQAConfig(ImageFields, ConfigValues):
    """Configuration of an encoder-decoder over question and image.

    The question is a sequence of token ids, 0 for padding. The image is given as pixels, as
    features of a grid whose height and width vary by sample, as features of boxes, or as both.

    Raises: SaccadeError naming the first field that is out of range.
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), section 3.2; the layers
            are those of Yu et al. 2019 (Deep Modular Co-Attention Networks).
    """

    called = "VQA"
    layer_counts = ("layers",)
    round_counts = ("rounds",)

    image: Image = "grid"  # what the network looks at; both: one decoder for each
    # pixels for the encoder, or features from another network
    features: Features = "image"
    layout: Layout = "grid"  # of given features: [b H W c], or flat: padded rows [b rows c]
    height_px: Count = 48
    width_px: Count = 48
    channels: Count = 3
    mean: tuple[float, ...] = (0.47, 0.47, 0.47)  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = (0.16, 0.16, 0.16)
    grid: tuple[Count, Count] = (8, 8)  # the largest height and width
    rows: Natural = 0  # of the flat layout; the first height x width rows are a grid's cells
    feature_dim: Count = 64  # of a cell
    boxes: Natural = 0  # most boxes per image
    box_dim: Natural = 0
    tokens: Count = 64  # ids of the vocabulary
    words: tuple[str, ...] = ()  # empty: the caller provides the ids
    vocabulary: Vocabulary = "words"  # words: word_tokens.WordVocabulary; listed: a word's index
    question_length: Count = 20
    word_dim: Count = 32
    dim: Count = 64
    heads: Count = 4
    layers: Count = 2  # of the encoder and of each decoder
    hidden: Count = 128  # of the feed-forward layers
    pool_hidden: Count = 64  # of the two layers that score words, cells and boxes
    pool_dim: Count = 128
    answers: Count = 10
    dropout: Annotated[float, Range(0, 1, below=True)] = 0.1
    attention: Attention = "sparsemax"  # output attention over cells
    box_attention: Sparse = "sparsemax"  # output attention over boxes
    self_attention: Sparse = "softmax"  # in the decoders
    lam: NonNegative = 0.01  # of TVMAX, for 1/2 ||p - z||^2 + lam TV(p)
    tolerance: Positive = 1e-6
    max_iterations: Count = 2000
    solver: Solver = "exact"  # of TVMAX; authors: at most `rounds` of alternating chains
    rounds: Count = 35
    stop: NonNegative = 0.01  # the authors' rounds stop if columns and rows differ by less
    norm: Norm = "variance"  # spread: divides by the unbiased deviation plus eps
    eps: Positive = 1e-5
    answer: Answer = "softmax"  # probabilities; sigmoid: each answer separately
    seed: Natural = 0
    encoder: Encoder = "cells"  # of pixels: the small network here, or a ResNet

    def __post_init__(self) -> None:
        self._check_types()
        self._expect("heads", self.dim % self.heads == 0, f"a divisor of dim ({self.dim})")
        self._check_image()
        self._check_words()

    def _check_image(self) -> None:
        if self.has_boxes:
            for name in ("boxes", "box_dim"):
                self._expect(name, getattr(self, name) >= 1, "at least 1 if boxes are given")
        if self.layout == "flat" and self.has_grid:
            self._expect("rows", self.rows >= 1, "at least 1 if the layout is flat")
        if self.features == "given":
            return
        self._expect("features", self.image == "grid", "'given' if boxes are given")
        self._expect("layout", self.layout == "grid", "'grid' if pixels are given")
        self._check_pixels()
        if self.encoder != "cells":
            self._check_resnet(self.encoder, self.grid)
            return
        height, width = self.grid
        side = self.height_px // height
        fits = (self.height_px, self.width_px) == (side * height, side * width)
        fits = fits and _without_factors(side, (2, 3)) == 1 and side > 1
        self._expect("grid", fits, "cells of 2, 3, 4, 6, 8, 12, ... pixels that cover the image")
        self._expect("feature_dim", self.feature_dim % 4 == 0, "a multiple of 4")

    def _check_words(self) -> None:
        if self.words:
            extra = 4 if self.vocabulary == "words" else 0
            expected = len(self.words) + extra
            self._expect("tokens", self.tokens == expected, f"{expected}, to fit the words")

    @property
    def has_grid(self) -> bool:
        """True if cells of a grid are given."""
        return self.image in ("grid", "both")

    @property
    def has_boxes(self) -> bool:
        """True if boxes are given."""
        return self.image in ("boxes", "both")

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides from pixels to cells: first by 3, as often as it divides the cell, then by 2."""
        side, strides = self.height_px // self.grid[0], []
        for factor in (3, 2):
            while side % factor == 0:
                side //= factor
                strides.append(factor)
        return tuple(strides)


def _without_factors(number: int, factors: tuple[int, ...]) -> int:
    for factor in factors:
        while number > 0 and number % factor == 0:
            number //= factor
    return number


_MCAN = VQAConfig(
    features="given",
    layout="flat",
    grid=(14, 14),
    rows=196,
    feature_dim=2048,
    boxes=100,
    box_dim=2048,
    tokens=20000,
    word_dim=300,
    dim=512,
    heads=8,
    layers=6,
    hidden=2048,
    pool_hidden=512,
    pool_dim=1024,
    answers=3129,
    self_attention="sparsemax",
    attention="tvmax",
    norm="spread",
    eps=1e-6,
    answer="sigmoid",
)
PRESETS = {
    "vqa-grid": _MCAN,
    "vqa-boxes": replace(_MCAN, image="boxes"),
    "vqa-both": replace(_MCAN, image="both"),
    "vqa-shapes": VQAConfig(),
    "vqa-tiny": VQAConfig(
        feature_dim=32, word_dim=16, dim=32, layers=1, hidden=64, pool_hidden=32, pool_dim=48
    ),
}

# The ResNet in front of it, given to other models and taken from them.
TRUNK = ResNetPort(VQAConfig, "VQA network", "cells.resnet.")
