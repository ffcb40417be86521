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


def swiglu(x: Tensor) -> Tensor:
    """Return silu(a) b for the halves a and b of the channels, the gate of DINOv2 giant.

    Shapes: x [... 2d] -> [... d].
    Source: Shazeer 2020 (arXiv 2002.05202), eq. 6, with the biases of DINOv2.
    """
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "swiglu": swiglu,
}


def widened(hidden: int, activation: str) -> int:
    """Return the width before an activation that leaves `hidden` channels (a gate: twice that)."""
    return 2 * hidden if activation == "swiglu" else hidden


def dropped_path(residual: Tensor, rate: float, *, training: bool) -> Tensor:
    """In training, set a share `rate` of samples' residuals to 0 and scale up the others.

    Shapes: residual [b ...] -> same.
    Source: Huang et al. 2016 (arXiv 1603.09382), with the same expectation as in evaluation.
    """
    if not training or rate == 0:
        return residual
    shape = (residual.shape[0],) + (1,) * (residual.dim() - 1)
    uniform = torch.rand(shape, dtype=residual.dtype, device=residual.device)
    keep = torch.floor(1 - rate + uniform)
    return residual * keep / (1 - rate)


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
        self.widen = nn.Linear(dim, widened(hidden, activation))
        self.narrow = nn.Linear(hidden, dim)
        self.activation = activation
        self.stochastic_depth = 0.0  # rate of `dropped_path`, set by training

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        attended = self.attention(self.norm_attention(x), bias)
        x = x + dropped_path(attended, self.stochastic_depth, training=self.training)
        hidden = self.narrow(ACTIVATIONS[self.activation](self.widen(self.norm_mlp(x))))
        return x + dropped_path(hidden, self.stochastic_depth, training=self.training)
