# SPDX-License-Identifier: Apache-2.0
"""The configuration of a captioner, and its named sizes."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

from saccade.core.schema import Count, Length, NonNegative, Positive, Range
from saccade.models.config_values import ConfigValues, ImageFields
from saccade.models.resnet_sizes import ResNetName
from saccade.models.trunks import ResNetPort
from saccade.models.word_tokens import END, SPECIAL, START, WordVocabulary

SOURCE = "Martins et al. 2021, Sparse and Structured Visual Attention (section 3.1)"
Attention = Literal["softmax", "sparsemax", "tvmax"]
Encoder = Literal["cnn", "features", ResNetName]


@dataclass(frozen=True)
class CaptionerConfig(ImageFields, ConfigValues):
    """Configuration of a captioner; comments on fields mention what the paper leaves open.

    Raises: SaccadeError naming the first field that is out of range.
    Source: Martins et al. 2021, section 3.1; the preset captioner-paper has its sizes.
    """

    called = "Captioner"

    attention: Attention = "tvmax"  # output attention; the input attention is always softmax
    lam: NonNegative = 0.01  # of TVMax
    tolerance: Positive = 1e-6  # of TVMax, per grid
    max_iterations: Count = 2000  # of TVMax
    # the vocabulary after pad, start, end and unknown
    words: Annotated[tuple[str, ...], Length(1)] = ("a",)
    max_length: Annotated[int, Range(1, 256)] = 18  # words of the longest caption in training
    beam: Annotated[int, Range(1, 16)] = 3  # if a request names none
    encoder: Encoder = "cnn"  # or a ResNet; features: the input is a grid from another network
    height_px: Count = 48  # of the image
    width_px: Count = 48
    channels: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = (0.25, 0.25, 0.25)
    widths: tuple[Count, ...] = (32, 64, 96)  # channels of the convolutions, each with batch norm
    strides: tuple[Count, ...] = (3, 2, 1)  # their product is the side of a cell in pixels
    grid_height: Count = 8  # cells
    grid_width: Count = 8
    # of a cell before the feed-forward layer; cnn: the last width, ResNet: 512 or 2048
    feature_dim: Count = 96
    dim: Count = 96  # of a cell after it, g in the paper
    position: bool = True  # add a learned vector per cell: small networks see no borders
    attention_dim: Count = 64  # of the hidden layer that scores a cell
    hidden_dim: Count = 128  # of the LSTM
    embedding_dim: Count = 48  # of a word
    seed: int = 0  # of the initial weights

    def __post_init__(self) -> None:
        self._check_types()
        WordVocabulary(self.words)
        if self.encoder == "cnn":
            self._check_network()
        elif self.encoder != "features":
            self._check_pixels()
            self._check_resnet(self.encoder, (self.grid_height, self.grid_width))

    def _check_network(self) -> None:
        self._check_pixels()
        fits = bool(self.widths) and len(self.widths) == len(self.strides)
        self._expect("strides", fits, "one whole number for each of the widths")
        last = f"the last of the widths ({self.widths[-1]})"
        self._expect("feature_dim", self.feature_dim == self.widths[-1], last)
        cell = prod(self.strides)
        for side in ("height", "width"):
            expected = f"{cell} px per cell times grid_{side} ({getattr(self, f'grid_{side}')})"
            pixels = cell * getattr(self, f"grid_{side}")
            self._expect(f"{side}_px", getattr(self, f"{side}_px") == pixels, expected)

    @property
    def takes_pixels(self) -> bool:
        """True unless the input is a grid of features."""
        return self.encoder != "features"

    @property
    def vocabulary(self) -> int:
        """Number of tokens, including the four special ones."""
        return SPECIAL + len(self.words)

    @property
    def start(self) -> int:
        """The token before every caption."""
        return START

    @property
    def end(self) -> int:
        """The token after every caption."""
        return END


_TINY: dict[str, Any] = {
    "words": ("a", "red", "circle", "blue", "square", "left", "of"),
    "max_length": 8,
    "height_px": 16,
    "width_px": 16,
    "widths": (8, 12),
    "strides": (2, 2),
    "grid_height": 4,
    "grid_width": 4,
    "feature_dim": 12,
    "dim": 16,
    "attention_dim": 12,
    "hidden_dim": 20,
    "embedding_dim": 8,
}
PRESETS = {
    "captioner-tiny": CaptionerConfig(**_TINY),
    "captioner-paper": CaptionerConfig(
        encoder="features",
        words=tuple(f"w{number}" for number in range(9_996)),
        max_length=20,
        feature_dim=2048,
        dim=512,
        position=False,
        attention_dim=512,
        hidden_dim=512,
        embedding_dim=256,
    ),
}

# The ResNet in front of it, given to other models and taken from them.
TRUNK = ResNetPort(CaptionerConfig, "captioner", "convolutions.")
