# SPDX-License-Identifier: Apache-2.0
"""The configuration of a slot attention model, and its named sizes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Length, Natural, NonNegative, Positive
from saccade.models.budget import Budget, ComputeBudget
from saccade.models.config_values import ConfigValues, ImageFields
from saccade.models.resolution import resolution_budget

Encoder = Literal["simple-cnn", "resnet"]
GridEmbedding = Literal["concat", "project_add"]
Attention = Literal["sa", "t-sa", "ts-sa"]
PositionStart = Literal["state", "zero"]
QueryScale = Literal["head", "slots"]
ReturnedSlots = Literal["updated", "normalised"]
InitialSlots = Literal["learned", "gaussian"]
InitialPositions = Literal["uniform", "zero"]
Decoder = Literal["mlp", "cnn"]
# Numbers after the slot in a state: position, then scale.
POSE_NUMBERS = {"sa": 0, "t-sa": 2, "ts-sa": 4}


@dataclass(frozen=True)
class SlotConfig(ImageFields, ConfigValues):
    """Configuration of a slot attention model; its defaults are the paper's for Tetrominoes.

    If the paper's Algorithm 1 differs from the authors' code, the default follows the code, and
    the field's comment gives the paper's value.

    Raises: SaccadeError naming the first field that is out of range.
    Source: Biza et al. 2022, Spatial Symmetry in Slot Attention, Algorithm 1, tables 4 to 8.
    """

    called = "Slot attention"
    layer_counts = ("resnet_stages",)
    round_counts = ("rounds",)

    height_px: Count = 35
    width_px: Count = 35
    channels: Count = 3
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    encoder: Encoder = "simple-cnn"  # or the ResNet for small inputs, 34 layers by default
    encoder_channels: tuple[Count, ...] = (64, 64, 64, 64)  # of simple-cnn, one per layer
    encoder_kernels: tuple[Count, ...] = (5, 5, 5, 5)
    encoder_strides: tuple[Count, ...] = (1, 1, 1, 1)
    resnet_stages: Annotated[tuple[Count, ...], Length(1)] = (3, 4, 6, 3)  # blocks per stage
    resnet_width: Count = 64  # channels of the first stage; each later stage doubles them
    # append: the grid becomes the last two channels; project_add: a linear layer of the grid is
    # added, and an equivariant model then reads two learned channels as its grid
    grid_embedding: GridEmbedding = "concat"
    grid_embedding_mlp: Natural = 0  # hidden width of the MLP after project_add; 0: none
    attention: Attention = "t-sa"  # sa: the baseline; t, ts: translation (and scale) equivariant
    rounds: Natural = 3  # T; equivariant models add one that only updates position and scale
    slots: Count = 4
    slot_dim: Count = 64
    qkv_dim: Count = 128
    heads: Count = 1  # of sa
    mlp_dim: Natural = 128  # hidden width after the GRU; 0: no MLP
    # hidden width of f, applied to keys (and values) with their grid
    grid_mlp_dim: Natural = 128
    grid_norm: bool = True  # LayerNorm in f; none in the paper's table 4
    values_see_grid: bool = True  # f is applied to values too
    # of sa: keys and values of equation 1, f(k(token) + g(grid)), instead of linear in tokens that
    # contain the grid
    keys_see_grid: bool = False
    scales_factor: Positive = 1.0  # divides the relative grid; 5 for the paper's ts-sa
    temperature: Positive = 1.0  # of the softmax over slots
    query_scale: QueryScale = "head"  # 1/sqrt(width of a head); slots: 1/sqrt(K) as in line 12
    # the slots after round T; `normalised`: their LayerNorm, as in line 4
    returned_slots: ReturnedSlots = "updated"
    position_start: PositionStart = "state"  # zero: replace initial positions by 0
    scale_start: NonNegative = 0.0  # above 0: replaces initial scales
    position_limit: NonNegative = 1.0  # initial positions are clipped to it
    scale_min: Positive = 0.001  # 0.01 to 5 in the paper
    scale_max: float = 2.0
    epsilon: NonNegative = 1e-8  # of the weighted means
    norm_epsilon: NonNegative = 1e-6  # of LayerNorm and GroupNorm
    initial_slots: InitialSlots = "learned"  # or gaussian: one learned mean and width
    initial_positions: InitialPositions = "uniform"  # in [-1, 1] on both axes
    scale_mean: float = 0.1
    scale_std: NonNegative = 0.1
    decoder: Decoder = "mlp"
    decoder_height: Count = 35  # the grid that slots are broadcast to
    decoder_width: Count = 35
    decoder_channels: Annotated[tuple[Count, ...], Length(1)] = (256, 256, 256, 256, 256)
    decoder_kernels: tuple[Count, ...] = ()  # of cnn, one per layer
    decoder_strides: tuple[Count, ...] = ()
    decoder_transposed: tuple[bool, ...] = ()
    decoder_scales_factor: Positive = 5.0  # as scales_factor, if the decoder sees scales
    seed: int = 0  # of the initial weights

    def __post_init__(self) -> None:
        self._check_types()
        self._check_sizes()
        fits = self.scale_max > self.scale_min
        self._expect("scale_max", fits, f"above scale_min ({self.scale_min})")

    def budgets(self) -> tuple[ComputeBudget, ...]:
        """Return all trained rounds, then fewer, down to one."""
        return tuple(self._rounds(count) for count in range(self.rounds, 0, -1))

    def budget(self, text: str) -> ComputeBudget:
        """Return the budget for a number of rounds, written 2 or t2.

        Raises: SaccadeError if it is not between 1 and the rounds of this model.
        """
        resolution_budget(self, text)  # refuses it: grids of slots and pixels have one size
        most = self.rounds
        digits = text.strip().lower().removeprefix("t")
        if not (digits.isdecimal() and 1 <= int(digits) <= most):
            raise SaccadeError(
                f"rounds {text!r}: this model was trained with {most} rounds. "
                f"Pass whole numbers from 1 to {most}, such as --budget {most},1."
            )
        return self._rounds(int(digits))

    def _rounds(self, count: int) -> ComputeBudget:
        total = self.rounds
        return ComputeBudget(f"t{count}", Budget(count / total), count, total, "rounds")

    def _check_sizes(self) -> None:
        self._check_pixels()
        groups = self.reads_grid and self.heads > 1
        self._expect("heads", not groups, "1 unless attention is 'sa' without keys_see_grid")
        fits = not (self.keys_see_grid and self.equivariant)
        self._expect("keys_see_grid", fits, "false unless attention is 'sa'")
        self._expect("heads", self.qkv_dim % self.heads == 0, f"a divisor of {self.qkv_dim}")
        fits = not self.reads_grid or self.grid_mlp_dim >= 1
        self._expect(
            "grid_mlp_dim", fits, "at least 1 unless attention is 'sa' without keys_see_grid"
        )
        fits = self.rounds >= 1 or self.equivariant
        self._expect("rounds", fits, "at least 1 if attention is 'sa'")
        fits = self.encoder != "resnet" or self.resnet_width % 32 == 0
        self._expect("resnet_width", fits, "a multiple of 32, the groups of its norms")
        parts = ["encoder"] if self.encoder == "simple-cnn" else []
        for part in [*parts, *(["decoder"] if self.decoder == "cnn" else [])]:
            layers = len(getattr(self, f"{part}_channels"))
            for name in ("channels", "kernels", "strides"):
                values = getattr(self, f"{part}_{name}")
                fits = len(values) == layers >= 1
                self._expect(f"{part}_{name}", fits, f"{max(layers, 1)} values, one per layer")
        if self.decoder == "cnn":
            fits = len(self.decoder_transposed) == len(self.decoder_channels)
            self._expect("decoder_transposed", fits, "one truth value per layer")

    @property
    def equivariant(self) -> bool:
        """True if slots have positions."""
        return self.attention != "sa"

    @property
    def reads_grid(self) -> bool:
        """True if keys and values are functions of tokens and grid, the tokens' last channels."""
        return self.equivariant or self.keys_see_grid

    @property
    def scaled(self) -> bool:
        """True if slots have scales."""
        return self.attention == "ts-sa"

    @property
    def state_dim(self) -> int:
        """Width of one slot's state: slot, and position and scale if it has them."""
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
SOURCE = "Biza et al. 2022, Spatial Symmetry in Slot Attention"
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
