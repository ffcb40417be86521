# SPDX-License-Identifier: Apache-2.0
"""The circuit executor's layers: read-in, propagator, read-out."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.layers.transformer import dropped_path
from saccade.models.nac.config import NACConfig
from saccade.models.nac.kernel import in_float32, skmdpa
from saccade.models.nac.modulation import ModFC, ModFFN, Modulation, linear, noised


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
    With confidence_noise, training draws the weights: a Gumbel softmax of temperature 1.

    Shapes: states [b r d] -> [b d].
    Source: eq. 1 of Jang et al. 2017 (Gumbel-Softmax), as in the authors' code, which also draws
            in evaluation.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.of_state = config.confidence == "state"
        self.first = config.confidence == "first"
        self.noise = config.confidence_noise
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
        softmax: Any = F.gumbel_softmax if self.noise and self.training else torch.softmax
        weights = in_float32(softmax)(scores, dim=-1)
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


class ReadIn(nn.Module):
    """Each module attends to the tokens through its own keys and values, then a residual ModFFN.

    In evaluation this is eq. 4 and 5 as written, with the softmax that eq. 5 omits. In training
    the same function is computed without keys and values per module and token: the gain moves to
    the query (q . W(x * m) = (W^T q * m) . x, and q . b is constant over the tokens), and values
    are projected after pooling, because the weights sum to 1. `direct` forces one of the two.

    Shapes: theta [u d] or [b u d], tokens [b n t], code [u c] or [b u c], length [b] of at least 1
            -> [b u d].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.direct: bool | None = None
        self.code_noise = config.code_noise
        self.heads, self.residual = config.read_heads, config.read_in_residual
        width, tokens = config.read_width, config.tokens_width
        self.norm_query = norm_where(config.read_in_query_norm, config.dim)
        self.query = mod_fc(config, config.dim, width)
        self.key = mod_fc(config, tokens, width)
        self.value = mod_fc(config, tokens, width)
        self.output = mod_fc(config, width, config.dim)
        self.norm = optional_norm(config)
        self.ffn = mod_ffn(config)

    def forward(
        self, theta: Tensor, tokens: Tensor, code: Tensor, length: Tensor | None = None
    ) -> Tensor:
        code = noised(code, self.code_noise, training=self.training)
        y = self.attend(theta, tokens, code, length)
        return y + self.ffn(self.norm(y), code)

    def attend(
        self, theta: Tensor, tokens: Tensor, code: Tensor, length: Tensor | None = None
    ) -> Tensor:
        """Compute the attention without the ModFFN that follows.

        Shapes: as forward.
        """
        mask = length_mask(length, tokens)
        direct = not self.training if self.direct is None else self.direct
        attend = self._attend if direct else self._attend_reassociated
        y = self.output(attend(self.asked(theta, code), tokens, code, mask), code)
        return theta + y if self.residual else y

    def asked(self, theta: Tensor, code: Tensor) -> Tensor:
        """Return the modules' queries.

        Shapes: theta [... u d], code [... u c] -> [... u w], the heads side by side.
        """
        return self.query(self.norm_query(theta), code)

    def _attend(self, q: Tensor, tokens: Tensor, code: Tensor, mask: Tensor | None) -> Tensor:
        v = self._by_head(self.value(tokens.unsqueeze(1), code.unsqueeze(-2)))
        scores = self.scores(q, tokens, code)
        weights = masked_softmax(scores, None if mask is None else mask.unsqueeze(1))
        return (weights.unsqueeze(-2) @ v).squeeze(-2).flatten(-2)

    def scores(self, q: Tensor, tokens: Tensor, code: Tensor) -> Tensor:
        """Return the products of queries and keys, before the softmax over the tokens.

        Shapes: q [... u w], tokens [b n t], code [u c] or [b u c] -> [b u heads n].
        """
        k = self._by_head(self.key(tokens.unsqueeze(1), code.unsqueeze(-2)))  # [b u h n w/h]
        q = q.unflatten(-1, (self.heads, -1))
        return (k @ (q / math.sqrt(q.shape[-1])).unsqueeze(-1)).squeeze(-1)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def _attend_reassociated(
        self, q: Tensor, tokens: Tensor, code: Tensor, mask: Tensor | None
    ) -> Tensor:
        pooled = self._weights(q, tokens, code, mask) @ tokens
        if self.heads == 1:
            return self.value(pooled, code)
        bias = self.value.linear.bias
        weight, gain = self.value.linear.weight, self.value.gain(code)
        return values_by_head(pooled, weight, gain, self.heads) + bias

    def weights(
        self, theta: Tensor, tokens: Tensor, code: Tensor, length: Tensor | None = None
    ) -> Tensor:
        """Return the weight of each token for each module, averaged over heads; rows sum to 1.

        Shapes: as forward -> [b u n].
        """
        mask = length_mask(length, tokens)
        return mean_of_heads(self._weights(self.asked(theta, code), tokens, code, mask), self.heads)

    def _weights(self, q: Tensor, tokens: Tensor, code: Tensor, mask: Tensor | None) -> Tensor:
        return masked_softmax(probe(q, self.key, code, self.heads) @ tokens.mT, mask)


def probe(q: Tensor, key: ModFC, code: Tensor, heads: int) -> Tensor:
    """Return the probe whose product with a token is its score: W_k^T q * gain / sqrt(w / heads).

    Shapes: q [... u w], code [... u c] -> [... heads u t], the first head's rows first.
    """
    gain = key.gain(code)
    if heads == 1:
        return (q @ key.linear.weight) * gain / math.sqrt(q.shape[-1])
    q = q.unflatten(-1, (heads, -1)).transpose(-2, -3)  # [... h u w/h]
    query = (q @ key.linear.weight.unflatten(0, (heads, -1))) * gain.unsqueeze(-3)
    return (query / math.sqrt(q.shape[-1])).flatten(-3, -2)


def values_by_head(pooled: Tensor, weight: Tensor, gain: Tensor | None, heads: int) -> Tensor:
    """Return each head's values of its pooled tokens, side by side, without their bias.

    Shapes: pooled [b heads u t], weight [w t], gain [u t] or [b u t] -> [b u w].
    """
    x = pooled.unflatten(1, (heads, -1))
    x = x if gain is None else x * gain.unsqueeze(-3)
    return (x @ weight.unflatten(0, (heads, -1)).mT).transpose(1, 2).flatten(2)


def mean_of_heads(weights: Tensor, heads: int) -> Tensor:
    """Average a module's weights over its heads.

    Shapes: [b heads u n] -> [b u n].
    """
    return weights if heads == 1 else weights.unflatten(1, (heads, -1)).mean(1)


def modulation_of(config: NACConfig) -> Modulation:
    """Return the configured modulation."""
    return Modulation(
        config.code_dim,
        config.alpha,
        config.modulation,
        config.modfc_one,
        config.modfc_norm_affine,
    )


def mod_fc(config: NACConfig, inputs: int, outputs: int, *, scale: float = 1.0) -> ModFC:
    """Create a ModFC with the configured modulation."""
    return ModFC(inputs, outputs, modulation_of(config), scale=scale)


def mod_ffn(config: NACConfig, *, scale: float = 1.0) -> ModFFN:
    """Create a ModFFN with the configured width, activation and modulation."""
    kind = {"activation": config.activation, "gate": config.ffn_gate}
    return ModFFN(config.dim, config.ffn_dim, modulation_of(config), scale=scale, **kind)


def norm_where(normalize: bool, width: int) -> nn.Module:
    """Create a LayerNorm, or the identity."""
    return nn.LayerNorm(width) if normalize else nn.Identity()


def optional_norm(config: NACConfig) -> nn.Module:
    """Create the LayerNorm of read-in and read-out, if the configuration has one."""
    return norm_where(config.read_norm, config.dim)


def length_mask(length: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Return the mask of valid tokens; each input of a pair has its own length.

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
    """Set tokens beyond the length to 0: they may be anything, and 0 times NaN is NaN.

    Shapes: tokens [b n d], length [b] or [b 2] -> [b n d].
    """
    mask = length_mask(length, tokens)
    return tokens if mask is None else tokens.masked_fill(~mask.mT, 0.0)


@in_float32
def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax over valid tokens; a sample without any gives NaN.

    Shapes: scores [b ... u n], mask bool [b ... 1 n] -> [b ... u n].
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1)


class Propagator(nn.Module):
    """One round of messages between modules, then one of computation; both pre-LN, residual.

    Modules attend to each other, or to the `senders`, which have their own codes. The noise of
    training moves a module's code as a receiver and as a sender separately.

    Shapes: theta [b u d], code [u c] or [b u c], bias [u j] or [b u j], senders [b j d] and
            sender_code [j c] -> [b u d]; j = u without senders.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        scale = 1 / math.sqrt(2 * max(1, config.propagator_layers))  # the residual sum stays O(1)
        self.heads = config.heads
        self.drop_path, self.code_noise = config.drop_path, config.code_noise
        width = config.attention_width
        self.norm_attention = nn.LayerNorm(config.dim)
        self.norm_senders = nn.LayerNorm(config.dim) if config.sender_norm else None
        self.query = mod_fc(config, config.dim, width)
        self.key = mod_fc(config, config.dim, width)
        self.value = mod_fc(config, config.dim, width)
        self.output = mod_fc(config, width, config.dim, scale=scale)
        self.norm_ffn = nn.LayerNorm(config.dim)
        self.ffn = mod_ffn(config, scale=scale)

    def forward(
        self,
        theta: Tensor,
        code: Tensor,
        bias: Tensor | None,
        *,
        senders: Tensor | None = None,
        sender_code: Tensor | None = None,
    ) -> Tensor:
        x, noise = self.norm_attention(theta), self.code_noise
        receiver = noised(code, noise, training=self.training)
        sender_code = code if sender_code is None else sender_code
        sender = noised(sender_code, noise, training=self.training)
        heard = x
        if senders is not None or self.norm_senders is not None:
            norm = self.norm_senders or self.norm_attention
            heard = norm(theta if senders is None else senders)
        q, k, v = self.query(x, receiver), self.key(heard, sender), self.value(heard, sender)
        y = self.output(skmdpa(q, k, v, bias, heads=self.heads), receiver)
        theta = theta + dropped_path(y, self.drop_path, training=self.training)
        y = self.ffn(self.norm_ffn(theta), receiver)
        return theta + dropped_path(y, self.drop_path, training=self.training)


class InitialState(nn.Module):
    """A two-layer MLP of the code, for both processor and read-out modules.

    Shapes: code [... c] -> [... d].
    Source: section 2.2.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.first = linear(config.code_dim, config.dim)
        self.second = linear(config.dim, config.dim, scale=math.sqrt(2))

    def forward(self, code: Tensor, batch: int = 1) -> Tensor:
        return self.second(F.gelu(self.first(code)))


class CodeAsState(nn.Module):
    """The code itself, which has the width of a state.

    Shapes: code [... d] -> same.
    Source: the authors' code in the configurations of the paper.
    """

    def forward(self, code: Tensor, batch: int = 1) -> Tensor:
        return code


class LinearState(nn.Module):
    """LayerNorm and one layer; with noise, training draws around it for each of `batch` samples.

    Shapes: code [u c] -> [u d], or with noise drawn [b u d].
    Source: the authors' code by default. That code also draws in evaluation, so that two
            evaluations of one image differ; here they do not.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.code_dim)
        self.mean = linear(config.code_dim, config.dim)
        self.log_variance: nn.Linear | None = None
        if config.state_noise:
            self.log_variance = linear(config.code_dim, config.dim)
            nn.init.constant_(self.log_variance.bias, -5.0)

    def forward(self, code: Tensor, batch: int = 1) -> Tensor:
        x = self.norm(code)
        mean = self.mean(x)
        if self.log_variance is None or not self.training:
            return mean
        noise = torch.randn(batch, *mean.shape, dtype=mean.dtype, device=mean.device)
        return mean + noise * torch.exp(self.log_variance(x) / 2)


def initial_state(config: NACConfig) -> nn.Module:
    """Create the initial state that the configuration names."""
    forms = {"mlp": InitialState, "linear": LinearState}
    return CodeAsState() if config.initial_state == "code" else forms[config.initial_state](config)
