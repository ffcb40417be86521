# SPDX-License-Identifier: Apache-2.0
"""The circuit executor's propagator, and functions that its layers share."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.layers.transformer import dropped_path
from saccade.models.nac.config import NACConfig
from saccade.models.nac.modulation import ModFC, ModFFN, Modulation, linear
from saccade.models.nac.noise import noised
from saccade.models.nac.skmdpa import in_float32, skmdpa


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
