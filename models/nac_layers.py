# SPDX-License-Identifier: Apache-2.0
"""The circuit executor's three layers: read-in, propagator, read-out."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.autocast import in_float32
from saccade.models.modulation import ModFC, ModFFN, linear
from saccade.models.nac_config import NACConfig
from saccade.models.skmdpa import skmdpa


def mod_fc(config: NACConfig, inputs: int, outputs: int, *, scale: float = 1.0) -> ModFC:
    """A ModFC with the configured code, alpha and switch."""
    return ModFC(
        inputs,
        outputs,
        config.code_dim,
        alpha=config.alpha,
        modulation=config.modulation,
        scale=scale,
    )


def mod_ffn(config: NACConfig, *, scale: float = 1.0) -> ModFFN:
    """A ModFFN with the configured width, activation, code, alpha and switch."""
    return ModFFN(
        config.dim,
        config.ffn_dim,
        config.code_dim,
        activation=config.activation,
        alpha=config.alpha,
        modulation=config.modulation,
        scale=scale,
    )


def optional_norm(config: NACConfig) -> nn.Module:
    """LayerNorm where the configuration has one in read-in and read-out."""
    return nn.LayerNorm(config.dim) if config.read_norm else nn.Identity()


def length_mask(length: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Which tokens take part; of a pair of inputs, each half has a length of its own.

    Shapes: length [b] or [b 2], tokens [b n d] -> bool [b 1 n].
    """
    if length is None:
        return None
    sets = length.shape[1] if length.dim() == 2 else 1
    position = torch.arange(tokens.shape[1] // sets, device=tokens.device)
    if sets == 1:
        return position < length.reshape(-1, 1, 1)
    return (position < length.unsqueeze(-1)).flatten(1).unsqueeze(1)


def without_padding(tokens: Tensor, length: Tensor | None) -> Tensor:
    """Zeros beyond the length, where anything may stand: 0 times a NaN would still be NaN.

    Shapes: tokens [b n d], length [b] or [b 2] -> [b n d].
    """
    mask = length_mask(length, tokens)
    return tokens if mask is None else tokens.masked_fill(~mask.mT, 0.0)


class ReadIn(nn.Module):
    """Each module looks at the tokens through its own keys and values, then a residual ModFFN.

    In evaluation this is eq. 4 and 5 as written, with the softmax that eq. 5 leaves out. In
    training the same function is computed without the keys and values of every module and token:
    the gain moves to the query (q . W(x * m) = (W^T q * m) . x, and q . b is constant over the
    tokens), and values are projected after pooling, because the weights sum to 1. `direct` forces
    one of the two.

    Shapes: theta [u d] or [b u d], tokens [b n d], code [u c] or [b u c], length [b] of at least 1
            -> [b u d].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.direct: bool | None = None
        self.query = mod_fc(config, config.dim, config.dim)
        self.key = mod_fc(config, config.dim, config.dim)
        self.value = mod_fc(config, config.dim, config.dim)
        self.output = mod_fc(config, config.dim, config.dim)
        self.norm = optional_norm(config)
        self.ffn = mod_ffn(config)

    def forward(
        self, theta: Tensor, tokens: Tensor, code: Tensor, length: Tensor | None = None
    ) -> Tensor:
        y = self.attend(theta, tokens, code, length)
        return y + self.ffn(self.norm(y), code)

    def attend(
        self, theta: Tensor, tokens: Tensor, code: Tensor, length: Tensor | None = None
    ) -> Tensor:
        """The attention without the ModFFN that follows.

        Shapes: as forward.
        """
        mask = length_mask(length, tokens)
        direct = not self.training if self.direct is None else self.direct
        attend = self._attend if direct else self._attend_reassociated
        return self.output(attend(self.query(theta, code), tokens, code, mask), code)

    def _attend(self, q: Tensor, tokens: Tensor, code: Tensor, mask: Tensor | None) -> Tensor:
        k = self.key(tokens.unsqueeze(1), code.unsqueeze(-2))  # [b u n d]
        v = self.value(tokens.unsqueeze(1), code.unsqueeze(-2))
        scores = (k @ (q / math.sqrt(q.shape[-1])).unsqueeze(-1)).squeeze(-1)
        weights = masked_softmax(scores, mask)
        return (weights.unsqueeze(-2) @ v).squeeze(-2)

    def _attend_reassociated(
        self, q: Tensor, tokens: Tensor, code: Tensor, mask: Tensor | None
    ) -> Tensor:
        return self.value(self._weights(q, tokens, code, mask) @ tokens, code)

    def weights(
        self, theta: Tensor, tokens: Tensor, code: Tensor, length: Tensor | None = None
    ) -> Tensor:
        """How much of each token each module takes; the rows sum to 1.

        Shapes: as forward -> [b u n].
        """
        mask = length_mask(length, tokens)
        return self._weights(self.query(theta, code), tokens, code, mask)

    def _weights(self, q: Tensor, tokens: Tensor, code: Tensor, mask: Tensor | None) -> Tensor:
        probe = (q @ self.key.linear.weight) * self.key.gain(code) / math.sqrt(q.shape[-1])
        return masked_softmax(probe @ tokens.mT, mask)


@in_float32
def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the tokens that take part; a sample without any is NaN.

    Shapes: scores [b ... u n], mask bool [b ... 1 n] -> [b ... u n].
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1)


class Propagator(nn.Module):
    """One round of messages between modules, then one of computation; both pre-LN, residual.

    Shapes: theta [b u d], code [u c] or [b u c], bias [u u] or [b u u] -> [b u d].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        scale = 1 / math.sqrt(2 * max(1, config.propagator_layers))  # the residual sum stays O(1)
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.dim)
        self.query = mod_fc(config, config.dim, config.dim)
        self.key = mod_fc(config, config.dim, config.dim)
        self.value = mod_fc(config, config.dim, config.dim)
        self.output = mod_fc(config, config.dim, config.dim, scale=scale)
        self.norm_ffn = nn.LayerNorm(config.dim)
        self.ffn = mod_ffn(config, scale=scale)

    def forward(self, theta: Tensor, code: Tensor, bias: Tensor | None) -> Tensor:
        x = self.norm_attention(theta)
        q, k, v = (layer(x, code) for layer in (self.query, self.key, self.value))
        theta = theta + self.output(skmdpa(q, k, v, bias, heads=self.heads), code)
        return theta + self.ffn(self.norm_ffn(theta), code)


class ReadOut(nn.Module):
    """Read-out modules poll the processor's final states; their confidences weight the sum.

    Queries take the read-out module's code, keys and values the processor module's.

    Shapes: initial [r d], code [r c], theta [b u d], processor_code [u c] or [b u c],
            bias [r u] or [b r u] -> [b d], the confidence-weighted state.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.query = mod_fc(config, config.dim, config.dim)
        self.key = mod_fc(config, config.dim, config.dim)
        self.value = mod_fc(config, config.dim, config.dim)
        self.output = mod_fc(config, config.dim, config.dim)
        self.norm_states = optional_norm(config)
        self.norm = optional_norm(config)
        self.ffn = mod_ffn(config)
        self.pool = ConfidencePool(config)

    def forward(
        self,
        initial: Tensor,
        code: Tensor,
        theta: Tensor,
        processor_code: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        x = self.norm_states(theta)
        q = self.query(initial, code).expand(x.shape[0], -1, -1)
        k, v = self.key(x, processor_code), self.value(x, processor_code)
        y = self.output(skmdpa(q, k, v, bias), code)
        return self.pool(y + self.ffn(self.norm(y), code))


class ConfidencePool(nn.Module):
    """The read-out states' sum, weighted by the softmax of one learned scalar each.

    The scalar is linear in the state, or (configuration: confidence="module") a constant.

    Shapes: states [b r d] -> [b d].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.of_state = config.confidence == "state"
        if self.of_state:
            self.score = linear(config.dim, 1)
        else:
            self.scores = nn.Parameter(torch.zeros(config.readout_modules))

    def forward(self, states: Tensor) -> Tensor:
        if self.of_state:
            scores = self.score(states).squeeze(-1)
        else:
            scores = self.scores.expand(states.shape[:2])
        weights = in_float32(torch.softmax)(scores, -1)
        return (weights.unsqueeze(1) @ states).squeeze(1)


def head_outputs(head: nn.Module, state: Tensor) -> dict[str, Tensor]:
    """Logits, probabilities and embedding of the confidence-weighted state.

    Shapes: state [b d] -> logits and probabilities [b classes], embedding [b d].
    """
    logits = head(state)
    return {
        "logits": logits,
        "probabilities": logits.softmax(-1),
        "embedding": F.normalize(state, dim=-1),
    }
