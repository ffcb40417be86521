# SPDX-License-Identifier: Apache-2.0
"""The layers of a question-answering network with everything constant folded."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.vqa.mcan import (
    MASKED,
    Attention,
    DecoderLayer,
    EncoderLayer,
    Norm,
    Pool,
    attend,
    spread_norm,
)


class FoldedSelfAttention(nn.Module):
    """Queries, keys and values in one product.

    Shapes: x [b n d], masked [b n] -> [b n d].
    """

    def __init__(self, source: Attention) -> None:
        super().__init__()
        self.heads, self.kind = source.heads, source.kind
        scale = 1 / math.sqrt(source.queries.out_features // source.heads)
        weight = [scale * source.queries.weight, source.keys.weight, source.values.weight]
        none = torch.zeros_like(source.keys.bias)
        self.project = folded_linear(
            torch.cat(weight), torch.cat([scale * source.queries.bias, none, none])
        )
        self.out = folded_linear(source.out.weight, source.out(source.values.bias))

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        queries, keys, values = self.project(x).chunk(3, -1)
        return self.out(attend(queries, keys, values, masked, self.heads, self.kind))


class FoldedEncoderLayer(nn.Module):
    """An encoder layer in evaluation; whoever reads it alone may take over its last gain.

    Shapes: x [b n d], masked [b n] -> [b n d].
    """

    def __init__(self, source: EncoderLayer | DecoderLayer) -> None:
        super().__init__()
        self.attention = FoldedSelfAttention(source.attention)
        self.feed, self.norm_attention = source.feed, source.norm_attention
        self.norm_feed: nn.Module = source.norm_feed

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        x = self.norm_attention(x + self.attention(x, masked))
        return self.norm_feed(x + self.feed(x))


class FoldedDecoderLayer(FoldedEncoderLayer):
    """`last` is the encoder's last normalisation, whose gain and bias end here.

    Shapes: x [b n d]; keys, values [b t d]; masked [b n], question_masked [b t] -> [b n d].
    """

    def __init__(self, source: DecoderLayer, last: Norm) -> None:
        super().__init__(source)
        guided = source.guided
        self.heads, self.norm_guided = guided.heads, source.norm_guided
        scale = 1 / math.sqrt(guided.queries.out_features // guided.heads)
        self.queries = folded_linear(scale * guided.queries.weight, scale * guided.queries.bias)
        self.out = folded_linear(guided.out.weight, guided.out(guided.values(last.bias)))

    def look(
        self, x: Tensor, keys: Tensor, values: Tensor, masked: Tensor, question_masked: Tensor
    ) -> Tensor:
        """The layer, given what it reads of the question."""
        x = self.norm_attention(x + self.attention(x, masked))
        seen = attend(self.queries(x), keys, values, question_masked, self.heads, "softmax")
        x = self.norm_guided(x + self.out(seen))
        return self.norm_feed(x + self.feed(x))


class FoldedDecoder(nn.Module):
    """Layers of a decoder with its pooling; what they read of the question is one product.

    `constant` is what its pooling adds to the answer's state whatever it sees.
    Shapes: x [b n d], question [b t d], masked [b n], question_masked [b t] -> [b n d].
    """

    def __init__(
        self, first: nn.Linear, layers: nn.ModuleList, pool: Pool, last_of_question: Norm
    ) -> None:
        super().__init__()
        self.first = first
        sources = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        folded = [FoldedDecoderLayer(layer, last_of_question) for layer in sources]
        read = [part.weight for each in sources for part in (each.guided.keys, each.guided.values)]
        self.read = folded_linear(torch.cat(read) * last_of_question.weight)
        last = sources[-1].norm_feed
        folded[-1].norm_feed = BareNorm(last)
        self.layers = nn.ModuleList(folded)
        self.pool = FoldedPool(pool, last)
        self.constant = pool.merge.bias + shifted(pool, last)

    def forward(
        self, x: Tensor, question: Tensor, masked: Tensor, question_masked: Tensor
    ) -> Tensor:
        read = self.read(question).chunk(2 * len(self.layers), -1)
        for layer, keys, values in zip(self.layers, read[::2], read[1::2], strict=True):
            x = layer.look(x, keys, values, masked, question_masked)  # type: ignore[operator]
        return x


class FoldedPool(nn.Module):
    """Scores and pooling of states whose normalisation ends here; its bias is the caller's."""

    def __init__(self, source: Pool, last: Norm) -> None:
        super().__init__()
        self.widen = after_norm(source.score.widen, last)
        self.narrow = source.score.narrow
        self.merge = folded_linear(source.merge.weight * last.weight)

    def scores(self, x: Tensor, masked: Tensor) -> Tensor:
        return self.narrow(F.relu(self.widen(x))).squeeze(-1).masked_fill(masked, MASKED)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.merge((weights[:, None] @ x).squeeze(1))


class BareNorm(nn.Module):
    """A normalisation whose gain and bias stand in the layers that read it.

    Shapes: x [... d] -> the same.
    """

    def __init__(self, source: Norm) -> None:
        super().__init__()
        self.kind, self.eps = source.kind, source.eps

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "variance":
            return F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return spread_norm(x, self.eps)


def folded_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer of these numbers.

    Shapes: weight [out in], bias [out].
    """
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def after_norm(layer: nn.Linear, norm: Norm) -> nn.Linear:
    """The layer with the gain and bias of the normalisation in front of it."""
    return folded_linear(layer.weight * norm.weight, layer(norm.bias))


def shifted(pool: Pool, norm: Norm) -> Tensor:
    """What the bias of the normalisation adds behind the pooling, whose weights sum to 1.

    Shapes: -> [pool_dim].
    """
    return pool.merge.weight @ norm.bias
