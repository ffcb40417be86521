# SPDX-License-Identifier: Apache-2.0
"""A question-answering network in evaluation with its constants folded."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.image_attention import grid_attention
from saccade.models.interface import Part
from saccade.models.mcan import (
    MASKED,
    Attention,
    FeedForward,
    Norm,
    Pool,
    attention_weights,
    split_heads,
    spread_norm,
)
from saccade.models.vqa import (
    VQA,
    answered,
    check_question,
    given_boxes,
    given_rows,
    grid_places,
)
from saccade.models.vqa_parts import vqa_part

_LARGEST_TABLE = 2**22  # numbers in a table of the words' gates


class FoldedVQA(nn.Module):
    """What `VQA.fold` returns: `details` and `parts` of a VQA, evaluation only.

    Constants: the gates that each word opens in the LSTM, the share of the position in the first
    layer of the cells, and the scale of the queries. A bias of the keys adds the same to every
    score of a row and cancels; one of the values passes the weights, which sum to 1, and joins
    the bias behind. The last normalisation of a decoder, of the encoder and of the head hands
    its gain and bias to the layers that read it. What has the same input is one product: queries,
    keys and values; the keys and values of all layers that look at the question.

    Source: equal to the unfolded model up to rounding; Martins et al. 2020, section 3.2.
    """

    @torch.no_grad()
    def __init__(self, source: VQA) -> None:
        super().__init__()
        self.config = source.config
        self.words = _Words(source)
        self.encoder = nn.ModuleList(_EncoderLayer(each) for each in source.encoder)
        last: Norm = source.encoder[-1].norm_feed  # type: ignore[assignment]
        _strip(self.encoder[-1].norm_feed)
        self.question_pool = _Pool(source.question_pool, last)
        bias = source.question_pool.merge.bias + _shifted(source.question_pool, last)
        if self.config.has_grid:
            if self.config.features == "image":
                self.cells = source.cells
                position = source.grid_linear(source.cells.position)
                self.register_buffer("position", position)
            self.grid = _Decoder(source.grid_linear, source.grid_decoder, source.grid_pool, last)
            bias = bias + self.grid.constant
        if self.config.has_boxes:
            self.boxes = _Decoder(source.box_linear, source.box_decoder, source.box_pool, last)
            bias = bias + self.boxes.constant
        self.bias = nn.Parameter(bias)
        self.norm = source.norm
        self.head = _after(source.head, source.norm)
        _strip(self.norm)
        self.requires_grad_(False)
        self.eval()

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits; the inputs as `VQA.details` has them.

        Shapes: -> [b answers].
        """
        return self.details(**inputs)["logits"]

    def details(self, **inputs: Tensor) -> dict[str, Tensor]:
        """What `VQA.details` answers."""
        check_question(inputs["question"], self.config)
        masked = inputs["question"] == 0
        x = self.words(inputs["question"])
        for layer in self.encoder:
            x = layer(x, masked)
        state = self.question_pool(x, self.question_pool.scores(x, masked).softmax(-1)) + self.bias
        found: dict[str, Tensor] = {}
        if self.config.has_grid:
            state = state + self._look_at_grid(inputs, x, masked, found)
        if self.config.has_boxes:
            boxes, boxes_masked = given_boxes(inputs, x.dtype)
            y = self.boxes(self.boxes.first(boxes), x, boxes_masked, masked)
            scores = self.boxes.pool.scores(y, boxes_masked)
            weights = attention_weights(scores, self.config.box_attention)
            found["box_attention" if self.config.has_grid else "attention"] = weights
            state = state + self.boxes.pool(y, weights)
        return answered(self.head(self.norm(state)), found, self.config)

    def _look_at_grid(
        self,
        inputs: dict[str, Tensor],
        question: Tensor,
        question_masked: Tensor,
        found: dict[str, Tensor],
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
        weights, found["attention"], error = grid_attention(scores, places, self.config)
        if error is not None:
            found["tv_error"] = error
        return self.grid.pool(y, weights)

    def parts(self) -> tuple[Part, ...]:
        """The part of the unfolded model, by this one."""
        return (vqa_part(self),)


class _Words(nn.Module):
    """The question's words through the LSTM; the gates of a word are a constant each."""

    def __init__(self, source: VQA) -> None:
        super().__init__()
        lstm, embedding = source.lstm, source.embedding.weight
        bias = lstm.bias_ih_l0 + lstm.bias_hh_l0
        self.recurrent = nn.Parameter(lstm.weight_hh_l0)
        self.project = nn.Identity()
        if len(embedding) * len(bias) <= _LARGEST_TABLE:
            self.table = nn.Parameter(F.linear(embedding, lstm.weight_ih_l0, bias))
        else:
            self.table = nn.Parameter(embedding)
            self.project = _linear(lstm.weight_ih_l0, bias)

    def forward(self, question: Tensor) -> Tensor:
        gates = self.project(F.embedding(question, self.table))
        hidden = gates.new_zeros(gates.shape[0], self.recurrent.shape[1])
        cell, found = hidden, []
        for step in gates.unbind(1):
            opened = step + F.linear(hidden, self.recurrent)
            keep_in, keep, new, out = opened.chunk(4, -1)
            cell = keep.sigmoid() * cell + keep_in.sigmoid() * new.tanh()
            hidden = out.sigmoid() * cell.tanh()
            found.append(hidden)
        return torch.stack(found, 1)


class _SelfAttention(nn.Module):
    """Queries, keys and values in one product.

    Shapes: x [b n d], masked [b n] -> [b n d].
    """

    def __init__(self, source: Attention) -> None:
        super().__init__()
        self.heads, self.kind = source.heads, source.kind
        scale = 1 / math.sqrt(source.queries.out_features // source.heads)
        weight = [scale * source.queries.weight, source.keys.weight, source.values.weight]
        none = torch.zeros_like(source.keys.bias)
        self.project = _linear(
            torch.cat(weight), torch.cat([scale * source.queries.bias, none, none])
        )
        self.out = _linear(source.out.weight, source.out(source.values.bias))

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        queries, keys, values = self.project(x).chunk(3, -1)
        return self.out(_attend(queries, keys, values, masked, self.heads, self.kind))


class _EncoderLayer(nn.Module):
    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.attention = _SelfAttention(source.attention)  # type: ignore[arg-type]
        self.feed, self.norm_attention = source.feed, source.norm_attention
        self.norm_feed = source.norm_feed

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        x = self.norm_attention(x + self.attention(x, masked))
        return self.norm_feed(x + self.feed(x))


class _DecoderLayer(_EncoderLayer):
    """`last` is the encoder's last normalisation, whose gain and bias end here."""

    def __init__(self, source: nn.Module, last: Norm) -> None:
        super().__init__(source)
        guided: Attention = source.guided  # type: ignore[assignment]
        self.heads, self.norm_guided = guided.heads, source.norm_guided
        scale = 1 / math.sqrt(guided.queries.out_features // guided.heads)
        self.queries = _linear(scale * guided.queries.weight, scale * guided.queries.bias)
        self.out = _linear(guided.out.weight, guided.out(guided.values(last.bias)))

    def look(
        self, x: Tensor, keys: Tensor, values: Tensor, masked: Tensor, question_masked: Tensor
    ) -> Tensor:
        x = self.norm_attention(x + self.attention(x, masked))
        seen = _attend(self.queries(x), keys, values, question_masked, self.heads, "softmax")
        x = self.norm_guided(x + self.out(seen))
        return self.norm_feed(x + self.feed(x))


class _Decoder(nn.Module):
    """Layers of a decoder with its pooling; what they read of the question is one product."""

    def __init__(
        self, first: nn.Linear, layers: nn.ModuleList, pool: Pool, last_of_question: Norm
    ) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(_DecoderLayer(each, last_of_question) for each in layers)
        read = [part.weight for each in layers for part in (each.guided.keys, each.guided.values)]
        self.read = nn.Linear(1, 1, bias=False)
        self.read.weight = nn.Parameter(torch.cat(read) * last_of_question.weight)
        last: Norm = layers[-1].norm_feed  # type: ignore[assignment]
        self.pool = _Pool(pool, last)
        self.constant = pool.merge.bias + _shifted(pool, last)
        _strip(self.layers[-1].norm_feed)

    def forward(
        self, x: Tensor, question: Tensor, masked: Tensor, question_masked: Tensor
    ) -> Tensor:
        read = self.read(question).chunk(2 * len(self.layers), -1)
        for index, layer in enumerate(self.layers):
            keys, values = read[2 * index : 2 * index + 2]
            x = layer.look(x, keys, values, masked, question_masked)
        return x


class _Pool(nn.Module):
    """Scores and pooling of states whose normalisation ends here; its bias is the caller's."""

    def __init__(self, source: Pool, last: Norm) -> None:
        super().__init__()
        widen = _after(source.score.widen, last)
        self.score = FeedForward(1, 1, 1, 0.0)
        self.score.widen = widen
        # One number for all places changes neither softmax nor sparsemax nor TVMAX.
        self.score.narrow = nn.Linear(1, 1, bias=False)
        self.score.narrow.weight = source.score.narrow.weight
        self.merge = nn.Linear(1, 1, bias=False)
        self.merge.weight = nn.Parameter(source.merge.weight * last.weight)

    def scores(self, x: Tensor, masked: Tensor) -> Tensor:
        return self.score(x).squeeze(-1).masked_fill(masked, MASKED)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.merge((weights[:, None] @ x).squeeze(1))


class _Bare(nn.Module):
    """A normalisation whose gain and bias are somewhere else."""
