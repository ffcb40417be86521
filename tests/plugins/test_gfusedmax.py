# SPDX-License-Identifier: Apache-2.0
"""Generalized fused sparse attention on any graph."""

from typing import Any

import numpy as np
import pytest
import torch

from saccade.core.errors import SaccadeError, ShapeError
from saccade.plugins.ops import gfusedmax, sparsemax, tvmax
from saccade.plugins.tvmax.reference import fused, grid_edges

NONE = torch.zeros(0, 2, dtype=torch.int64)
CHAIN = torch.stack([torch.arange(11), torch.arange(1, 12)], 1)
STAR = torch.stack([torch.zeros(11, dtype=torch.int64), torch.arange(1, 12)], 1)
COMPLETE = torch.combinations(torch.arange(12))
TWO_PARTS = torch.tensor([[0, 5], [5, 3], [3, 0], [7, 8], [11, 8], [8, 9]])
GRAPHS = {"chain": CHAIN, "star": STAR, "complete": COMPLETE, "two parts": TWO_PARTS, "none": NONE}


def logits(*shape: int, seed: int = 0, scale: float = 0.2) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("lam", [0.0, 0.01, 0.1, 3.0])
def test_agrees_with_the_exact_splitting_of_the_graph(graph: str, lam: float) -> None:
    z, edges = logits(4, 12), GRAPHS[graph]
    p, error = gfusedmax(z, edges, lam, return_error=True)
    for row, solution, bound in zip(z, p, error, strict=True):
        values, _, _ = fused(row.numpy(), edges.numpy(), lam)
        distance = float((solution - sparsemax(torch.from_numpy(values))).norm())
        assert distance <= float(bound) + 1e-9
        assert bound <= 1e-6


def test_a_grid_is_tvmax_and_no_edge_is_sparsemax() -> None:
    z = logits(2, 3, 30)
    grid = torch.from_numpy(grid_edges(5, 6))
    expected = tvmax(z.unflatten(-1, (5, 6)), 0.07).flatten(-2)
    torch.testing.assert_close(gfusedmax(z, grid, 0.07), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(gfusedmax(z, NONE, 0.07), sparsemax(z))
    shuffled = grid[torch.randperm(len(grid), generator=torch.Generator().manual_seed(1))].flip(1)
    torch.testing.assert_close(gfusedmax(z, shuffled, 0.07), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("graph", GRAPHS)
def test_gradient_is_the_mean_of_each_group(graph: str) -> None:
    z = logits(2, 12, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: gfusedmax(z, GRAPHS[graph], 0.04), z)


def test_a_masked_vertex_pulls_its_neighbours_down() -> None:
    z = logits(12, seed=4)
    z[5] = -torch.inf
    lowered = z.clone()
    lowered[[4, 6]] -= 0.05
    kept = torch.cat([torch.arange(5), torch.arange(6, 12)])
    rest = torch.cat([CHAIN[:4], CHAIN[6:] - 1])
    p = gfusedmax(z, CHAIN, 0.05)
    assert p[5] == 0
    expected = gfusedmax(lowered[kept], rest, 0.05)
    torch.testing.assert_close(p[kept], expected, atol=2e-6, rtol=0)


def test_batch_mates_types_and_empty_batches() -> None:
    z = logits(5, 12, seed=5)
    alone = torch.stack([gfusedmax(row, CHAIN, 0.05) for row in z])
    torch.testing.assert_close(gfusedmax(z, CHAIN, 0.05), alone, atol=1e-14, rtol=0)
    half = gfusedmax(z.half(), CHAIN, 0.05)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.double(), alone, atol=2e-3, rtol=0)
    assert gfusedmax(z[:0], CHAIN, 0.05).shape == (0, 12)
    z[1, 2] = torch.nan
    broken = gfusedmax(z, CHAIN, 0.05)
    assert broken[1].isnan().all()
    torch.testing.assert_close(broken[[0, 2, 3, 4]], alone[[0, 2, 3, 4]], atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    ("edges", "error", "words"),
    [
        ([[0, 12]], SaccadeError, r"edges has \[0, 12\], expected vertices from 0 to 11"),
        ([[-1, 0]], SaccadeError, r"edges has \[-1, 0\]"),
        ([[3, 3]], SaccadeError, "expected two different vertices"),
        ([[1, 2], [4, 5], [2, 1]], SaccadeError, r"edges has \[1, 2\] more than once"),
        ([[1, 2, 3]], ShapeError, r"int64 \[1, 3\], expected int64 \[e 2\]"),
        ([[1.0, 2.0]], ShapeError, r"edges is float32 \[1, 2\]"),
    ],
)
def test_wrong_edges_are_explained(edges: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gfusedmax(logits(2, 12), torch.tensor(edges))


def test_wrong_logits_are_explained() -> None:
    with pytest.raises(ShapeError, match=r"z has shape \[\]"):
        gfusedmax(torch.tensor(1.0), NONE)
    with pytest.raises(SaccadeError, match="z is int32, expected float32"):
        gfusedmax(torch.zeros(3, dtype=torch.int32), NONE)
    with pytest.raises(SaccadeError, match="lam is -1"):
        gfusedmax(logits(3), NONE, -1)


def test_large_graph_is_certified() -> None:
    generator = np.random.default_rng(0)
    pairs = np.unique(np.sort(generator.integers(0, 400, (900, 2)), axis=1), axis=0)
    edges = torch.from_numpy(pairs[pairs[:, 0] != pairs[:, 1]])
    p, error = gfusedmax(logits(2, 400), edges, 0.05, return_error=True)
    assert (error <= 1e-6).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(2, dtype=torch.float64))
