# SPDX-License-Identifier: Apache-2.0
"""Slot attention, plain or equivariant: an image is split into slots and painted again."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.models.budget import ComputeBudget
from saccade.models.interface import Family
from saccade.models.layers.pixels import PixelScale
from saccade.models.slot_attention.components import SlotFunction
from saccade.models.slot_attention.config import SlotConfig as SlotConfig
from saccade.models.slot_attention.decoder import Decoder
from saccade.models.slot_attention.encoders import Encoder
from saccade.models.slot_attention.initial import Rule
from saccade.models.slot_attention.rounds import SlotAttention


class InitialSlots(nn.Module):
    """The initial contents of slots.

    Learned: one content per slot. Gaussian: a mean and a width that all slots share, so that any
    number of slots can be drawn.

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
        """Return the contents of the rule: slots [k d], or mean and std [d]."""
        if self.config.initial_slots == "learned":
            return {"slots": self.slots}
        return {"mean": self.mean, "std": self.log_std.exp()}

    def forward(self, noise: Tensor, pose: Tensor) -> Tensor:
        if self.config.initial_slots == "learned":
            slots = self.slots[: pose.shape[1]].expand(pose.shape[0], -1, -1)
        else:
            slots = self.mean + self.log_std.exp() * noise
        return torch.cat([slots, pose.to(slots.dtype)], -1)


class SlotModel(SlotFunction, Family):
    """Encoder, rounds of slot attention, and a decoder that paints every slot.

    Images are [b h w c] with values 0 to 255 of any type. States are [b k s]: slot, then position
    (y, x) and scale if the attention has them. Any number of slots works.

    Source: Biza et al. 2022, Spatial Symmetry in Slot Attention, as in the authors' code;
            the configuration names the differences from Algorithm 1.
    """

    config_class = SlotConfig

    def __init__(self, config: SlotConfig, *, fresh: bool = True) -> None:
        """Draw the weights from config.seed, even if others are loaded next: it is cheap."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.scale = PixelScale(config)
            self.encoder = Encoder(config)
            self.attention = SlotAttention(config, self.encoder.outputs)
            self.initial = InitialSlots(config)
            self.decoder = Decoder(config)

    def rule(self) -> Rule:
        """Return the rule for drawing initial states; see initial.py."""
        config, contents = self.config, self.initial.contents()
        return {
            "kind": config.initial_slots,
            **{name: value.detach().double().cpu().tolist() for name, value in contents.items()},
            "positions": config.initial_positions if config.equivariant else None,
            "scale_mean": config.scale_mean if config.scaled else None,
            "scale_std": config.scale_std if config.scaled else None,
        }

    def at(self, budget: ComputeBudget) -> "SlotModel":
        """Return the same weights with that many rounds."""
        model = deepcopy(self)
        model.config = replace(self.config, rounds=budget.kept)
        model.attention.config = model.config
        return model

    def runtime_metadata(self) -> dict[str, Any]:
        """Return the rule of initial states, and the default number of slots."""
        config = self.config
        return {
            "initial_state": self.rule(),
            "slots": config.slots,
            "state": {"slot": config.slot_dim, "position": 2 * config.equivariant}
            | {"scale": 2 * config.scaled},
        }


def random_pose(config: SlotConfig, rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw the positions and scales of one training batch.

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
