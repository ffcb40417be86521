# SPDX-License-Identifier: Apache-2.0
"""Normalisations of a cross-covariance matrix."""

import math

import torch
from torch import Tensor, nn

from saccade.models.sot.config import SoTConfig
from saccade.plugins.ops import svpn, svpn_fast


class ExactSvPN(nn.Module):
    """Singular values to the power alpha.

    Shapes: q [... m n] -> the same.
    Source: Xie et al. 2021, eq. 5.
    """

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, q: Tensor) -> Tensor:
        return svpn(q, alpha=self.alpha)


class FastSvPN(nn.Module):
    """The largest singular values by power iteration, the rest scaled by a power of the last.

    Shapes: q [... m n] -> the same.
    Source: Xie et al. 2021, eq. 6 to 8.
    """

    start: Tensor

    def __init__(self, config: SoTConfig) -> None:
        super().__init__()
        self.config = config
        if config.learned_start:
            self.start = nn.Parameter(torch.randn(config.n))
        else:
            self.register_buffer("start", torch.ones(config.n), persistent=False)

    def forward(self, q: Tensor) -> Tensor:
        config = self.config
        return svpn_fast(
            q,
            self.start,
            alpha=config.alpha,
            singular_values=config.singular_values,
            iterations=config.iterations,
            epsilon=config.svpn_epsilon,
        )


class Scale(nn.Module):
    """One factor 1/tau for every matrix, m^(-1/2) at first.

    Shapes: q [... m n] -> the same.
    Source: Xie et al. 2021, section 4.2.2 (1/tau).
    """

    factor: Tensor

    def __init__(self, m: int, *, learned: bool) -> None:
        super().__init__()
        factor = torch.tensor(1 / math.sqrt(m))
        if learned:
            self.factor = nn.Parameter(factor)
        else:
            self.register_buffer("factor", factor, persistent=False)

    def forward(self, q: Tensor) -> Tensor:
        return q * self.factor


class ElementPower(nn.Module):
    """Signed square root of each entry, then length 1.

    Shapes: q [... m n] -> the same; over both axes of a matrix, or over its rows' axis.
    Source: EPN in Xie et al. 2021, table 4(d).
    """

    def __init__(self, axis: str, epsilon: float) -> None:
        super().__init__()
        self.axes = (-2,) if axis == "rows" else (-2, -1)
        self.epsilon = epsilon

    def forward(self, q: Tensor) -> Tensor:
        root = q.sign() * (q.abs() + self.epsilon).sqrt()
        length = root.square().sum(self.axes, keepdim=True).sqrt()
        return root / length.clamp(min=1e-12)


def normalization(config: SoTConfig) -> nn.Module:
    """The normalisation that the configuration names."""
    name = config.normalization
    if name == "svpn":
        return ExactSvPN(config.alpha)
    if name == "svpn-fast":
        return FastSvPN(config)
    if name in ("scale", "scale-learned"):
        return Scale(config.m, learned=name == "scale-learned")
    if name == "epn":
        return ElementPower(config.epn_axis, config.epn_epsilon)
    if name == "layer-norm":
        return nn.LayerNorm(config.n, eps=1e-5)
    return nn.Identity()


def square_root(covariance: Tensor, steps: int) -> Tensor:
    """Square root of positive semidefinite matrices by coupled Newton-Schulz steps (iSQRT).

    Shapes: covariance [... d d] -> the same; a zero matrix gives zeros.
    Source: Li et al. 2018, iterative matrix square root normalisation, as MPN in SoT.
    """
    size = covariance.shape[-1]
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    tiny = torch.finfo(covariance.dtype).tiny
    y = covariance / trace.clamp(min=tiny)
    unit = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    # The first step begins with the inverse root at the unit matrix.
    z = (3 * unit - y) / 2
    y = y @ z
    for step in range(1, steps):
        correction = (3 * unit - z @ y) / 2
        y = y @ correction
        if step < steps - 1:
            z = correction @ z
    return y * trace.clamp(min=0).sqrt()
