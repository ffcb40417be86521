# SPDX-License-Identifier: Apache-2.0
"""The classification head of SoT: class token and pooled word tokens, fused in six ways."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade.models.sot.config import SoTConfig
from saccade.models.sot.pooling import Pooled, pooling, unit


class Answer(NamedTuple):
    """What the head makes of a sample's tokens.

    Shapes: logits of the class token and of the word tokens [b classes], where the fusion has
            them; state [b s] in front of the last linear layers; pooled as `Pooled`.
    """

    class_logits: Tensor | None
    word_logits: Tensor | None
    state: Tensor
    pooled: Pooled | None


class Head(nn.Module):
    """Sum, concat, aggr-all and late fusion, or one of the two kinds of tokens alone.

    Two class tokens (DeiT's second is the distillation token) go side by side into one linear
    layer: the mean of two classifiers is one.
    Shapes: class tokens [b k d] (none where the trunk has no such token), words [b n d], kept
            [b n] bool says which words count.
    Source: Xie et al. 2021, eq. 1, and table 3 for the projected class token.
    """

    def __init__(self, config: SoTConfig) -> None:
        super().__init__()
        self.config = config
        fusion, width = config.fusion, config.width * (2 if config.distillation else 1)
        self.pool = None if fusion == "class" else pooling(config)
        self.class_projection = None
        if config.class_projection:
            self.class_projection = nn.Linear(width, config.class_projection)
            width = config.class_projection
        separate = fusion in ("sum", "late", "class")
        self.class_fc = nn.Linear(width, config.classes) if separate else None
        self.word_fc = None
        if self.pool is not None:
            beside = width if fusion == "concat" else 0
            self.word_fc = nn.Linear(beside + self.pool.width, config.classes)

    def forward(
        self, class_tokens: Tensor | None, words: Tensor, kept: Tensor | None = None
    ) -> Answer:
        fusion = self.config.fusion
        if fusion == "aggr-all" and class_tokens is not None:
            words = torch.cat((class_tokens, words), 1)
            if kept is not None:
                kept = torch.cat((kept.new_ones(kept.shape[0], class_tokens.shape[1]), kept), 1)
        pooled = None if self.pool is None else self.pool(words, kept)
        states = []
        if class_tokens is not None and fusion not in ("visual", "aggr-all"):
            states.append(self._class_state(class_tokens))
        if pooled is not None:
            states.append(pooled.vector)
        state = torch.cat(states, -1)
        if fusion in ("sum", "late", "class"):
            assert self.class_fc is not None
            by_words = None if pooled is None else self._words(pooled.vector)
            return Answer(self.class_fc(states[0]), by_words, state, pooled)
        return Answer(None, self._words(state), state, pooled)

    def _words(self, vector: Tensor) -> Tensor:
        assert self.word_fc is not None
        return self.word_fc(vector)

    def _class_state(self, class_tokens: Tensor) -> Tensor:
        state = class_tokens.flatten(1)
        if self.class_projection is not None:
            state = self.class_projection(state)
            if self.config.class_activation == "tanh":
                state = state.tanh()
        return state


def head_outputs(answer: Answer, fusion: str) -> dict[str, Tensor]:
    """The named outputs; with late fusion logits are the logarithm of the probabilities.

    Shapes: -> logits, probabilities [b classes], embedding [b s] of length 1; with
            cross-covariances also covariance and pooled [b heads m n].
    """
    given = [each for each in (answer.class_logits, answer.word_logits) if each is not None]
    if fusion == "late" and len(given) == 2:
        probabilities = (given[0].softmax(-1) + given[1].softmax(-1)) / 2
        halves = torch.stack([each.log_softmax(-1) for each in given])
        logits = halves.logsumexp(0) - math.log(2)
    else:
        logits = given[0] if len(given) == 1 else given[0] + given[1]
        probabilities = logits.softmax(-1)
    outputs = {
        "logits": logits,
        "probabilities": probabilities,
        "embedding": unit(answer.state),
    }
    if answer.pooled is not None and answer.pooled.covariance is not None:
        assert answer.pooled.normalized is not None
        outputs |= {"covariance": answer.pooled.covariance, "pooled": answer.pooled.normalized}
    return outputs
