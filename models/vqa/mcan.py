# SPDX-License-Identifier: Apache-2.0
"""The layers of a modular co-attention network: self-attention, guided attention, pooling."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.vqa.config import VQAConfig
from saccade.plugins.ops import sparsemax

MASKED = -1e9  # a finite score, so that a row of only padding gets equal weights


def spread_norm(x: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / (unbiased standard deviation + eps), unlike PyTorch's LayerNorm.

    Shapes: x [... d] -> the same.
    """
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().sum(-1, keepdim=True) / (x.shape[-1] - 1)).sqrt()
    return centred / (deviation + eps)


class Norm(nn.Module):
    """Layer normalization by the variance as usual, or by the spread as in the authors' code.

    Shapes: x [... d] -> the same.
    """

    def __init__(self, dim: int, kind: str, eps: float) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "variance":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return spread_norm(x, self.eps) * self.weight + self.bias


def attention_weights(scores: Tensor, kind: str) -> Tensor:
    """Return softmax or sparsemax over the last axis."""
    return sparsemax(scores) if kind == "sparsemax" else scores.softmax(-1)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    masked: Tensor,
    heads: int,
    kind: str,
    dropout: nn.Module | None = None,
) -> Tensor:
    """Attend from each query to the values with all heads; queries must be scaled already.

    Shapes: queries [b n d], keys and values [b m d], masked [b m] bool -> [b n d].
    """
    split = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (queries, keys, values)]
    scores = (split[0] @ split[1].mT).masked_fill(masked[:, None, None], MASKED)
    weights = attention_weights(scores, kind)
    if dropout is not None:
        weights = dropout(weights)
    return (weights @ split[2]).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Multi-head attention from x to `source`; masked positions of the source get no weight.

    Shapes: x [b n d], source [b m d], masked [b m] bool -> [b n d].
    """

    def __init__(self, config: VQAConfig, kind: str) -> None:
        super().__init__()
        self.heads, self.kind = config.heads, kind
        self.queries = nn.Linear(config.dim, config.dim)
        self.keys = nn.Linear(config.dim, config.dim)
        self.values = nn.Linear(config.dim, config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, source: Tensor, masked: Tensor) -> Tensor:
        queries = self.queries(x) / math.sqrt(x.shape[-1] // self.heads)
        keys, values = self.keys(source), self.values(source)
        attended = attend(queries, keys, values, masked, self.heads, self.kind, self.dropout)
        return self.out(attended)


class FeedForward(nn.Module):
    """Two layers with ReLU and dropout between them.

    Shapes: x [... d] -> [... out].
    """

    def __init__(self, dim: int, hidden: int, out: int, dropout: float) -> None:
        super().__init__()
        self.widen = nn.Linear(dim, hidden)
        self.narrow = nn.Linear(hidden, out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.dropout(F.relu(self.widen(x))))


class EncoderLayer(nn.Module):
    """An encoder layer: norm(x + self-attention), then norm(x + feed-forward).

    Shapes: x [b n d], masked [b n] -> [b n d].
    """

    def __init__(self, config: VQAConfig) -> None:
        super().__init__()
        self.attention = Attention(config, "softmax")
        self.feed = FeedForward(config.dim, config.hidden, config.dim, config.dropout)
        self.norm_attention = Norm(config.dim, config.norm, config.eps)
        self.norm_feed = Norm(config.dim, config.norm, config.eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        x = self.norm_attention(x + self.dropout(self.attention(x, x, masked)))
        return self.norm_feed(x + self.dropout(self.feed(x)))


class DecoderLayer(nn.Module):
    """An encoder layer with attention to the question between its two parts.

    Shapes: x [b n d], question [b t d], masked [b n], question_masked [b t] -> [b n d].
    """

    def __init__(self, config: VQAConfig) -> None:
        super().__init__()
        self.attention = Attention(config, config.self_attention)
        self.guided = Attention(config, "softmax")
        self.feed = FeedForward(config.dim, config.hidden, config.dim, config.dropout)
        self.norm_attention = Norm(config.dim, config.norm, config.eps)
        self.norm_guided = Norm(config.dim, config.norm, config.eps)
        self.norm_feed = Norm(config.dim, config.norm, config.eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, question: Tensor, masked: Tensor, question_masked: Tensor
    ) -> Tensor:
        x = self.norm_attention(x + self.dropout(self.attention(x, x, masked)))
        guided = self.guided(x, question, question_masked)
        x = self.norm_guided(x + self.dropout(guided))
        return self.norm_feed(x + self.dropout(self.feed(x)))


class Pool(nn.Module):
    """A score for each position, and a linear layer after pooling by weights.

    Shapes: scores: x [b n d], masked [b n] -> [b n]; merged: x, weights [b n] -> [b pool_dim].
    """

    def __init__(self, config: VQAConfig) -> None:
        super().__init__()
        self.score = FeedForward(config.dim, config.pool_hidden, 1, config.dropout)
        self.merge = nn.Linear(config.dim, config.pool_dim)

    def scores(self, x: Tensor, masked: Tensor) -> Tensor:
        """Return one number per position, -1e9 if it is masked."""
        return self.score(x).squeeze(-1).masked_fill(masked, MASKED)

    def merged(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean of the positions, projected to the answer's state."""
        return self.merge((weights[:, None] @ x).squeeze(1))
