# SPDX-License-Identifier: Apache-2.0
"""TVMax on any graph in torch: an accelerated dual iteration with fused groups and an error bound.

The dual variable u gives each edge a flow of at most lam. What remains of z is x = z - D'u, and
the answer is the point of the simplex nearest to x. Everything is float64, batch first.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from saccade.plugins.sparsemax.eager import threshold
from saccade.plugins.tvmax.reference import MASKED_AT_MOST

# Weights that differ by at most the first are equal, so that tied cells form one group (Proposition
# 2). Weights below the second are rounding in a cell on the threshold.
_EQUAL, _NO_WEIGHT = 1e-12, 1e-15
# Rounds before the bound is first computed, and how this interval grows.
_FIRST_LOOK, _GROWTH = 8, 1.2


@dataclass(frozen=True)
class Edges:
    """Edges of a graph, and the maps from vertex values to edge values and back."""

    vertices: int
    first: Tensor  # [e]
    second: Tensor  # [e]
    exists: Tensor  # [e]: the others only fill the layout and never carry a flow

    def differences(self, x: Tensor) -> Tensor:
        """Return the difference across each edge.

        Shapes: x [b n] -> [b e].
        """
        return x[:, self.first] - x[:, self.second]

    def pulls(self, u: Tensor) -> Tensor:
        """Apply the transpose of `differences`.

        Shapes: u [b e] -> [b n].
        """
        out = u.new_zeros(len(u), self.vertices)
        return out.index_add_(1, self.first, u).index_add_(1, self.second, u, alpha=-1)

    def step(self) -> float:
        """One over a bound on the largest eigenvalue of D D'."""
        present = self.exists.to(torch.int64)
        degree = self.first.new_zeros(self.vertices)
        degree.index_add_(0, self.first, present).index_add_(0, self.second, present)
        both = (degree[self.first] + degree[self.second]) * present
        return 1 / max(1, int(both.max())) if len(both) else 1.0

    def components(self, fused: Tensor) -> Tensor:
        """Return the smallest vertex that each vertex is connected to by fused edges.

        Shapes: fused [b e], bool -> [b n].
        """
        n = self.vertices
        labels = torch.arange(n, device=fused.device).repeat(len(fused), 1)
        ends = self.first.expand(fused.shape), self.second.expand(fused.shape)
        while True:
            here, there = labels.gather(1, ends[0]), labels.gather(1, ends[1])
            lower = torch.where(fused, torch.minimum(here, there), n)
            numbers = labels
            # The ends themselves, and the vertices that they were joined with before.
            for target in (*ends, here, there):
                numbers = numbers.scatter_reduce(1, target, lower, "amin")
            numbers = numbers.gather(1, numbers)
            if torch.equal(numbers, labels):
                return numbers
            labels = numbers


@dataclass(frozen=True)
class GridEdges(Edges):
    """The edges of an h x w grid, with slices instead of index lookups."""

    h: int
    w: int

    def differences(self, x: Tensor) -> Tensor:
        grid = x.view(-1, self.h, self.w)
        out = x.new_zeros(len(x), 2, self.h, self.w)
        torch.sub(grid[:, :-1], grid[:, 1:], out=out[:, 0, :-1])
        torch.sub(grid[:, :, :-1], grid[:, :, 1:], out=out[:, 1, :, :-1])
        return out.flatten(1)

    def pulls(self, u: Tensor) -> Tensor:
        flow = u.view(-1, 2, self.h, self.w)
        out = flow[:, 0] + flow[:, 1]
        out[:, 1:] -= flow[:, 0, :-1]
        out[:, :, 1:] -= flow[:, 1, :, :-1]
        return out.flatten(1)


def grid_edges(h: int, w: int, device: torch.device) -> GridEdges:
    """Return each cell's edge down and its edge to the right."""
    cell = torch.arange(h * w, device=device)
    down, right = cell < (h - 1) * w, cell % w < w - 1
    second = torch.cat([torch.where(down, cell + w, cell), torch.where(right, cell + 1, cell)])
    return GridEdges(h * w, cell.repeat(2), second, torch.cat([down, right]), h, w)


@dataclass(frozen=True)
class _Problem:
    """The unfinished samples: inputs and state of the iteration."""

    index: Tensor  # [b], position in the batch
    z: Tensor  # [b n]
    cells: Tensor  # [b n], which vertices are included
    bound: Tensor  # [b e], largest flow
    u: Tensor  # [b e], flow
    ahead: Tensor  # [b e], flow extrapolated
    age: Tensor  # [b 1], grows until a restart

    def kept(self, rows: Tensor) -> "_Problem":
        return replace(
            self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)}
        )


def solve(
    z: Tensor, inside: Tensor, edges: Edges, lam: float, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights, a bound on their Euclidean error, and the fused group of each vertex.

    Shapes: z [b n], inside [b n] (which vertices are part of the sample)
        -> p [b n] float64, error [b] float64, groups [b n] int32 (-1: not included).
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), Propositions 1 and 2;
        Beck and Teboulle 2009 (fast gradient-based total variation), section 4.
    """
    z = z.double()
    free = z > MASKED_AT_MOST
    broken = (inside & (z.isnan() | (z == torch.inf))).any(1)
    broken |= inside.any(1) & ~(inside & free).any(1)
    cells = inside & free & ~broken[:, None]
    masked = (inside & ~free).double()
    # A masked neighbor pulls with the full lam.
    z = z.masked_fill(~cells, 0) + lam * edges.pulls(edges.differences(masked))
    together = cells[:, edges.first] & cells[:, edges.second] & edges.exists
    idle = ~cells.any(1, keepdim=True)
    z = (z - z.masked_fill(~cells, -torch.inf).amax(1, keepdim=True)).masked_fill(~cells, 0)
    bound = lam * together.double()
    start = torch.zeros_like(bound)
    problem = _Problem(
        torch.arange(len(z), device=z.device),
        z,
        cells | idle,
        bound,
        start,
        start,
        z.new_ones(len(z), 1),
    )
    p, error, groups = _iterate(problem, edges, tolerance, max_iterations)
    p = p.masked_fill(~cells | (p <= _NO_WEIGHT * (1 - z.amin(1, keepdim=True))), 0)
    here, there = p[:, edges.first], p[:, edges.second]
    tied = (here > 0) & (there > 0) & ((here - there).abs() <= _EQUAL)
    joined = groups[:, edges.first] == groups[:, edges.second]
    groups = edges.components((bound > 0) & (joined | tied))
    p = p.masked_fill(inside & broken[:, None], torch.nan)
    return p, error.masked_fill(broken, torch.nan), groups.masked_fill(~cells, -1).int()


def _iterate(
    problem: _Problem, edges: Edges, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    p = torch.zeros_like(problem.z)
    error = problem.z.new_full((len(p),), torch.inf)
    groups = torch.zeros_like(p, dtype=torch.int64)
    step, done, look = edges.step(), 0, 0.0
    while True:
        solution, bound, joined = _certified(problem, edges, tolerance)
        better = bound < error[problem.index]
        rows = problem.index[better]
        p[rows], error[rows], groups[rows] = solution[better], bound[better], joined[better]
        # A finished sample is not processed any more, so that others do not affect it.
        problem = problem.kept(bound > tolerance)
        if done == max_iterations or len(problem.index) == 0:
            return p, error, groups
        look = max(look * _GROWTH, done + _FIRST_LOOK)
        while done < min(int(look), max_iterations):
            problem = _round(problem, edges, step)
            done += 1


def _round(now: _Problem, edges: Edges, step: float) -> _Problem:
    x = now.z - edges.pulls(now.ahead)
    u = torch.clamp(now.ahead + step * edges.differences(x), -now.bound, now.bound)
    moved = u - now.u
    # Momentum against the step is dropped (O'Donoghue and Candes 2015).
    turned = ((now.ahead - u) * moved).sum(1, keepdim=True) > 0
    age = torch.where(turned, 1, (1 + torch.sqrt(1 + 4 * now.age**2)) / 2)
    momentum = torch.where(turned, 0, (now.age - 1) / age)
    return replace(now, u=u, ahead=u + momentum * moved, age=age)


def _certified(now: _Problem, edges: Edges, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the better of the point from u and the same with averaged groups."""
    x = now.z - edges.pulls(now.u)
    groups = edges.components(now.u.abs() < now.bound)
    size = torch.zeros_like(x).scatter_add_(1, groups, torch.ones_like(x))
    total = torch.zeros_like(x).scatter_add_(1, groups, x)
    mean = (total / size.clamp_(min=1)).gather(1, groups)
    plain, below = _nearest(x, now.cells)
    fused, _ = _nearest(mean, now.cells)
    bounds = []
    for p in (plain, fused):
        steps = edges.differences(p)
        # The gap between the primal value at p and the dual value at u; each term is >= 0.
        gap = 0.5 * (p - plain).square().sum(1) + (p * below).sum(1)
        gap += (now.bound * steps.abs() - now.u * steps).clamp_(min=0).sum(1)
        bounds.append((2 * gap).sqrt())
    take = (bounds[1] <= bounds[0]) | (bounds[1] <= tolerance)
    p = torch.where(take[:, None], fused, plain)
    return p, torch.where(take, bounds[1], bounds[0]), groups


def _nearest(x: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest point of the simplex, and how far each cell is below the threshold."""
    z = x.masked_fill(~cells, -torch.inf)
    z = z - z.amax(1, keepdim=True)
    above = z - threshold(z)
    return above.clamp(min=0), (-above).clamp_(min=0).masked_fill(~cells, 0)
