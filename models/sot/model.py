# SPDX-License-Identifier: Apache-2.0
"""Second-order transformers: a trunk, and a head that reads class token and word tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.core.errors import ShapeError
from saccade.models.budget import ComputeBudget
from saccade.models.interface import Family
from saccade.models.layers.swin import SwinBlock
from saccade.models.layers.transformer import Block
from saccade.models.layers.trunk import block_layers, trunk_of
from saccade.models.layers.vit import Tokens
from saccade.models.resolution import resized
from saccade.models.shapes_only import Undrawn
from saccade.models.sot.components import SoTFunction
from saccade.models.sot.config import Normalization
from saccade.models.sot.config import SoTConfig as SoTConfig
from saccade.models.sot.head import Head
from saccade.models.sot.tokens import token_embedding

INIT_STD = 0.02


class States(nn.Module):
    """The trunk of a text classifier, whose inputs are states of BERT or GPT.

    Shapes: tokens [b n d], length [b] of at least 1 -> `Tokens`, and the valid words [b n].
    """

    def __init__(self, config: SoTConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, tokens: Tensor, length: Tensor) -> tuple[Tokens, Tensor]:
        config = self.config
        if tuple(tokens.shape[1:]) != (config.max_tokens, config.dim):
            raise ShapeError(
                f"tokens: found shape {list(tokens.shape)}, expected "
                f"[b, {config.max_tokens}, {config.dim}]. Pad texts to that many tokens."
            )
        place = torch.arange(config.max_tokens, device=tokens.device)
        inside = place < length[:, None]
        at = length[:, None] - 1 if config.class_token == "last" else length[:, None] * 0
        special = place == at
        # Values beyond the length may be anything, even NaN.
        tokens = torch.where(inside[..., None], tokens, 0)
        chosen = torch.where(special[..., None], tokens, 0).sum(1, keepdim=True)
        return Tokens(chosen, tokens, None), inside & ~special


class SoT(SoTFunction, Family):
    """A trunk of images, or the states of a text, with the second-order head.

    Source: Xie et al. 2021, SoT: Delving Deeper into Classification Head for Transformer.
    """

    config_class = SoTConfig
    repeated_blocks = (Block, SwinBlock)

    def __init__(self, config: SoTConfig, *, fresh: bool = True) -> None:
        """Draw the weights from config.seed; if `fresh` is false, they will be loaded."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.trunk: nn.Module = _trunk(config)
            self.head = Head(config)
            if fresh:
                self.apply(_draw)

    def loss(
        self,
        x: Tensor,
        labels: Tensor,
        length: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the cross entropy; with late fusion, the sum of both classifiers'.

        Shapes: labels [b] int64, or targets [b classes] that sum to 1 -> scalar.
        """
        crossed = partial(F.cross_entropy, target=labels, label_smoothing=label_smoothing)
        answer = self.answer(x, length)
        parts = [
            logits for logits in (answer.class_logits, answer.word_logits) if logits is not None
        ]
        if self.config.fusion == "late":
            return torch.stack([crossed(logits) for logits in parts]).sum()
        return crossed(torch.stack(parts).sum(0))

    def parameter_layers(self) -> tuple[tuple[str, ...], ...]:
        """Return the trunk before its blocks, each block, and what follows them."""
        blocks = block_layers(self.trunk, "trunk")
        return (("trunk",), *blocks, ("trunk.norm", "head")) if blocks else ()

    def at(self, budget: ComputeBudget) -> "SoT":
        """Return the model with that head or for that size of images; both share their weights."""
        if budget.part is not None:
            return resized(self, budget.kept).at(budget.part)
        config = self.config
        if budget.label == "class":
            config = replace(config, fusion="class", svpn_ridge=0.0)
        elif budget.label != config.own_head:
            exact = budget.label == "exact"
            name: Normalization = "svpn" if exact else "svpn-fast"
            config = replace(config, normalization=name, learned_start=False, svpn_ridge=0.0)
        with Undrawn():
            other = SoT(config, fresh=False)
        weights = self.state_dict()
        shared = {name: weights[name] for name in other.state_dict()}
        other.load_state_dict(shared, assign=True)
        return other.to(next(self.parameters())).train(self.training)

    def runtime_metadata(self) -> dict[str, Any]:
        """Return the runtime metadata: the kind of head and, for texts, the layout of states."""
        config = self.config
        metadata: dict[str, Any] = {"fusion": config.fusion, "pooling": config.pooling}
        if config.input == "tokens":
            metadata |= {"class_token": config.class_token, "max_tokens": config.max_tokens}
        return metadata


def _trunk(config: SoTConfig) -> nn.Module:
    if config.input == "tokens":
        return States(config)
    embed = token_embedding(config) if config.shape.is_vit else None
    return trunk_of(config.shape, embed)


def _draw(module: nn.Module) -> None:
    """Initialize a transformer's linear layers: small weights, zero bias."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
