# SPDX-License-Identifier: Apache-2.0
"""A pre-norm transformer block, with options for the differences between trunks."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), the activation of OpenAI's CLIP."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the approximation of GELU by a tanh, the activation of SigLIP."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
}


class SelfAttention(nn.Module):
    """Multi-head self-attention; one layer produces queries, keys and values, in that order.

    Shapes: x [b n d], bias (broadcasts to [b heads n n], added to the logits) -> [b n d].
    """

    def __init__(self, dim: int, heads: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        logits = (q / math.sqrt(d // self.heads)) @ k.mT
        weights = (logits if bias is None else logits + bias).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + MLP(norm(x)).

    Shapes: x [b n d], bias as in SelfAttention -> [b n d].
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        qkv_bias: bool = True,
        activation: str = "gelu",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(dim, eps=eps)
        self.attention = SelfAttention(dim, heads, qkv_bias=qkv_bias)
        self.norm_mlp = nn.LayerNorm(dim, eps=eps)
        self.widen = nn.Linear(dim, hidden)
        self.narrow = nn.Linear(hidden, dim)
        self.activation = activation

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm_attention(x), bias)
        hidden = ACTIVATIONS[self.activation](self.widen(self.norm_mlp(x)))
        return x + self.narrow(hidden)
