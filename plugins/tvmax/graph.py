# SPDX-License-Identifier: Apache-2.0
"""Generalized fused sparse attention, which is TVMax on any graph."""

import math
from typing import Any

import torch
from torch import Tensor

from saccade.core.errors import SaccadeError, ShapeError
from saccade.plugins import derivatives, dispatch
from saccade.plugins.tvmax import dual, eager
from saccade.plugins.tvmax.contract import tvmax as contract

_NAME = "saccade::gfusedmax"


def _checked(z: Tensor, edges: Tensor, *attributes: Any) -> None:
    contract.checked_attributes(dict(zip(contract.attributes, attributes, strict=True)), _NAME)
    name = dispatch.name_of(z.dtype)
    if name not in dispatch.DTYPES:
        raise SaccadeError(f"{_NAME}: z is {name}, expected {' or '.join(dispatch.DTYPES)}.")
    if z.dim() < 1:
        raise ShapeError(f"{_NAME}: z has shape [], expected z [... n].")
    if edges.dim() != 2 or edges.shape[1] != 2 or edges.dtype != torch.int64:
        raise ShapeError(
            f"{_NAME}: edges is {dispatch.name_of(edges.dtype)} {list(edges.shape)}, expected "
            "int64 [e 2], where each row has the two vertices of an edge."
        )


def _check_values(edges: Tensor, n: int) -> None:
    outside = edges[((edges < 0) | (edges >= n)).any(1)]
    if len(outside):
        raise SaccadeError(
            f"{_NAME}: edges has {outside[0].tolist()}, expected vertices from 0 to {n - 1}."
        )
    loops = edges[edges[:, 0] == edges[:, 1]]
    if len(loops):
        raise SaccadeError(
            f"{_NAME}: edges has {loops[0].tolist()}, expected two different vertices. "
            "Leave such rows out: they have no effect."
        )
    pairs, times = edges.sort(1).values.unique(dim=0, return_counts=True)
    if len(pairs) < len(edges):
        raise SaccadeError(
            f"{_NAME}: edges has {pairs[times > 1][0].tolist()} more than once, expected each pair "
            "once, in either direction. Use torch.unique(edges.sort(1).values, dim=0)."
        )


@dispatch.bfloat16_in_float32
def _solved(
    z: Tensor, edges: Tensor, lam: float, tolerance: float, max_iterations: int
) -> eager.Answer:
    _checked(z, edges, lam, tolerance, max_iterations)
    n, leading = z.shape[-1], z.shape[:-1]
    _check_values(edges, n)
    if z.numel() == 0:
        return z.new_empty(z.shape), z.new_zeros(leading, dtype=torch.float32), z.int()
    flat = z.reshape(math.prod(leading), n)
    first, second = edges.to(z.device).unbind(1)
    graph = dual.Edges(n, first, second, torch.ones_like(first, dtype=torch.bool))
    everywhere = torch.ones_like(flat, dtype=torch.bool)
    p, error, groups = dual.solve(flat, everywhere, graph, lam, tolerance, max_iterations)
    eager.warn_above(error, tolerance, max_iterations, _NAME, z.dtype)
    return p.to(z.dtype).view(z.shape), error.float().view(leading), groups.view(z.shape)


def _fake(z: Tensor, edges: Tensor, *attributes: Any) -> eager.Answer:
    _checked(z, edges, *attributes)
    error = z.new_empty(z.shape[:-1], dtype=torch.float32)
    return z.new_empty(z.shape), error, z.new_empty(z.shape, dtype=torch.int32)


OPERATOR = dispatch.define(
    "gfusedmax",
    "(Tensor z, Tensor edges, float lam, float tolerance, int max_iterations)"
    " -> (Tensor, Tensor, Tensor)",
    _solved,
    _fake,
    shared=(1,),
)


def _keeping(run: Any, z: Tensor, *rest: Any) -> tuple[Any, tuple[Tensor, ...]]:
    answer = run(OPERATOR, z, *rest)
    return answer, (answer[0], answer[2])


derivatives.differentiate(OPERATOR, eager.BACKWARD, _keeping, constant=(1, 2))
dispatch.in_float32_under_autocast(OPERATOR)


def gfusedmax(
    z: Tensor,
    edges: Any,
    lam: float = 0.01,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 2000,
    return_error: bool = False,
) -> Any:
    """Minimize 1/2 ||p - z||^2 + lam sum over edges of |p_i - p_j| over the simplex.

    With a grid's edges this is TVMax, with a chain 1D fused attention, without edges sparsemax. A
    vertex with a logit of -1e8 or less is masked, as in TVMax.

    Shapes: z [... n], edges [e 2] int64, each pair once -> p [... n]; with return_error also a
        bound on its Euclidean error [...].
    Units: z are logits, lam is in logits; tolerance and error are Euclidean distances of p.
    Raises: ShapeError, SaccadeError (a vertex out of range, a loop, a pair twice, an attribute).
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), eq. 7, Propositions 1, 2.
    """
    values = dispatch.attributes(
        contract, lam=lam, tolerance=tolerance, max_iterations=max_iterations
    )
    p, error, _ = dispatch.call(OPERATOR, z, torch.as_tensor(edges), *values)
    return (p, error) if return_error else p
