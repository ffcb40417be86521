# SPDX-License-Identifier: Apache-2.0
"""The output attention over a grid whose height and width vary by sample."""

import torch
from torch import Tensor

from saccade.core.errors import SaccadeError
from saccade.models.vqa.config import VQAConfig
from saccade.models.vqa.mcan import MASKED, attention_weights
from saccade.models.vqa.tv_dykstra import inside_grid, tv_dykstra
from saccade.plugins.ops import sparsemax, tvmax
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE

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
    Source: Martins et al. 2020, section 3.2.
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
