# SPDX-License-Identifier: Apache-2.0
"""The TV solver that the official TVMAX networks were trained with: alternating chains, early stop.

It uses tensor operations of fixed shape, so that it exports to standard ONNX: the columns of a grid
are solved together, then its rows, in one loop over the rounds.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ROUNDS, STOP, MASKED = 35, 1e-2, -1e9


def tv_dykstra(
    z: Tensor, sizes: Tensor, masked: Tensor, lam: float, rounds: int = ROUNDS, stop: float = STOP
) -> Tensor:
    """Approximate the minimizer of 1/2 ||x - z||^2 + lam TV2D(x), as the authors' rounds do.

    Dykstra's splitting: exact chains along columns, then along rows. It stops after `rounds`, or
    when the two results differ by less than `stop` in every cell. A sample that has converged no
    longer changes, whatever the rest of the batch does. Masked cells are the authors' -1e9: they
    pull a neighbor down by lam.

    Shapes: z [b h w], sizes [b 2] int64 (cells outside are returned unchanged), masked [b h w]
            bool -> [b h w].
    Units:  z, lam and stop are logits.
    Source: Martins et al. 2020 (Sparse and Structured Visual Attention), eq. 6; the splitting is
            Dykstra's, its order and stopping rule are those of the authors' code.
    """
    inside = inside_grid(sizes, z.shape[-2], z.shape[-1])
    masked = masked & inside
    values = torch.where(inside, z, 0)
    # -1e9 in float32 leaves no digits for the rest of a chain.
    values = torch.where(masked, MASKED, values) if _is_double(z) else _lowered(values, masked, lam)
    down, across = _edges(inside.mT.contiguous()).to(z.dtype), _edges(inside).to(z.dtype)

    start = (
        torch.full((), rounds, dtype=torch.int64, device=z.device),
        torch.ones_like(sizes[:, :1, None], dtype=torch.bool),
        values,
        torch.zeros_like(values),
        torch.zeros_like(values),
        down,
        across,
    )
    solved = _repeat(_unfinished, _round_of(lam, stop), start)[2]
    return torch.where(inside & ~masked, solved, z)


def _unfinished(rounds_left: Tensor, active: Tensor, *state: Tensor) -> Tensor:
    return active.any() & (rounds_left > 0)


def _round_of(lam: float, stop: float) -> Callable[..., tuple[Tensor, ...]]:
    def one_round(
        rounds_left: Tensor,
        active: Tensor,
        x: Tensor,
        p: Tensor,
        q: Tensor,
        down: Tensor,
        across: Tensor,
    ) -> tuple[Tensor, ...]:
        columns = _chains((x + p).mT.contiguous(), down * lam, lam).mT.contiguous()
        rows = _chains(columns + q, across * lam, lam)
        still = active & ((columns - rows).abs().amax((-2, -1), keepdim=True) >= stop)
        p = torch.where(active, p + (x - columns), p)
        q = torch.where(active, q + (columns - rows), q)
        x = torch.where(active, rows, x)
        return rounds_left - 1, still, x, p, q, down + 0, across + 0

    return one_round


def inside_grid(sizes: Tensor, height: int, width: int) -> Tensor:
    """Return the mask of the largest grid's cells that are in each sample's grid.

    Shapes: sizes [b 2] (height, width) -> [b height width] bool.
    """
    rows = torch.arange(height, device=sizes.device)[None, :, None] < sizes[:, 0, None, None]
    columns = torch.arange(width, device=sizes.device)[None, None] < sizes[:, 1, None, None]
    return rows & columns


def _edges(inside: Tensor) -> Tensor:
    """Shapes: [b h w] bool -> the same: whether a cell and the next one in its row are inside."""
    return inside & F.pad(inside[..., 1:], (0, 1))


def _repeat(
    condition: Callable[..., Tensor],
    body: Callable[..., tuple[Tensor, ...]],
    state: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Loop until the data stops it: one node in a file, plain Python otherwise.

    The exporter requires that the body returns new tensors with the strides of its inputs.
    """
    if torch.compiler.is_exporting():
        final: tuple[Tensor, ...] = torch.ops.higher_order.while_loop(condition, body, state, ())
        return final
    while bool(condition(*state)):
        state = body(*state)
    return state


def _is_double(z: Tensor) -> bool:
    return z.dtype == torch.float64


def _lowered(z: Tensor, masked: Tensor, lam: float) -> Tensor:
    """Lower masked cells just enough to stay apart from every other cell.

    The chains move a cell by at most 2 lam in all, and the corrections between rounds by at most
    2 lam again. So this has the effect of -1e9 without its rounding.
    """
    lowest = torch.where(masked, torch.inf, z).amin((-2, -1), keepdim=True)
    lowest = torch.where(lowest < torch.inf, lowest, 0)
    return torch.where(masked, lowest - (8 * lam + 1), z)


def _chains(z: Tensor, weights: Tensor, lam: float) -> Tensor:
    """Minimize 1/2 ||x - z||^2 + sum_i weights_i |x_i - x_(i+1)| for every chain.

    Shapes: z [b h w], one chain per row; weights the same: lam or 0 of the edge after each cell
            -> [b h w].
    """
    if not _is_double(z):
        return _solved(z, weights)
    masked = z <= MASKED / 2
    z, weights = _as_rounded(z, weights, lam)
    lowered = _lowered(z, masked, lam)
    solved = _solved(lowered, weights)
    return torch.where(masked, z + (solved - lowered), solved)


def _as_rounded(z: Tensor, weights: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Return the chain that the authors' solver effectively sees.

    It pulls a string tight between two running sums, lam below and lam above. After a cell of
    -1e9, both are rounded to 1e-7, each in its own way. This is the chain that they then imply.
    """
    ends = lam - weights
    below, above = (
        torch.cat((z[..., :1] + start, z[..., 1:]), -1).cumsum(-1) for start in (-lam, lam)
    )
    below = below + ends
    above = torch.where(weights > 0, above, below)  # the authors' string ends at the lower sum
    rise, rise_above = (F.pad(bound, (1, 0)).diff(dim=-1) for bound in (below, above))
    return rise + (rise_above - rise) / 2, (above - below) / 2


def _solved(z: Tensor, weights: Tensor) -> Tensor:
    """Return the exact minimizer by dynamic programming from the first cell to the last.

    The cells so far contribute a rising piecewise linear function of x to the derivative of the
    objective. It is stored as its heights at sorted knots. An edge clips it to [-weight, weight],
    which makes two knots. On the way back from the last cell, each x is the next one clamped
    between them. An edge of weight 0 separates.

    Shapes: z and weights [b h w] -> [b h w].
    Source: Johnson 2013 (A Dynamic Programming Algorithm for the Fused Lasso), section 2.
    """
    knots = torch.cat((z, z), -1) * 0
    limits = torch.zeros_like(z)
    first = torch.zeros((), dtype=torch.int64, device=z.device)
    forth = (first, knots, knots + 0, limits, limits + 0, z + 0, weights + 0)
    low, high = _repeat(_has_cells_ahead, _take_cell, forth)[3:5]
    last = first + (z.shape[-1] - 1)
    back = (last, limits[..., :1].contiguous(), z + 0, low, high)
    return _repeat(_has_cells_behind, _settle_cell, back)[2]


def _has_cells_ahead(i: Tensor, knots: Tensor, *state: Tensor) -> Tensor:
    return i < knots.shape[-1] // 2


def _take_cell(
    i: Tensor,
    knots: Tensor,
    heights: Tensor,
    low: Tensor,
    high: Tensor,
    z: Tensor,
    weights: Tensor,
) -> tuple[Tensor, ...]:
    """Advance by one cell: after cell i the middle 2 i + 2 knots count; the rest repeat them."""
    count = z.shape[-1]
    cell, weight = z.index_select(-1, i[None]), weights.index_select(-1, i[None])
    derivative = heights + knots - cell
    below = _inverse(knots, derivative, -weight)
    above = _inverse(knots, derivative, weight)
    place = torch.arange(2 * count, device=z.device)
    left, right = place < count - i, place >= count + i
    knots = torch.minimum(torch.maximum(knots, below), above)
    knots = torch.where(left, below, torch.where(right, above, knots))
    heights = torch.minimum(torch.maximum(derivative, -weight), weight)
    heights = torch.where(left, -weight, torch.where(right, weight, heights))
    here = place[:count] == i
    low, high = torch.where(here, below, low), torch.where(here, above, high)
    return i + 1, knots, heights, low, high, z + 0, weights + 0


def _has_cells_behind(i: Tensor, *state: Tensor) -> Tensor:
    return i >= 0


def _settle_cell(
    i: Tensor, x: Tensor, solved: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, ...]:
    below, above = low.index_select(-1, i[None]), high.index_select(-1, i[None])
    x = torch.minimum(torch.maximum(x, below), above)
    here = torch.arange(low.shape[-1], device=low.device) == i
    return i - 1, x, torch.where(here, x, solved), low + 0, high + 0


def _inverse(knots: Tensor, heights: Tensor, values: Tensor) -> Tensor:
    """Return where a rising piecewise linear function, of slope 1 outside, has the given height.

    Shapes: knots and heights [... k] sorted, wanted [... 1] -> [... 1].
    """
    rise = heights.diff(dim=-1)
    # Between knots the slope is at least 1: without a rise, both knots are the same.
    run = knots.diff(dim=-1) / torch.where(rise > 0, rise, 1)
    above = values - heights
    inner = torch.minimum(above[..., :-1].clamp(min=0), rise) * run
    outer = above[..., :1].clamp(max=0) + above[..., -1:].clamp(min=0)
    return knots[..., :1] + outer + inner.sum(-1, keepdim=True)
