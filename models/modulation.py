# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights all modules share and whose inputs a module's code scales."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def linear(inputs: int, outputs: int, *, scale: float = 1.0, bias: bool = True) -> nn.Linear:
    """A layer that keeps the variance of its input (times scale squared), with bias 0."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=scale / math.sqrt(inputs))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class ModFC(nn.Module):
    """y = W (x * (1 + alpha LayerNorm(W_c c))) + b, or W x + b with modulation off.

    Shapes: x [... inputs], code [... code_dim], leading axes broadcast -> y [... outputs].
    Source: eq. 1.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        code_dim: int,
        *,
        alpha: float = 0.1,
        modulation: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.linear = linear(inputs, outputs, scale=scale)
        self.modulation = modulation
        if modulation:
            self.code = linear(code_dim, inputs, bias=False)
            self.norm = nn.LayerNorm(inputs)
            self.alpha = nn.Parameter(torch.tensor(float(alpha)))

    def gain(self, code: Tensor) -> Tensor:
        """1 + alpha LayerNorm(W_c c): what a module multiplies its input with.

        Shapes: code [... code_dim] -> [... inputs].
        """
        if not self.modulation:
            return code.new_ones(*code.shape[:-1], self.linear.in_features)
        return 1 + self.alpha * self.norm(self.code(code))

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        if not self.modulation:
            return self.linear(x)
        return self.linear(x * self.gain(code))


class ModFFN(nn.Module):
    """Two ModFC of the same code with an activation between them; no residual of its own.

    Shapes: x [... dim], code [... code_dim] -> [... dim].
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        code_dim: int,
        *,
        activation: str = "gelu",
        alpha: float = 0.1,
        modulation: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.widen = ModFC(dim, hidden, code_dim, alpha=alpha, modulation=modulation)
        self.narrow = ModFC(hidden, dim, code_dim, alpha=alpha, modulation=modulation, scale=scale)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        return self.narrow(activate(self.widen(x, code), self.activation), code)


def activate(x: Tensor, name: str) -> Tensor:
    """The activation of that name."""
    return F.gelu(x) if name == "gelu" else F.relu(x)
