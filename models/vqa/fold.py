# SPDX-License-Identifier: Apache-2.0
"""A question-answering network in evaluation with folded constants."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.layers.trunk import fold_trunks
from saccade.models.vqa.components import Inputs, VQAFunction, given_rows
from saccade.models.vqa.image_attention import GridPlaces
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
from saccade.models.vqa.model import VQA


class FoldedSelfAttention(nn.Module):
    """Self-attention with queries, keys and values in one product.

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
    """An encoder layer in evaluation; its only reader may absorb the gain of its last norm.

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
    """A decoder layer that absorbs the gain and bias of `last`, the encoder's last norm.

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
        """Apply the layer to the keys and values that it reads from the question."""
        x = self.norm_attention(x + self.attention(x, masked))
        attended = attend(self.queries(x), keys, values, question_masked, self.heads, "softmax")
        x = self.norm_guided(x + self.out(attended))
        return self.norm_feed(x + self.feed(x))


class FoldedMCANDecoder(nn.Module):
    """The layers of a decoder with its pooling; one product computes all reads of the question.

    `constant` is what its pooling always adds to the answer's state.
    Shapes: x [b n d], question [b t d], masked [b n], question_masked [b t] -> [b n d].
    """

    def __init__(
        self, first: nn.Linear, layers: nn.ModuleList, pool: Pool, last_of_question: Norm
    ) -> None:
        super().__init__()
        self.first = first
        sources = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        folded = [FoldedDecoderLayer(layer, last_of_question) for layer in sources]
        read = [
            part.weight for layer in sources for part in (layer.guided.keys, layer.guided.values)
        ]
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
    """Scores and pooling that absorb the norm of their states; the caller adds its bias."""

    def __init__(self, source: Pool, last: Norm) -> None:
        super().__init__()
        self.widen = after_norm(source.score.widen, last)
        self.narrow = source.score.narrow
        self.merge = folded_linear(source.merge.weight * last.weight)

    def scores(self, x: Tensor, masked: Tensor) -> Tensor:
        return self.narrow(F.relu(self.widen(x))).squeeze(-1).masked_fill(masked, MASKED)

    def merged(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.merge((weights[:, None] @ x).squeeze(1))


class BareNorm(nn.Module):
    """A normalization whose gain and bias are folded into the layers that read it.

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
    """Create a linear layer with this weight and bias.

    Shapes: weight [out in], bias [out].
    """
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def after_norm(layer: nn.Linear, norm: Norm) -> nn.Linear:
    """Fold the gain and bias of the preceding normalization into the layer."""
    return folded_linear(layer.weight * norm.weight, layer(norm.bias))


def shifted(pool: Pool, norm: Norm) -> Tensor:
    """Return the shift that the norm's bias causes after the pooling, whose weights sum to 1.

    Shapes: -> [pool_dim].
    """
    return pool.merge.weight @ norm.bias


class FoldedVQA(VQAFunction):
    """The result of `VQA.fold`: `details` and `components` of a VQA, for evaluation only.

    The batch norms of a ResNet are folded into its convolutions. Constants are the positions' share
    in the first layer of the cells, and the scale of the queries. The LSTM stays as it is: one
    runtime node is faster than steps over a table of the gates per word. A bias of the keys adds
    the same to every score of a row and cancels. A bias of the values passes through the weights,
    which sum to 1, and joins the next bias. The last norm of a decoder, of the encoder and of the
    head passes its gain and bias to the layers that read it. Layers with the same input become one
    product: queries, keys and values; the keys and values of all layers that look at the question.

    Source: equal to the unfolded model up to rounding; Martins et al. 2021, section 3.2.
    """

    position: Tensor

    def __init__(self, source: VQA) -> None:
        super().__init__()
        self.config = source.config
        self.embedding, self.lstm = source.embedding, source.lstm
        layers = [layer for layer in source.encoder if isinstance(layer, EncoderLayer)]
        folded, last = [FoldedEncoderLayer(layer) for layer in layers], layers[-1].norm_feed
        folded[-1].norm_feed = BareNorm(last)
        self.encoder = nn.ModuleList(folded)
        self.question_pool = FoldedPool(source.question_pool, last)
        bias = source.question_pool.merge.bias + shifted(source.question_pool, last)
        if self.config.has_grid:
            if self.config.features == "image":
                self.cells = source.cells
                fold_trunks(self.cells)
                position = source.grid_linear(source.cells.position)
                self.register_buffer("position", position)
            self.grid = FoldedMCANDecoder(
                source.grid_linear, source.grid_decoder, source.grid_pool, last
            )
            bias = bias + self.grid.constant
        if self.config.has_boxes:
            self.boxes = FoldedMCANDecoder(
                source.box_linear, source.box_decoder, source.box_pool, last
            )
            bias = bias + self.boxes.constant
        self.bias = nn.Parameter(bias)
        self.norm = BareNorm(source.norm)
        self.head = after_norm(source.head, source.norm)

    @property
    def grid_pool(self) -> Any:
        """The pooling of the grid's cells."""
        return self.grid.pool

    @property
    def box_pool(self) -> Any:
        """The pooling of the boxes."""
        return self.boxes.pool

    def first_state(self, question: Tensor, weights: Tensor) -> Tensor:
        """Do the same as `VQA.first_state`, and add the constants of all parts."""
        return self.question_pool.merged(question, weights) + self.bias

    def grid_states(
        self, inputs: Inputs, places: GridPlaces, question: Tensor, padding: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Do the same as `VQA.grid_states`."""
        if self.config.features == "image":
            content = self.cells.content(inputs["image"])
            y = F.linear(content, self.grid.first.weight) + self.position
            masked = torch.zeros_like(content[..., 0], dtype=torch.bool)
        else:
            rows, masked = given_rows(inputs["features"], places, question.dtype)
            y = self.grid.first(rows)
        return self.grid(y, question, masked, padding), masked

    def box_states(
        self, boxes: Tensor, masked: Tensor, question: Tensor, padding: Tensor
    ) -> Tensor:
        """Do the same as `VQA.box_states`."""
        return self.boxes(self.boxes.first(boxes), question, masked, padding)
