# SPDX-License-Identifier: Apache-2.0
"""The circuit executor's read-out: from the modules' last states to logits."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.nac.config import NACConfig
from saccade.models.nac.layers import mod_fc, mod_ffn, modulation_of, norm_where, optional_norm
from saccade.models.nac.modulation import ModFC, linear
from saccade.models.nac.noise import noised
from saccade.models.nac.skmdpa import in_float32, skmdpa


class ReadOut(nn.Module):
    """Read-out modules attend to the processor's final states; confidences weight their sum.

    Queries use the read-out module's code, keys and values the processor module's.

    Shapes: initial [r d], code [r c], theta [b u d], processor_code [u c] or [b u c],
            bias [r u] or [b r u] -> [b r d]; `pool` reduces it to [b d].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        width = config.read_width
        self.heads, self.residual = config.read_heads, config.read_out_residual
        self.norm_query = norm_where(config.read_out_query_norm, config.dim)
        self.query = mod_fc(config, config.dim, width)
        self.key = mod_fc(config, config.dim, width)
        self.value = mod_fc(config, config.dim, width)
        self.output = mod_fc(config, width, config.dim)
        self.norm_states = optional_norm(config)
        self.norm = optional_norm(config)
        self.ffn = mod_ffn(config)
        self.pool = ConfidencePool(config)
        self.code_noise = config.code_noise

    def forward(
        self,
        initial: Tensor,
        code: Tensor,
        theta: Tensor,
        processor_code: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        code = noised(code, self.code_noise, training=self.training)
        processor_code = noised(processor_code, self.code_noise, training=self.training)
        x = self.norm_states(theta)
        q = self.asked(initial, code).expand(x.shape[0], -1, -1)
        k, v = self.key(x, processor_code), self.value(x, processor_code)
        y = self.output(skmdpa(q, k, v, bias, heads=self.heads), code)
        y = y + initial if self.residual else y
        return y + self.ffn(self.norm(y), code)

    def asked(self, initial: Tensor, code: Tensor) -> Tensor:
        """Return the read-out modules' queries.

        Shapes: initial [r d], code [r c] -> [r w], the heads side by side.
        """
        return self.query(self.norm_query(initial), code)


class ConfidencePool(nn.Module):
    """The sum of read-out states, weighted by the softmax of one learned scalar each.

    The scalar is linear in the state, or (confidence="module") a constant. With
    confidence="first" there is no scalar: the first read-out module's state is the answer.

    Shapes: states [b r d] -> [b d].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.of_state = config.confidence == "state"
        self.first = config.confidence == "first"
        if self.of_state:
            self.score = linear(config.dim, 1)
        elif not self.first:
            self.scores = nn.Parameter(torch.zeros(config.readout_modules))

    def forward(self, states: Tensor) -> Tensor:
        if self.first:
            return states[:, 0]
        if self.of_state:
            scores = self.score(states).squeeze(-1)
        else:
            scores = self.scores.expand(states.shape[:2])
        weights = in_float32(torch.softmax)(scores, -1)
        return (weights.unsqueeze(1) @ states).squeeze(1)


class ModulatedHead(ModFC):
    """The last layer, modulated by the code of the read-out module whose state it reads."""

    @property
    def weight(self) -> Tensor:
        """The weight, as in a linear layer."""
        return self.linear.weight


def last_layer(config: NACConfig) -> nn.Module:
    """Create the layer from a state to logits."""
    if config.head == "linear":
        return linear(config.dim, config.classes)
    return ModulatedHead(config.dim, config.classes, modulation_of(config))


def head_outputs(head: Callable[[Tensor], Tensor], state: Tensor) -> dict[str, Tensor]:
    """Return logits, probabilities and embedding of the confidence-weighted state.

    Shapes: state [b d] -> logits and probabilities [b classes], embedding [b d].
    """
    logits = head(state)
    return {
        "logits": logits,
        "probabilities": logits.softmax(-1),
        "embedding": F.normalize(state, dim=-1),
    }
