# SPDX-License-Identifier: Apache-2.0
"""The text tower: token ids through a causal transformer, and where a text ends."""

import torch
from torch import Tensor, nn

from saccade.errors import ShapeError
from saccade.models.layers.transformer import Block
from saccade.models.sparo.config import SparoConfig


class TextTower(nn.Module):
    """The tokens of a text, each having seen those in front of it.

    Shapes: tokens [b context_length] int64 -> [b context_length text_width].
    Source: Radford et al. 2021 (CLIP), section 2.4.
    """

    causal: Tensor

    def __init__(self, config: SparoConfig) -> None:
        super().__init__()
        width, n = config.text_width, config.context_length
        self.end_token = config.end_token
        self.embedding = nn.Embedding(config.vocabulary, width)
        self.position = nn.Parameter(0.01 * torch.randn(n, width))
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(
                width,
                config.text_heads,
                config.text_hidden,
                activation=config.activation,
                eps=config.eps,
            )
            for _ in range(config.text_layers - config.reduce_depth)
        )
        behind = torch.full((n, n), -torch.inf).triu(1)
        self.register_buffer("causal", behind, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = self.position.shape[0]
        if tokens.dim() != 2 or tokens.shape[1] != length:
            raise ShapeError(
                f"tokens: found shape {list(tokens.shape)}, expected [b, {length}]. "
                "Encode each text to the model's whole context length."
            )
        # Not self.embedding(tokens): its node in a graph would take the output's name.
        chosen = self.embedding.weight.index_select(0, tokens.flatten())
        x = chosen.unflatten(0, (-1, length)) + self.position
        for block in self.blocks:
            x = block(x, self.causal)
        return x

    def end(self, tokens: Tensor) -> Tensor:
        """The first position of the end token; the last position where there is none.

        Shapes: tokens [b n] int64 -> [b] int64.
        """
        n = tokens.shape[1]
        if self.end_token:
            ends = tokens == self.end_token
        else:
            ends = tokens == tokens.amax(1, keepdim=True)
        places = torch.arange(n, device=tokens.device).expand_as(tokens)
        return torch.where(ends, places, n - 1).amin(1)
