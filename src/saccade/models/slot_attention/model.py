# SPDX-License-Identifier: Apache-2.0
"""Slot attention, plain or equivariant: a picture taken apart into slots and painted again."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.errors import SaccadeError
from saccade.models.budget import Budget
from saccade.models.interface import Component, ComputeBudget, Family
from saccade.models.layers.pixels import PixelScale
from saccade.models.slot_attention.components import slot_components
from saccade.models.slot_attention.config import SlotConfig as SlotConfig
from saccade.models.slot_attention.decoder import Decoder, Painting
from saccade.models.slot_attention.encoders import Encoder
from saccade.models.slot_attention.initial import Rule, rule_of
from saccade.models.slot_attention.rounds import SlotAttention, SlotState


class InitialSlots(nn.Module):
    """The contents that slots begin with.

    Learned: one content a slot. Gaussian: a mean and a width that all slots share, so that any
    number of them can be drawn.

    Shapes: noise [b k d] from N(0, 1), for gaussian contents only; pose [b k p], positions and
            scales -> state [b k d+p], differentiable in the contents.
    """

    def __init__(self, config: SlotConfig) -> None:
        super().__init__()
        self.config = config
        if config.initial_slots == "learned":
            self.slots = nn.Parameter(torch.randn(config.slots, config.slot_dim))
        else:
            self.mean = nn.Parameter(0.1 * torch.randn(config.slot_dim))
            self.log_std = nn.Parameter(torch.zeros(config.slot_dim))

    def contents(self) -> dict[str, Tensor]:
        """Contents of the rule: slots [k d], or mean and std [d]."""
        if self.config.initial_slots == "learned":
            return {"slots": self.slots}
        return {"mean": self.mean, "std": self.log_std.exp()}

    def forward(self, noise: Tensor, pose: Tensor) -> Tensor:
        if self.config.initial_slots == "learned":
            slots = self.slots[: pose.shape[1]].expand(pose.shape[0], -1, -1)
        else:
            slots = self.mean + self.log_std.exp() * noise
        return torch.cat([slots, pose.to(slots.dtype)], -1)


class SlotModel(nn.Module, Family):
    """Encoder, rounds of slot attention, and a decoder that paints every slot.

    Images are [b h w c] with values 0 to 255 of any type, states [b k s]: slot, position (y, x),
    scale, as far as the attention has them. Any number of slots runs.

    Source: Biza et al. 2023, Invariant Slot Attention, as the authors' code computes it; the
            configuration names where Algorithm 1 prints otherwise.
    """

    config_class = SlotConfig

    def __init__(self, config: SlotConfig, *, fresh: bool = True) -> None:
        """Weights are drawn from config.seed; it costs nothing to draw those to be loaded."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.scale = PixelScale(config)
            self.encoder = Encoder(config)
            self.attention = SlotAttention(config, self.encoder.outputs)
            self.initial = InitialSlots(config)
            self.decoder = Decoder(config)

    def forward(self, image: Tensor, initial_state: Tensor) -> tuple[SlotState, Tensor, Painting]:
        """The slots, the last round's attention before renormalisation, and the picture.

        Shapes: image [b h w c], initial_state [b k s] -> SlotState, [b k n], Painting.
        """
        tokens = self.encoder(self.scale(image))
        state, attention = self.attention(tokens, initial_state.to(tokens.dtype))
        return state, attention[-1].mean(1), self.decoder(state)

    def components(self) -> tuple[Component, ...]:
        """The component that takes an image apart, and the decoder alone for edited slots."""
        return slot_components(self, self.rule())

    def rule(self) -> Rule:
        """Rule by which initial states are drawn, see slot_initial."""
        return rule_of(self.config, self.initial.contents())

    def budgets(self) -> tuple[ComputeBudget, ...]:
        """All rounds that were trained, then fewer down to one."""
        return tuple(self._rounds(count) for count in range(self.config.rounds, 0, -1))

    def budget(self, text: str) -> ComputeBudget:
        """The budget of a number of rounds, written 2 or t2.

        Raises: SaccadeError if it is not between 1 and the rounds of this model.
        """
        most = self.config.rounds
        digits = text.strip().lower().removeprefix("t")
        if not (digits.isdecimal() and 1 <= int(digits) <= most):
            raise SaccadeError(
                f"rounds {text!r}: this model was trained with {most}. "
                f"Give whole numbers from 1 to {most}, such as --budget {most},1."
            )
        return self._rounds(int(digits))

    def _rounds(self, count: int) -> ComputeBudget:
        total = self.config.rounds
        return ComputeBudget(f"t{count}", Budget(count / total), count, total, "rounds")

    def at(self, budget: ComputeBudget) -> "SlotModel":
        """The same weights with that many rounds."""
        model = deepcopy(self)
        model.config = replace(self.config, rounds=budget.kept)
        model.attention.config = model.config
        return model

    def runtime_metadata(self) -> dict[str, Any]:
        """The rule of initial states, and how many slots there are by default."""
        config = self.config
        return {
            "initial_state": self.rule(),
            "slots": config.slots,
            "state": {"slot": config.slot_dim, "position": 2 * config.equivariant}
            | {"scale": 2 * config.scaled},
        }


def random_pose(config: SlotConfig, rng: np.random.Generator, count: int) -> np.ndarray:
    """Positions and scales to train with, one draw a batch.

    Shapes: -> [count k p] float32.
    """
    shape = (count, config.slots, 2)
    parts = [np.zeros((count, config.slots, 0))]
    if config.equivariant:
        uniform = config.initial_positions == "uniform"
        parts.append(rng.uniform(-1, 1, shape) if uniform else np.zeros(shape))
    if config.scaled:
        parts.append(config.scale_mean + config.scale_std * rng.standard_normal(shape))
    return np.concatenate(parts, -1).astype(np.float32)
