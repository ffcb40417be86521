# SPDX-License-Identifier: Apache-2.0
"""Rounds of slot attention: slots compete for tokens, and move to their tokens."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saccade.models.slot_attention.config import SlotConfig

Prepared = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class SlotState:
    """State of a slot: its content, position and scale.

    Shapes: slots [b k d], positions and scales [b k 2] (y, x).
    """

    slots: Tensor
    positions: Tensor | None = None
    scales: Tensor | None = None

    def joined(self) -> Tensor:
        """Return the state as one tensor, in the layout of an initial state.

        Shapes: -> [b k s].
        """
        parts = (self.slots, self.positions, self.scales)
        return torch.cat([part for part in parts if part is not None], -1)


class PlainReader(nn.Module):
    """Keys and values of the baseline: linear in the tokens, with heads.

    A reader has four methods. `prepare` computes what is the same for the tokens in every round.
    `see` returns the keys, and on request the values, as these slots see them. `logits` and
    `update` compute scores and updates from them.
    """

    def __init__(self, config: SlotConfig, token_dim: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.keys = linear(token_dim, config.qkv_dim, bias=False)
        self.values = linear(token_dim, config.qkv_dim, bias=False)
        head_dim = config.qkv_dim // config.heads
        self.merge = linear(config.qkv_dim, head_dim) if config.heads > 1 else None
        self.update_dim = head_dim

    def prepare(self, tokens: Tensor) -> Prepared:
        return self._split(self.keys(tokens)), self._split(self.values(tokens))

    def see(self, prepared: Prepared, relative: Tensor | None, *, values: bool) -> Prepared:
        return prepared

    def logits(self, keys: Tensor, queries: Tensor) -> Tensor:
        return self._split(queries) @ keys.mT

    def update(self, values: Tensor, weights: Tensor) -> Tensor:
        pooled = (weights @ values).transpose(1, 2).flatten(-2)
        return pooled if self.merge is None else self.merge(pooled)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class GridReader(nn.Module):
    """Keys and values as each slot sees them: f(k(token) + g(relative position)).

    Shapes: tokens [b n c], relative [b k n 2] -> keys, values [b k n d]; k is 1 for slots without
            positions, which all see the same grid.
    Source: Biza et al. 2022, Algorithm 1, lines 6 to 9, and equation 1.
    """

    def __init__(self, config: SlotConfig, token_dim: int) -> None:
        super().__init__()
        d = config.qkv_dim
        self.keys = linear(token_dim, d, bias=False)
        self.values = linear(token_dim, d, bias=False)
        self.grid = linear(2, d)
        self.norm = nn.LayerNorm(d, eps=config.norm_epsilon) if config.grid_norm else nn.Identity()
        self.widen = linear(d, config.grid_mlp_dim)
        self.narrow = linear(config.grid_mlp_dim, d)
        self.values_see_grid = config.values_see_grid
        self.update_dim = d

    def prepare(self, tokens: Tensor) -> Prepared:
        return self.keys(tokens), self.values(tokens)

    def see(self, prepared: Prepared, relative: Tensor | None, *, values: bool) -> Prepared:
        of_keys, of_values = (array[:, None] for array in prepared)
        offset = self.grid(relative)
        encoded = self._encode(of_keys + offset)
        if not (values and self.values_see_grid):
            return encoded, of_values
        return encoded, self._encode(of_values + offset)

    def logits(self, keys: Tensor, queries: Tensor) -> Tensor:
        return (keys @ queries[..., None]).squeeze(-1)[:, None]

    def update(self, values: Tensor, weights: Tensor) -> Tensor:
        return (weights.squeeze(1)[:, :, None] @ values).squeeze(2)

    def _encode(self, x: Tensor) -> Tensor:
        return self.narrow(self.widen(self.norm(x)).relu())


class Gate(nn.Module):
    """A gated recurrent unit whose old state adds no biases to the reset and update gates.

    Shapes: state [b k s], x [b k d] -> [b k s].
    """

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.inputs = linear(input_dim, 3 * dim)
        self.state = nn.Linear(dim, 3 * dim, bias=False)
        for part in self.state.weight.data.split(dim):
            nn.init.orthogonal_(part)
        self.candidate_bias = nn.Parameter(torch.zeros(dim))

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        reset_x, keep_x, new_x = self.inputs(x).chunk(3, -1)
        reset_h, keep_h, new_h = self.state(state).chunk(3, -1)
        reset, keep = (reset_x + reset_h).sigmoid(), (keep_x + keep_h).sigmoid()
        new = (new_x + reset * (new_h + self.candidate_bias)).tanh()
        return (1 - keep) * new + keep * state


class SlotAttention(nn.Module):
    """T rounds of attention; if slots have positions, one more that only moves them.

    Shapes: inputs [b n c] (the last two channels are the grid if the reader sees it apart),
            state [b k s] -> SlotState, and the attention of each round [b heads k n] after the
            softmax over slots.
    Source: Biza et al. 2022, Algorithm 1; Locatello et al. 2020 for the baseline.
    """

    float32_products = True  # slots compete in every round, which amplifies rounding

    def __init__(self, config: SlotConfig, input_dim: int) -> None:
        super().__init__()
        self.config = config
        token_dim = input_dim - 2 if config.reads_grid else input_dim
        self.norm_inputs = nn.LayerNorm(token_dim, eps=config.norm_epsilon)
        self.norm_slots = nn.LayerNorm(config.slot_dim, eps=config.norm_epsilon)
        self.queries = linear(config.slot_dim, config.qkv_dim, bias=False)
        reader = GridReader if config.reads_grid else PlainReader
        self.reader: Any = reader(config, token_dim)
        self.gate = Gate(self.reader.update_dim, config.slot_dim)
        self.mlp: nn.Module | None = None
        if config.mlp_dim:
            self.mlp = nn.Sequential(
                nn.LayerNorm(config.slot_dim, eps=config.norm_epsilon),
                linear(config.slot_dim, config.mlp_dim),
                nn.ReLU(),
                linear(config.mlp_dim, config.slot_dim),
            )

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[SlotState, list[Tensor]]:
        config = self.config
        now = self._start(state)
        grid = inputs[..., -2:] if config.reads_grid else None
        tokens = inputs[..., :-2] if config.reads_grid else inputs
        prepared = self.reader.prepare(self.norm_inputs(tokens))
        attention = []
        for turn in range(config.rounds + config.equivariant):
            slots = self.norm_slots(now.slots)
            relative = None if grid is None else self._relative(grid, now)
            keys, values = self.reader.see(prepared, relative, values=turn < config.rounds)
            attention.append(self._attend(keys, slots))
            weights = attention[-1] / (attention[-1].sum(-1, keepdim=True) + config.epsilon)
            moved = now if grid is None else self._moved(now, weights.squeeze(1), grid)
            if turn < config.rounds:
                slots = self._updated(now.slots, self.reader.update(values, weights))
            elif config.returned_slots == "updated":
                slots = now.slots
            now = SlotState(slots, moved.positions, moved.scales)
        return now, attention

    def _start(self, state: Tensor) -> SlotState:
        config, d = self.config, self.config.slot_dim
        slots, positions = state[..., :d], state[..., d : d + 2]
        if not config.equivariant:
            return SlotState(slots)
        positions = positions.clamp(-config.position_limit, config.position_limit)
        if config.position_start == "zero":
            positions = torch.zeros_like(positions)
        if not config.scaled:
            return SlotState(slots, positions)
        scales = state[..., d + 2 : d + 4].clamp(config.scale_min, config.scale_max)
        if config.scale_start > 0:
            scales = torch.full_like(scales, config.scale_start)
        return SlotState(slots, positions, scales)

    def _relative(self, grid: Tensor, now: SlotState) -> Tensor:
        if now.positions is None:
            return grid[:, None]
        return relative_grid(grid[:, None], now, self.config.scales_factor)

    def _attend(self, keys: Tensor, slots: Tensor) -> Tensor:
        config = self.config
        width = config.qkv_dim // config.heads
        scale = math.sqrt(width if config.query_scale == "head" else slots.shape[1])
        logits = self.reader.logits(keys, self.queries(slots) / (scale * config.temperature))
        return logits.softmax(-2)

    def _moved(self, now: SlotState, weights: Tensor, grid: Tensor) -> SlotState:
        if now.positions is None:
            return now
        positions = weights @ grid
        if now.scales is None:
            return SlotState(now.slots, positions)
        config = self.config
        squares = (grid[:, None] - positions[:, :, None]).square()
        spread = ((weights + config.epsilon)[..., None] * squares).sum(2)
        scales = spread.sqrt().clamp(config.scale_min, config.scale_max)
        return SlotState(now.slots, positions, scales)

    def _updated(self, slots: Tensor, update: Tensor) -> Tensor:
        slots = self.gate(slots, update)
        return slots if self.mlp is None else slots + self.mlp(slots)


def relative_grid(grid: Tensor, state: SlotState, factor: float) -> Tensor:
    """Return the grid as each slot sees it: relative to its position, in units of its scale.

    Shapes: grid [1 or b, 1, n, 2], a state of positions [b k 2] -> [b k n 2].
    """
    assert state.positions is not None
    relative = grid - state.positions[:, :, None]
    if state.scales is not None:
        relative = relative / state.scales[:, :, None]
    return relative / factor


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Create a linear layer with the variance-preserving initialization of the authors' library.

    Units:  weights are normal with variance 1 / inputs, truncated at two deviations; bias 0.
    """
    layer = nn.Linear(inputs, outputs, bias=bias)
    scaled_normal_(layer.weight, inputs)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def scaled_normal_(weight: Tensor, inputs: int) -> None:
    """Draw a weight of variance 1 / inputs in place, truncated at two deviations."""
    # A standard normal truncated at 2 has a deviation of 0.8796.
    std = 1 / (0.87962566 * math.sqrt(inputs))
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
