# SPDX-License-Identifier: Apache-2.0
"""Soft thresholding in torch: operator and gradient."""

from typing import Any

from fakes.soft_threshold.contract import soft_threshold as contract
from torch import Tensor
from torch.nn.functional import softshrink

from saccade.plugins import derivatives, dispatch


def _forward(x: Tensor, lam: float) -> Tensor:
    return softshrink(x.to(dispatch.wide(x.dtype)), lam).to(x.dtype)


def _fake(x: Tensor, lam: float) -> Tensor:
    (shape,) = dispatch.checked(contract, x, lam=lam)
    return x.new_empty(shape)


def _keeping(run: Any, x: Tensor, lam: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    y = run(OPERATOR, x, lam)
    return y, (y,)


OPERATOR = dispatch.define("soft_threshold", dispatch.schema(contract), _forward, _fake)
BACKWARD = dispatch.define(
    "soft_threshold_backward",
    "(Tensor gradient, Tensor y) -> Tensor",
    lambda gradient, y: gradient * (y != 0),
    lambda gradient, y: y.new_empty(y.shape),
)
derivatives.differentiate(OPERATOR, BACKWARD, _keeping)


def soft_threshold(x: Tensor, lam: float = 0.5) -> Tensor:
    """Shapes: x [... n] -> the same."""
    return dispatch.call(OPERATOR, x, *dispatch.attributes(contract, lam=lam))
