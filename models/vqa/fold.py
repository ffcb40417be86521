# SPDX-License-Identifier: Apache-2.0
"""A question-answering network in evaluation with its constants folded."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.interface import Part
from saccade.models.vqa.components import vqa_part
from saccade.models.vqa.folded_layers import (
    BareNorm,
    FoldedDecoder,
    FoldedEncoderLayer,
    FoldedPool,
    after_norm,
    shifted,
)
from saccade.models.vqa.image_attention import grid_attention
from saccade.models.vqa.mcan import EncoderLayer, attention_weights
from saccade.models.vqa.model import (
    VQA,
    answered,
    check_question,
    given_boxes,
    given_rows,
    grid_places,
)


class FoldedVQA(nn.Module):
    """What `VQA.fold` returns: `details` and `parts` of a VQA, evaluation only.

    Constants: the share of the position in the first layer of the cells, and the scale of the
    queries. The LSTM stays as it is: one node of a runtime is faster than steps over a table of
    the gates that each word opens. A bias of the keys adds the same to every
    score of a row and cancels; one of the values passes the weights, which sum to 1, and joins
    the bias behind. The last normalisation of a decoder, of the encoder and of the head hands
    its gain and bias to the layers that read it. What has the same input is one product: queries,
    keys and values; the keys and values of all layers that look at the question.

    Source: equal to the unfolded model up to rounding; Martins et al. 2020, section 3.2.
    """

    position: Tensor

    @torch.no_grad()
    def __init__(self, source: VQA) -> None:
        super().__init__()
        self.config = source.config
        self.embedding, self.lstm = source.embedding, source.lstm
        layers = [each for each in source.encoder if isinstance(each, EncoderLayer)]
        folded, last = [FoldedEncoderLayer(each) for each in layers], layers[-1].norm_feed
        folded[-1].norm_feed = BareNorm(last)
        self.encoder = nn.ModuleList(folded)
        self.question_pool = FoldedPool(source.question_pool, last)
        bias = source.question_pool.merge.bias + shifted(source.question_pool, last)
        if self.config.has_grid:
            if self.config.features == "image":
                self.cells = source.cells
                position = source.grid_linear(source.cells.position)
                self.register_buffer("position", position)
            self.grid = FoldedDecoder(
                source.grid_linear, source.grid_decoder, source.grid_pool, last
            )
            bias = bias + self.grid.constant
        if self.config.has_boxes:
            self.boxes = FoldedDecoder(source.box_linear, source.box_decoder, source.box_pool, last)
            bias = bias + self.boxes.constant
        self.bias = nn.Parameter(bias)
        self.norm = BareNorm(source.norm)
        self.head = after_norm(source.head, source.norm)
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
        x = self.lstm(self.embedding(inputs["question"]))[0]
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
        weights, found["attention"], excess = grid_attention(scores, places, self.config)
        if excess is not None:
            found["attention_excess"] = excess
        return self.grid.pool(y, weights)

    def parts(self) -> tuple[Part, ...]:
        """The part of the unfolded model, by this one."""
        return (vqa_part(self),)
