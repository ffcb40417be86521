# SPDX-License-Identifier: Apache-2.0
"""Everything that is decided about a slot attention model before its weights exist."""

import math
from dataclasses import dataclass

from saccade.models.config_values import ConfigValues

CHOICES = {
    "encoder": ("simple-cnn", "resnet"),
    "grid_embedding": ("concat", "project_add"),
    "attention": ("sa", "t-sa", "ts-sa"),
    "position_start": ("state", "zero"),
    "query_scale": ("head", "slots"),
    "returned_slots": ("updated", "normalised"),
    "initial_slots": ("learned", "gaussian"),
    "initial_positions": ("uniform", "zero"),
    "decoder": ("mlp", "cnn"),
}
COUNTS = (
    *("height_px", "width_px", "channels", "slots", "slot_dim", "qkv_dim", "heads"),
    *("decoder_height", "decoder_width", "resnet_width"),
)
COUNTED = (
    *("encoder_channels", "encoder_kernels", "encoder_strides", "resnet_stages"),
    *("decoder_channels", "decoder_kernels", "decoder_strides"),
)
# Numbers of the state behind the slot: position, then scale.
POSE_NUMBERS = {"sa": 0, "t-sa": 2, "ts-sa": 4}


@dataclass(frozen=True)
class SlotConfig(ConfigValues):
    """Configuration of a slot attention model; its defaults are the paper's for Tetrominoes.

    Where the paper's Algorithm 1 prints something else than the authors' code computes, the
    default is the code and the field's comment names the print.

    Raises: SaccadeError naming the first field that is out of range.
    Source: Biza et al. 2023, Invariant Slot Attention, Algorithm 1, tables 4 to 8.
    """

    called = "Slot attention"
    layer_counts = ("resnet_stages",)
    round_counts = ("rounds",)

    height_px: int = 35
    width_px: int = 35
    channels: int = 3
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    encoder: str = "simple-cnn"  # or the ResNet for small inputs, 34 layers by default
    encoder_channels: tuple[int, ...] = (64, 64, 64, 64)  # of simple-cnn, one a layer
    encoder_kernels: tuple[int, ...] = (5, 5, 5, 5)
    encoder_strides: tuple[int, ...] = (1, 1, 1, 1)
    resnet_stages: tuple[int, ...] = (3, 4, 6, 3)  # blocks a stage
    resnet_width: int = 64  # channels of the first stage; each further one doubles them
    grid_embedding: str = "concat"  # the grid becomes the last two channels; project_add adds a
    # linear layer of it, and an equivariant model then reads two learned channels as its grid
    grid_embedding_mlp: int = 0  # hidden width of the MLP behind project_add; 0: none
    attention: str = "t-sa"  # sa: the baseline; t: translation, ts: also scale equivariant
    rounds: int = 3  # T; equivariant ones run one more, of position and scale only
    slots: int = 4
    slot_dim: int = 64
    qkv_dim: int = 128
    heads: int = 1  # of sa
    mlp_dim: int = 128  # hidden width behind the GRU; 0: no MLP
    grid_mlp_dim: int = 128  # hidden width of f, which keys (and values) with their grid go through
    grid_norm: bool = True  # LayerNorm in f; the paper's table 4 prints none
    values_see_grid: bool = True  # values go through f too
    scales_factor: float = 1.0  # the relative grid is divided by it; ts-sa of the paper: 5
    temperature: float = 1.0  # of the softmax over slots
    query_scale: str = "head"  # 1/sqrt(width of a head); slots: 1/sqrt(K) as line 12 prints
    returned_slots: str = "updated"  # those of round T; normalised: LayerNorm of them, as line 4
    position_start: str = "state"  # zero: whatever position comes in is replaced by 0
    scale_start: float = 0.0  # above 0: whatever scale comes in is replaced by it
    position_limit: float = 1.0  # positions that come in are clipped to it
    scale_min: float = 0.001  # the paper prints 0.01 to 5
    scale_max: float = 2.0
    epsilon: float = 1e-8  # of the weighted means
    norm_epsilon: float = 1e-6  # of LayerNorm and GroupNorm
    initial_slots: str = "learned"  # or gaussian: a learned mean and width for all
    initial_positions: str = "uniform"  # in [-1, 1] on both axes
    scale_mean: float = 0.1
    scale_std: float = 0.1
    decoder: str = "mlp"
    decoder_height: int = 35  # the grid that slots are broadcast to
    decoder_width: int = 35
    decoder_channels: tuple[int, ...] = (256, 256, 256, 256, 256)
    decoder_kernels: tuple[int, ...] = ()  # of cnn, one a layer
    decoder_strides: tuple[int, ...] = ()
    decoder_transposed: tuple[bool, ...] = ()
    decoder_scales_factor: float = 5.0  # as scales_factor, where the decoder sees a scale
    seed: int = 0  # of the initial weights

    def __post_init__(self) -> None:
        self._check_types()
        for name in COUNTED:
            fits = all(each >= 1 for each in getattr(self, name))
            self._expect(name, fits, "whole numbers of at least 1")
        for name, allowed in CHOICES.items():
            self._expect(name, getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
        for name in COUNTS:
            value = getattr(self, name)
            self._expect(name, type(value) is int and value >= 1, "a whole number of at least 1")
        for name in ("rounds", "mlp_dim", "grid_mlp_dim", "grid_embedding_mlp"):
            value = getattr(self, name)
            self._expect(name, type(value) is int and value >= 0, "a whole number of at least 0")
        self._check_sizes()
        self._check_numbers()

    def _check_sizes(self) -> None:
        self._check_pixels()
        groups = self.equivariant and self.heads > 1
        self._expect("heads", not groups, "1 where attention is not 'sa'")
        self._expect("heads", self.qkv_dim % self.heads == 0, f"a divisor of {self.qkv_dim}")
        fits = not self.equivariant or self.grid_mlp_dim >= 1
        self._expect("grid_mlp_dim", fits, "at least 1 where attention is not 'sa'")
        fits = self.rounds >= 1 or self.equivariant
        self._expect("rounds", fits, "at least 1 where attention is 'sa'")
        for name in ("decoder_channels", "resnet_stages"):
            self._expect(name, len(getattr(self, name)) >= 1, "at least one number")
        fits = self.encoder != "resnet" or self.resnet_width % 32 == 0
        self._expect("resnet_width", fits, "a multiple of 32, the groups of its norms")
        parts = ["encoder"] if self.encoder == "simple-cnn" else []
        for part in [*parts, *(["decoder"] if self.decoder == "cnn" else [])]:
            layers = len(getattr(self, f"{part}_channels"))
            for name in ("channels", "kernels", "strides"):
                values = getattr(self, f"{part}_{name}")
                fits = len(values) == layers >= 1
                self._expect(f"{part}_{name}", fits, f"{max(layers, 1)} values, one a layer")
        if self.decoder == "cnn":
            fits = len(self.decoder_transposed) == len(self.decoder_channels)
            self._expect("decoder_transposed", fits, "one truth value a layer")

    def _check_numbers(self) -> None:
        for name in ("scales_factor", "decoder_scales_factor", "temperature", "scale_min"):
            self._expect(name, getattr(self, name) > 0, "above 0")
        for name in ("epsilon", "norm_epsilon", "scale_std", "scale_start", "position_limit"):
            value = getattr(self, name)
            self._expect(name, math.isfinite(value) and value >= 0, "at least 0")
        fits = self.scale_max > self.scale_min
        self._expect("scale_max", fits, f"above scale_min ({self.scale_min})")

    @property
    def equivariant(self) -> bool:
        """Whether slots have positions."""
        return self.attention != "sa"

    @property
    def scaled(self) -> bool:
        """Whether slots have scales."""
        return self.attention == "ts-sa"

    @property
    def state_dim(self) -> int:
        """Numbers of one slot's state: slot, position, scale, as far as it has them."""
        return self.slot_dim + POSE_NUMBERS[self.attention]


_TETROMINOES = {"height_px": 20, "width_px": 20, "decoder_height": 20, "decoder_width": 20}
_TINY = {
    "height_px": 14,
    "width_px": 14,
    "decoder_height": 14,
    "decoder_width": 14,
    "encoder_channels": (8, 8),
    "encoder_kernels": (5, 5),
    "encoder_strides": (1, 2),
    "slot_dim": 16,
    "qkv_dim": 16,
    "mlp_dim": 16,
    "grid_mlp_dim": 16,
    "decoder_channels": (16, 16),
}
_SMALL = {
    "encoder_channels": (32,) * 3,
    "encoder_kernels": (5,) * 3,
    "encoder_strides": (1,) * 3,
    "slot_dim": 32,
    "qkv_dim": 32,
    "mlp_dim": 64,
    "grid_mlp_dim": 32,
    "decoder_channels": (64,) * 3,
}
_CLEVR = {
    "height_px": 128,
    "width_px": 128,
    "slots": 11,
    "encoder_strides": (2, 2, 1, 1),
    "decoder": "cnn",
    "decoder_height": 16,
    "decoder_width": 16,
    "decoder_channels": (64,) * 5,
    "decoder_kernels": (5,) * 5,
    "decoder_strides": (2, 2, 2, 1, 1),
    "decoder_transposed": (True,) * 3 + (False,) * 2,
}
_BASELINE = {"attention": "sa", "grid_embedding": "project_add", "grid_embedding_mlp": 64}
_SCALED = {"attention": "ts-sa", "scales_factor": 5.0}
SOURCE = "Biza et al. 2023, Invariant Slot Attention"
PRESETS: dict[str, SlotConfig] = {
    "slot-attention-tiny": SlotConfig.from_dict({**_TINY, **_SCALED}),
    "slot-attention-small": SlotConfig.from_dict({**_TETROMINOES, **_SMALL}),
    "slot-attention-tetrominoes": SlotConfig(),
    "slot-attention-clevr-sa": SlotConfig.from_dict({**_CLEVR, **_BASELINE}),
    "slot-attention-clevr": SlotConfig.from_dict({**_CLEVR, **_SCALED}),
    "slot-attention-clevrtex-resnet": SlotConfig.from_dict(
        {**_CLEVR, **_SCALED, "encoder": "resnet"}
    ),
}
