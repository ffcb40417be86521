# SPDX-License-Identifier: Apache-2.0
"""Orders of a graph's nodes: by degree, along its eigenvectors, by the rows of another graph."""

import numpy as np
import torch
from torch import Tensor

from saccade.core.errors import require

EXACT_MODULES = 1024  # with more modules, eigenvectors come from an iteration


def degree_order(links: Tensor) -> Tensor:
    """Return modules by descending expected degree (links to others), ties by index.

    Shapes: links [u u], the diagonal does not count -> int64 [u].
    """
    links = links.double()
    return torch.argsort(links.sum(-1) - links.diagonal(), descending=True, stable=True)


def spectral_order(links: Tensor, *, circular: bool = False, seed: int = 0) -> Tensor:
    """Return modules along the graph: by the Fiedler vector of the normalized Laplacian.

    A ring has two such vectors with the same eigenvalue, and each alone folds it in half:
    `circular` sorts by the angle in their plane.

    Shapes: links [u u], the diagonal does not count -> int64 [u].
    """
    u = links.shape[0]
    if u < 3:
        return torch.arange(u, device=links.device)
    affinity = links - torch.diag(links.diagonal())
    scale = affinity.sum(-1).clamp_min(1e-12).rsqrt()
    affinity = scale[:, None] * affinity * scale
    vectors = leading_vectors(affinity, 3, seed=seed) * scale[:, None]
    if circular:
        return torch.argsort(torch.atan2(vectors[:, 2], vectors[:, 1]), stable=True)
    return torch.argsort(vectors[:, 1], stable=True)


def leading_vectors(matrix: Tensor, count: int, *, seed: int, steps: int = 60) -> Tensor:
    """Return eigenvectors of the algebraically largest eigenvalues, largest first.

    Shapes: matrix [u u] symmetric -> [u min(count, u)].
    """
    u = matrix.shape[0]
    if u <= EXACT_MODULES:
        return torch.linalg.eigh(matrix.double())[1].flip(-1)[:, :count].to(matrix.dtype)
    # Subspace iteration on matrix + shift I, whose spectrum is positive, with spare vectors.
    shift = matrix.abs().sum(-1).max().clamp_max(float(matrix.norm()))
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(u, min(u, 2 * count + 8), generator=generator).to(matrix)
    for _ in range(steps):
        basis = torch.linalg.qr(matrix @ basis + shift * basis)[0]
    _, inner = torch.linalg.eigh(basis.mT @ matrix @ basis)
    return (basis @ inner.flip(-1))[:, :count]


def hungarian_order(links: Tensor, target: Tensor) -> Tensor:
    """Return the module for each place of the target such that all rows are closest in total.

    Rows are compared as they are; their columns are not permuted.

    Shapes: links and target [u u] -> int64 [u].
    Raises: MissingPackage if scipy is not installed.
    Source: Kuhn 1955, on the mean squared distance of rows as in the authors' code.
    """
    assign = require("scipy.optimize", extra="bench").linear_sum_assignment
    rows, targets = (matrix.detach().double().cpu().numpy() for matrix in (links, target))
    squares = np.square(targets).sum(1)[:, None] + np.square(rows).sum(1)
    _, order = assign((squares - 2 * targets @ rows.T) / len(rows))
    return torch.from_numpy(order).to(links.device)


def permuted(target: Tensor, order: Tensor) -> Tensor:
    """Return the target in the modules' order; `order` has the module of each of its places.

    Shapes: target [u u], order int64 [u] -> [u u].
    """
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    return target[rank][:, rank]
