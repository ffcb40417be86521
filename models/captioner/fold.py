# SPDX-License-Identifier: Apache-2.0
"""A captioner in evaluation with folded constants and stacked products."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.captioner.components import (
    CaptionerFunction,
    StepOutput,
    attend,
    feature_parts,
    output_weights,
    scored,
)
from saccade.models.captioner.model import Captioner
from saccade.models.layers.resnet import ResNet


class FoldedCaptioner(CaptionerFunction):
    """The result of `Captioner.fold`: `encode` and `step` of a captioner, for evaluation only.

    Batch norms are folded into their convolutions. What the embedding of a word adds to the LSTM's
    gates is a table by token, including biases. The two keys are one product per cell. One product
    of the previous state serves the gates and the input attention, and one of the current state
    serves the output attention and the logits.

    Source: equal to the unfolded model up to rounding.
    """

    def __init__(self, source: Captioner) -> None:
        super().__init__()
        self.config = source.config
        if self.config.takes_pixels:
            self.scale, network = source.scale, source.convolutions
            self.convolutions = (
                network.folded() if isinstance(network, ResNet) else _without_norms(network)
            )
        self.feed_forward = source.feed_forward
        self.register_buffer("position", source.position if self.config.position else None)
        self.keys = _stacked(source.input_key, source.output_key)
        self.first = _stacked(source.first_h, source.first_c)
        self.input_score, self.output_score = source.input_score, source.output_score
        word, visual = source.lstm.weight_ih.split([self.config.embedding_dim, self.config.dim], 1)
        bias = source.lstm.bias_ih + source.lstm.bias_hh
        self.register_buffer("word_gates", source.embedding.weight @ word.T + bias)
        self.register_buffer("seen_gates", visual.clone())
        self.register_buffer(
            "from_previous", torch.cat([source.lstm.weight_hh, source.input_query.weight])
        )
        image, state = source.head.weight.split([self.config.dim, self.config.hidden_dim], 1)
        self.register_buffer("image_logits", image.clone())
        self.register_buffer("from_current", torch.cat([source.output_query.weight, state]))
        self.register_buffer("logits_bias", source.head.bias.clone())
        self.image_layer = source.image_layer

    position: Tensor | None
    word_gates: Tensor
    seen_gates: Tensor
    from_previous: Tensor
    image_logits: Tensor
    from_current: Tensor
    logits_bias: Tensor

    def first_state(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Do the same as `CaptionerFunction.first_state`."""
        h, c = torch.tanh(self.first(mean)).chunk(2, -1)
        return h, c

    def keys_of(self, visual: Tensor) -> tuple[Tensor, ...]:
        """Do the same as `CaptionerFunction.keys_of`."""
        return (self.keys(visual),)

    def step(self, features: Tensor, h: Tensor, c: Tensor, token: Tensor) -> StepOutput:
        """Do the same as `Captioner.step`."""
        config = self.config
        n, a = config.hidden_dim, config.attention_dim
        visual, input_key, output_key = feature_parts(features, config)
        recurrent, query = (h @ self.from_previous.T).split([4 * n, a], -1)
        score = scored(input_key, query, self.input_score)
        input_attention = score.flatten(1).softmax(-1).view_as(score)
        context = attend(input_attention, visual) @ self.seen_gates.T
        gates = recurrent + self.word_gates[token] + context
        admit, forget, cell, show = gates.chunk(4, -1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(admit) * torch.tanh(cell)
        h = torch.sigmoid(show) * torch.tanh(c)
        query, logits = (h @ self.from_current.T).split([a, config.vocabulary], -1)
        attention, error = output_weights(scored(output_key, query, self.output_score), config)
        image = torch.tanh(self.image_layer(attend(attention, visual)))
        logits = logits + F.linear(image, self.image_logits, self.logits_bias)
        return StepOutput(logits, h, c, attention, input_attention, error)


def _stacked(*layers: nn.Linear) -> nn.Linear:
    """Return one layer whose output joins that of several."""
    whole = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers))
    whole.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]))
    whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]))
    return whole


def _without_norms(layers: nn.Sequential) -> nn.Sequential:
    folded: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            folded.append(layer)
        elif isinstance(layer, nn.BatchNorm2d):
            folded[-1] = nn.utils.fuse_conv_bn_eval(folded[-1], layer)  # type: ignore[type-var]
        else:
            folded.append(layer)
    return nn.Sequential(*folded)
