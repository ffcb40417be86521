# SPDX-License-Identifier: Apache-2.0
"""The circuit executor's read-in: from tokens to the modules' first states."""

import math

from torch import Tensor, nn

from saccade.models.nac.config import NACConfig
from saccade.models.nac.layers import (
    length_mask,
    masked_softmax,
    mod_fc,
    mod_ffn,
    norm_where,
    optional_norm,
)
from saccade.models.nac.modulation import ModFC
from saccade.models.nac.noise import noised


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
