# SPDX-License-Identifier: Apache-2.0
"""A question-answering network in evaluation with folded constants."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.interface import Component
from saccade.models.vqa.components import vqa_component
from saccade.models.vqa.image_attention import grid_attention
from saccade.models.vqa.mcan import (
    MASKED,
    Attention,
    DecoderLayer,
    EncoderLayer,
    Norm,
    Pool,
    attend,
    attention_weights,
    spread_norm,
)
from saccade.models.vqa.model import (
    VQA,
    PlacedCells,
    answered,
    check_question,
    given_boxes,
    given_rows,
    grid_places,
)


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

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
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


class FoldedVQA(nn.Module):
    """The result of `VQA.fold`: `details` and `components` of a VQA, for evaluation only.

    The batch norms of a ResNet are folded into its convolutions. Constants are the positions' share
    in the first layer of the cells, and the scale of the queries. The LSTM stays as it is: one
    runtime node is faster than steps over a table of the gates per word. A bias of the keys adds
    the same to every score of a row and cancels. A bias of the values passes through the weights,
    which sum to 1, and joins the next bias. The last norm of a decoder, of the encoder and of the
    head passes its gain and bias to the layers that read it. Layers with the same input become one
    product: queries, keys and values; the keys and values of all layers that look at the question.

    Source: equal to the unfolded model up to rounding; Martins et al. 2020, section 3.2.
    """

    position: Tensor

    @torch.no_grad()
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
                cells = source.cells
                self.cells = cells.folded() if isinstance(cells, PlacedCells) else cells
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
        self.requires_grad_(False)
        self.eval()

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the logits; inputs as in `VQA.details`.

        Shapes: -> [b answers].
        """
        return self.details(**inputs)["logits"]

    def details(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Do the same as `VQA.details`."""
        check_question(inputs["question"], self.config)
        masked = inputs["question"] == 0
        x = self.lstm(self.embedding(inputs["question"]))[0]
        for layer in self.encoder:
            x = layer(x, masked)
        state = self.question_pool(x, self.question_pool.scores(x, masked).softmax(-1)) + self.bias
        details: dict[str, Tensor] = {}
        if self.config.has_grid:
            state = state + self._look_at_grid(inputs, x, masked, details)
        if self.config.has_boxes:
            boxes, boxes_masked = given_boxes(inputs, x.dtype)
            y = self.boxes(self.boxes.first(boxes), x, boxes_masked, masked)
            scores = self.boxes.pool.scores(y, boxes_masked)
            weights = attention_weights(scores, self.config.box_attention)
            details["box_attention" if self.config.has_grid else "attention"] = weights
            state = state + self.boxes.pool(y, weights)
        return answered(self.head(self.norm(state)), details, self.config)

    def _look_at_grid(
        self,
        inputs: dict[str, Tensor],
        question: Tensor,
        question_masked: Tensor,
        details: dict[str, Tensor],
    ) -> Tensor:
        places = grid_places(inputs, self.config)
        if self.config.features == "image":
            content = self.cells.content(inputs["image"])
            y = F.linear(content, self.grid.first.weight) + self.position
            masked = torch.zeros_like(content[..., 0], dtype=torch.bool)
        else:
            rows, masked = given_rows(inputs["features"], places, question.dtype)
            y = self.grid.first(rows)
        y = self.grid(y, question, masked, question_masked)
        scores = self.grid.pool.scores(y, masked)
        weights, details["attention"], excess = grid_attention(scores, places, self.config)
        if excess is not None:
            details["attention_excess"] = excess
        return self.grid.pool(y, weights)

    def components(self) -> tuple[Component, ...]:
        """Return the component of the unfolded model, computed by this one."""
        return (vqa_component(self),)
