# SPDX-License-Identifier: Apache-2.0
"""The output attention over a grid whose height and width differ from sample to sample."""

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.models.vqa.config import VQAConfig
from saccade.models.vqa.mcan import MASKED, attention_weights
from saccade.models.vqa.tv_dykstra import inside_grid, tv_dykstra
from saccade.plugins.ops import sparsemax, tvmax
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE

_MASKED_BELOW = -1e8  # as the op has it


class GridPlaces:
    """Places of the cells of each sample's grid among its rows, and the other way round.

    In the layout `grid` row r W + c is the cell (r, c); in the layout `flat` it is r w + c, with
    the sample's own width w. Without sizes every grid is the largest one.

    Shapes: sizes [b 2] int64 (height, width).
    """

    def __init__(self, config: VQAConfig, sizes: Tensor | None) -> None:
        self.config, self.sizes = config, sizes
        self.height, self.width = config.grid
        self.rows = config.rows if config.layout == "flat" else self.height * self.width
        self.flat = sizes is not None and config.layout == "flat"
        self.inside = None if sizes is None else inside_grid(sizes, self.height, self.width)

    def outside_rows(self) -> Tensor | None:
        """Rows that are no cell; none where all are.

        Shapes: -> [b rows] bool.
        """
        if self.sizes is None or self.inside is None:
            return None
        if not self.flat:
            return ~self.inside.flatten(1)
        place = torch.arange(self.rows, device=self.sizes.device)
        return place >= self.sizes.prod(-1, keepdim=True)

    def to_grid(self, rows: Tensor, fill: float) -> Tensor:
        """Numbers of the rows at their cells, `fill` at cells outside a grid.

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
        """Numbers of the cells in their rows, 0 in rows that are no cell.

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
    """The weights of the rows, as a map, and by how much exact TVMAX misses its tolerance.

    A zero row inside a grid comes in masked and stays without weight under TVMAX, where it pulls
    its neighbours down by lam. A grid of nothing but masked cells counts as one without any.

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
    """Stop sizes that no grid of this model has; a traced graph is not held up by it.

    Raises: SaccadeError.
    """
    if torch.compiler.is_compiling():
        return
    largest = sizes.new_tensor(config.grid)
    wrong = ((sizes < 1) | (sizes > largest)).any(-1)
    limit = f"1 to {config.grid[0]} rows and 1 to {config.grid[1]} columns"
    if config.layout == "flat":
        wrong = wrong | (sizes.prod(-1) > config.rows)
        limit += f", {config.rows} cells at most"
    if bool(wrong.any()):
        raise SaccadeError(
            f"sizes: found {sizes[wrong][0].tolist()} (height, width), expected {limit}. "
            "Give the size of each sample's feature map."
        )
