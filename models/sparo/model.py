# SPDX-License-Identifier: Apache-2.0
"""SPARO: an image and a text tower whose codes consist of separately attended slots."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from saccade.core.errors import SaccadeError
from saccade.models.budget import ComputeBudget
from saccade.models.interface import Family
from saccade.models.layers.swin import SwinBlock
from saccade.models.layers.transformer import Block
from saccade.models.layers.trunk import block_layers
from saccade.models.resolution import resized
from saccade.models.sparo.components import TowerFunction
from saccade.models.sparo.config import SparoConfig as SparoConfig
from saccade.models.sparo.pooling import pool, selected
from saccade.models.sparo.towers import ImageTower, StagedTower, TextTower


class Sparo(TowerFunction, Family):
    """Two towers (or only the image tower), each with a pooling of its tokens into a code.

    Source: Vani et al. 2024, SPARO, section 3; the configuration names the baselines.
    """

    config_class = SparoConfig
    repeated_blocks = (Block, SwinBlock)
    slot_order: Tensor

    def __init__(self, config: SparoConfig, *, fresh: bool = True) -> None:
        """Draw the weights from config.seed."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            tower = ImageTower if config.trunk == "vit" else StagedTower
            self.image = tower(config)
            self.image_pool = pool(config, "image")
            if config.text:
                self.text = TextTower(config)
                self.text_pool = pool(config, "text")
                self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
            if config.pooling == "codebook":
                self.codebook = nn.Parameter(torch.randn(config.codes, config.feature_dim))
        if config.pooling == "sparo":
            count = len(config.kept_slots)
            self.register_buffer("slot_order", torch.arange(count))
            if config.masked:
                self.register_buffer("slot_mask", torch.ones(count, config.slot_dim))

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        """Return the similarity of each image to each text.

        Shapes: image [i h w c], tokens [t context_length] -> [i t], as logits.
        """
        return (
            self.logit_scale.exp()
            * self.encode_image(image).code
            @ self.encode_text(tokens).code.mT
        )

    def parameter_layers(self) -> tuple[tuple[str, ...], ...]:
        """Return both towers before their blocks, their blocks by index, and what follows them."""
        towers = ("image", "text") if self.config.text else ("image",)
        tower_blocks = [_blocks(self.get_submodule(tower), tower) for tower in towers]
        most = max(map(len, tower_blocks))
        # The shorter tower ends where the longer one does.
        padded = [((),) * (most - len(blocks)) + blocks for blocks in tower_blocks]
        blocks = (sum(parts, ()) for parts in zip(*padded, strict=True))
        return (towers, *blocks, ("image_pool", "text_pool"))

    def at(self, budget: ComputeBudget) -> "Sparo":
        """Return the model with the first slots of `slot_order`, itself for all of them."""
        if budget.part is not None:
            return resized(self, budget.kept).at(budget.part)
        if budget.label == "b1000":
            return self
        return self.keep(self.slot_order[: budget.kept].tolist())

    @torch.no_grad()
    def keep(self, slots: Sequence[int]) -> "Sparo":
        """Return the model with these slots in both towers, its code normalized over them.

        `slots` are positions among this model's slots, in any order.
        Raises: SaccadeError if there are none, one is out of range or repeated, or a baseline
            has no slots.
        """
        config = self.config
        total = len(config.kept_slots)
        chosen = sorted(set(slots))
        fits = chosen and len(chosen) == len(slots) and 0 <= chosen[0] <= chosen[-1] < total
        if config.pooling != "sparo" or not fits:
            raise SaccadeError(
                f"slots {list(slots)[:8]}: expected distinct numbers from 0 to {total - 1} "
                f"for a model with pooling 'sparo' (found '{config.pooling}'). Choose others."
            )
        kept = tuple(config.kept_slots[slot] for slot in chosen)
        smaller = Sparo(replace(config, kept=kept), fresh=False).to(self.slot_order.device)
        smaller = smaller.to(next(self.parameters()).dtype)
        smaller.load_state_dict(self._state_of(chosen))
        return smaller.train(self.training)

    def _state_of(self, chosen: list[int]) -> dict[str, Tensor]:
        state = {name: value.clone() for name, value in self.state_dict().items()}
        for tower in ("image", "text"):
            prefix = f"{tower}_pool.read_out."
            own_state = {
                k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)
            }
            if own_state:
                cut = selected(own_state, self.config.read_out(tower), chosen)
                state |= {prefix + name: value for name, value in cut.items()}
        place = {slot: position for position, slot in enumerate(chosen)}
        order = [place[slot] for slot in self.slot_order.tolist() if slot in place]
        state["slot_order"] = torch.tensor(order, device=self.slot_order.device)
        if self.config.masked:
            state["slot_mask"] = state["slot_mask"][torch.tensor(chosen)]
        return state

    def runtime_metadata(self) -> dict[str, Any]:
        """Return the metadata needed to encode texts and to compare codes."""
        config = self.config
        slots = list(config.kept_slots) if config.pooling == "sparo" else []
        metadata: dict[str, Any] = {"slots": slots, "slots_sha256": slots_sha256(slots)}
        if config.text:
            metadata |= {
                "logit_scale": float(self.logit_scale.detach().double().exp()),
                "context_length": config.context_length,
                "tokenizer": config.tokenizer,
                "vocabulary": config.vocabulary,
                "words": list(config.words),
                "merges": list(config.merges),
            }
        return metadata


def _blocks(tower: nn.Module, place: str) -> tuple[tuple[str, ...], ...]:
    """Return the parts of each block of a tower called `place`."""
    if isinstance(tower, StagedTower):
        return block_layers(tower.trunk, f"{place}.trunk")
    count = len(list(tower.get_submodule("blocks").children()))
    return tuple((f"{place}.blocks.{index}",) for index in range(count))


def slots_sha256(slots: Sequence[int]) -> str:
    """Return the hash that two variants must share for their codes to be comparable.

    It is the SHA-256 of the ascending slot numbers as a JSON list.
    """
    return hashlib.sha256(json.dumps(sorted(slots), separators=(",", ":")).encode()).hexdigest()
