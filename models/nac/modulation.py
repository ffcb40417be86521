# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights all modules share and whose inputs are scaled by a module's code."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def noised(code: Tensor, share: float, *, training: bool) -> Tensor:
    """In training, move each component of a code uniformly by up to `share` of its size.

    The move is constant with respect to the gradient.

    Shapes: code [u c], the same move for all samples, or [b u c] -> same.
    Source: the authors' code; the paper has none.
    """
    if not training or share == 0:
        return code
    size = code.detach().abs()
    return code + (2 * torch.rand_like(size) - 1) * (share * size)


def linear(inputs: int, outputs: int, *, scale: float = 1.0, bias: bool = True) -> nn.Linear:
    """Create a layer that preserves its input's variance (times scale squared), with bias 0."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=scale / math.sqrt(inputs))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


@dataclass(frozen=True)
class Modulation:
    """Settings of the modulation of a layer's input by a code."""

    code_dim: int
    alpha: float = 0.1  # initial value
    on: bool = True  # False: no modulation
    one: bool = True  # False: without the 1 and without alpha
    norm_affine: bool = True  # False: LayerNorm without weight and bias


class ModFC(nn.Module):
    """y = W (x * (1 + alpha LayerNorm(W_c c))) + b, or W x + b with modulation off.

    Shapes: x [... inputs], code [... code_dim], leading axes broadcast -> y [... outputs].
    Source: eq. 1; without the 1, as in the authors' code by default.
    """

    def __init__(
        self, inputs: int, outputs: int, modulation: Modulation, *, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.linear = linear(inputs, outputs, scale=scale)
        self.modulation, self.one = modulation.on, modulation.one
        if modulation.on:
            self.code = linear(modulation.code_dim, inputs, bias=False)
            self.norm = nn.LayerNorm(inputs, elementwise_affine=modulation.norm_affine)
            if modulation.one:
                self.alpha = nn.Parameter(torch.tensor(float(modulation.alpha)))

    def gain(self, code: Tensor) -> Tensor:
        """Return the factor of a module's input: 1 + alpha LayerNorm(W_c c), or LayerNorm(W_c c).

        Shapes: code [... code_dim] -> [... inputs].
        """
        if not self.modulation:
            return code.new_ones(*code.shape[:-1], self.linear.in_features)
        scale = self.norm(self.code(code))
        return 1 + self.alpha * scale if self.one else scale

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        if not self.modulation:
            return self.linear(x)
        return self.linear(x * self.gain(code))


class ModFFN(nn.Module):
    """Two ModFC of the same code with an activation between them, without a residual.

    With `gate` "geglu", the first layer is twice as wide: one half of its channels times the GELU
    of the other. The authors' hidden width is round(capacity_factor * dim) in both cases.

    Shapes: x [... dim], code [... code_dim] -> [... dim].
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        modulation: Modulation,
        *,
        activation: str = "gelu",
        gate: str = "none",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation = activation if gate == "none" else gate
        wide = hidden if gate == "none" else 2 * hidden
        self.widen = ModFC(dim, wide, modulation)
        self.narrow = ModFC(hidden, dim, modulation, scale=scale)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        return self.narrow(activate(self.widen(x, code), self.activation), code)


def activate(x: Tensor, name: str) -> Tensor:
    """Apply the activation of that name; "geglu" halves the channels.

    Shapes: x [... hidden] -> same, or [... 2 hidden] -> [... hidden].
    Source: geglu: Shazeer 2020 (arXiv 2002.05202), the second half through the exact GELU.
    """
    if name == "geglu":
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate)
    return F.gelu(x) if name == "gelu" else F.relu(x)
