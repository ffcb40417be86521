# SPDX-License-Identifier: Apache-2.0
"""The output attention over a grid of any size, and the authors' solver of its total variation."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.vqa.config import VQAConfig
from saccade.models.vqa.mcan import MASKED, attention_weights
from saccade.plugins.ops import sparsemax, tvmax
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE

ROUNDS, STOP = 35, 1e-2


def tv_dykstra(
    z: Tensor, sizes: Tensor, masked: Tensor, lam: float, rounds: int = ROUNDS, stop: float = STOP
) -> Tensor:
    """Approximate the minimizer of 1/2 ||x - z||^2 + lam TV2D(x), as the authors' rounds do.

    Dykstra's splitting: exact chains along columns, then along rows. All operations have a fixed
    shape, so that it exports to standard ONNX with one loop over the rounds. It stops after
    `rounds`, or when the two results differ by less than `stop` in every cell. A sample that has
    converged no longer changes, whatever the rest of the batch does. Masked cells are the authors'
    -1e9: they pull a neighbor down by lam.

    Shapes: z [b h w], sizes [b 2] int64 (cells outside are returned unchanged), masked [b h w]
            bool -> [b h w].
    Units:  z, lam and stop are logits.
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), eq. 6; the splitting is
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


_MASKED_BELOW = -1e8  # as in the op


class GridPlaces:
    """The map between the cells of each sample's grid and its rows.

    In the layout `grid`, row r W + c is the cell (r, c). In the layout `flat` it is r w + c, with
    the sample's own width w. Without sizes, every grid is the largest one.

    Shapes: sizes [b 2] int64 (height, width).
    """

    def __init__(self, config: VQAConfig, sizes: Tensor | None) -> None:
        self.config, self.sizes = config, sizes
        self.height, self.width = config.grid
        self.rows = config.rows if config.layout == "flat" else self.height * self.width
        self.flat = sizes is not None and config.layout == "flat"
        self.inside = None if sizes is None else inside_grid(sizes, self.height, self.width)

    def outside_rows(self) -> Tensor | None:
        """Return the rows that are not cells; None if all rows are.

        Shapes: -> [b rows] bool.
        """
        if self.sizes is None or self.inside is None:
            return None
        if not self.flat:
            return ~self.inside.flatten(1)
        place = torch.arange(self.rows, device=self.sizes.device)
        return place >= self.sizes.prod(-1, keepdim=True)

    def to_grid(self, rows: Tensor, fill: float) -> Tensor:
        """Move values from rows to their cells, with `fill` in cells outside a grid.

        Shapes: rows [b n] -> [b H W].
        """
        shape = (self.height, self.width)
        if self.inside is None:
            return rows.unflatten(1, shape)
        if self.flat:
            assert self.sizes is not None
            row = torch.arange(self.height, device=rows.device)[:, None]
            column = torch.arange(self.width, device=rows.device)
            place = row * self.sizes[:, 1, None, None] + column
            place = place.clamp(min=0, max=self.rows - 1)
            rows = rows.gather(1, place.flatten(1))
        return torch.where(self.inside, rows.unflatten(1, shape), fill)

    def to_rows(self, grid: Tensor) -> Tensor:
        """Move values from cells to their rows, with 0 in rows that are not cells.

        Shapes: grid [b H W] -> [b n].
        """
        outside = self.outside_rows()
        if outside is None or not self.flat:
            return grid.flatten(1)
        assert self.sizes is not None
        place = torch.arange(self.rows, device=grid.device)
        width = self.sizes[:, 1:].clamp(min=1)
        row = torch.div(place, width, rounding_mode="floor")
        cell = (row * self.width + (place - row * width)).clamp(max=self.height * self.width - 1)
        return grid.flatten(1).gather(1, cell).masked_fill(outside, 0)


def grid_attention(
    scores: Tensor, places: GridPlaces, config: VQAConfig
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the weights by row and as a map, and how far exact TVMAX misses its tolerance.

    A zero row inside a grid is given as masked. Under TVMAX it gets no weight, and pulls its
    neighbors down by lam. A grid with only masked cells counts as one without masked cells.

    Shapes: scores [b n], masked rows at -1e9 -> weights [b n], map [b H W], excess [b].
    Source: Martins et al. 2021, section 3.2.
    """
    if config.attention != "tvmax":
        weights = attention_weights(scores, config.attention)
        return weights, places.to_grid(weights, 0), None
    z = places.to_grid(scores, MASKED)
    masked = z <= _MASKED_BELOW
    nothing_left = masked.all(-1).all(-1)[:, None, None]
    if places.inside is not None:
        nothing_left = nothing_left & places.inside
    z = torch.where(nothing_left, 0, z)
    masked = masked & ~nothing_left
    if config.solver == "authors":
        return _authors(z, masked, places, config)
    options = {"tolerance": config.tolerance, "max_iterations": config.max_iterations}
    weights, error = tvmax(z, config.lam, places.sizes, return_error=True, **options)
    excess = (error - max(config.tolerance, SMALLEST_FLOAT32_TOLERANCE)).clamp(min=0)
    return places.to_rows(weights), weights, excess


def _authors(
    z: Tensor, masked: Tensor, places: GridPlaces, config: VQAConfig
) -> tuple[Tensor, Tensor, None]:
    sizes = places.sizes
    if sizes is None:
        sizes = torch.tensor(config.grid, device=z.device).expand(z.shape[0], 2)
    z = tv_dykstra(z, sizes, masked, config.lam, config.rounds, config.stop)
    weights = sparsemax(z.flatten(1)).unflatten(1, z.shape[1:])
    return places.to_rows(weights), weights, None


def check_sizes(sizes: Tensor, config: VQAConfig) -> None:
    """Check that the sizes fit this model's grid; traced graphs skip the check.

    Raises: SaccadeError if they do not.
    """
    if torch.compiler.is_compiling():
        return
    largest = sizes.new_tensor(config.grid)
    wrong = ((sizes < 1) | (sizes > largest)).any(-1)
    limit = f"1 to {config.grid[0]} rows and 1 to {config.grid[1]} columns"
    if config.layout == "flat":
        wrong = wrong | (sizes.prod(-1) > config.rows)
        limit += f", at most {config.rows} cells"
    if bool(wrong.any()):
        raise SaccadeError(
            f"sizes: found {sizes[wrong][0].tolist()} (height, width), expected {limit}. "
            "Pass the size of each sample's feature map."
        )
