# SPDX-License-Identifier: Apache-2.0
"""Which link probabilities a graph prior wants, and how far a circuit is from them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.models.nac_config import NACConfig
from saccade.models.skmdpa import signature_distance

EXACT_MODULES = 1024  # above this many modules eigenvectors are iterated for, not decomposed
SPECTRAL = ("planted-partition", "ring-of-cliques")


def target_links(config: NACConfig) -> Tensor:
    """The prior's link probabilities in the prior's own order, diagonal 0.

    scale-free: expected links of preferential attachment, where node j of m links each meets the
    earlier node i with probability m / (2 sqrt(i j)), scaled to the mean degree asked for.
    planted-partition: `inside` within groups, `outside` between them. ring-of-cliques: the same,
    and one link of probability `inside` from each clique's last to the next one's first module.
    erdos-renyi: one probability for all.

    Shapes: -> [u u] symmetric, off the diagonal within [p_min, p_max].
    Source: section 2.2; Barabasi and Albert 1999, Condon and Karp 1999, Erdos and Renyi 1959.
    """
    u = config.modules
    index = torch.arange(u)
    group = index // config.graph_group
    if config.graph_prior == "scale-free":
        target = _scale_free(u, min(config.graph_degree, 0.9 * max(1, u - 1)))
    elif config.graph_prior == "erdos-renyi":
        target = torch.full((u, u), config.graph_degree / max(1, u - 1))
    else:
        same = group[:, None] == group
        target = torch.where(same, config.graph_inside, config.graph_outside)
        if config.graph_prior == "ring-of-cliques":
            target = target.masked_fill(_bridges(u, config.graph_group), config.graph_inside)
    target = target.float().clamp(config.p_min, config.p_max)
    return target.fill_diagonal_(0)


def _scale_free(modules: int, degree: float) -> Tensor:
    root = torch.arange(1, modules + 1).rsqrt()
    shape = torch.outer(root, root).fill_diagonal_(0)
    scale, links = degree / 2, shape
    for _ in range(20):  # probabilities end at 0.95, so the hubs' excess goes to the others
        links = (scale * shape).clamp_(max=0.95)
        found = links.sum(dtype=torch.float64).item() / modules
        if modules < 2 or abs(found / degree - 1) < 1e-3:
            break
        scale *= degree / found
    return links


def _bridges(modules: int, size: int) -> Tensor:
    bridges = torch.zeros(modules, modules, dtype=torch.bool)
    cliques = math.ceil(modules / size)
    for clique in range(cliques if cliques > 2 else cliques - 1):
        last = min((clique + 1) * size, modules) - 1
        first = (last + 1) % modules
        bridges[last, first] = bridges[first, last] = True
    return bridges


def degree_order(links: Tensor) -> Tensor:
    """Modules by descending expected degree (links to others), ties by index.

    Shapes: links [u u], the diagonal does not count -> int64 [u].
    """
    links = links.double()
    return torch.argsort(links.sum(-1) - links.diagonal(), descending=True, stable=True)


def spectral_order(links: Tensor, *, circular: bool = False, seed: int = 0) -> Tensor:
    """Modules along the graph: by the Fiedler vector of the normalised Laplacian.

    A ring has two such vectors of one eigenvalue, and each alone folds it in half: `circular`
    sorts by the angle in their plane.

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
    """Eigenvectors of the algebraically largest eigenvalues, largest first.

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


class GraphStructure:
    """The distance between a circuit's links and its prior, under the closest permutation found.

    Both matrices are sorted, by expected degree (scale-free, erdos-renyi) or spectrally (partition,
    ring), and compared entry by entry. The permutation is a constant of the loss and is kept for
    `graph_refresh_steps` calls. One eigenvector says little of many groups, so a spectral
    permutation replaces the one before it (at first: the prior's own order) only if it is closer;
    a ring's order has no beginning, so it is tried from each module of a clique on.

    Source: section 2.2, Graph Structure Regularizer.
    """

    def __init__(self, config: NACConfig) -> None:
        self.config = config
        self._target: Tensor | None = None  # sorted
        self._aligned: Tensor | None = None  # permuted onto the modules
        self._calls = 0

    def loss(self, signatures: Tensor) -> Tensor:
        """Binary cross-entropy of the link probabilities against the target, off the diagonal.

        Shapes: signatures [u s] -> scalar, 0 where there is only one module.
        """
        if signatures.shape[0] < 2:
            return signatures.sum() * 0
        scaled = signature_distance(signatures, signatures) / self.config.epsilon
        if self._aligned is None or self._calls % self.config.graph_refresh_steps == 0:
            self._aligned = self.align(scaled.detach())
        self._calls += 1
        return structure_loss(scaled, self._aligned)

    def state(self) -> dict[str, Any]:
        """What a resumed training run needs of the permutation in use."""
        return {"aligned": self._aligned, "calls": self._calls}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._aligned, self._calls = state["aligned"], state["calls"]

    @torch.no_grad()
    def align(self, scaled_distance: Tensor) -> Tensor:
        """The target in the order of the modules.

        Shapes: scaled_distance [u u], -log of the link probabilities -> [u u].
        """
        links = torch.exp(-scaled_distance)
        if self._target is None:
            self._target = self._sorted_target().to(links)
        target = self._target.to(links)
        if self.config.graph_prior not in SPECTRAL:
            return _permuted(target, degree_order(links))
        circular = self.config.graph_prior == "ring-of-cliques"
        order = spectral_order(links, circular=circular, seed=self.config.seed)
        starts = range(min(self.config.graph_group, links.shape[0])) if circular else range(1)
        tried = [_permuted(target, order.roll(start)) for start in starts]
        tried.append(target if self._aligned is None else self._aligned.to(links))
        return min(tried, key=lambda each: structure_loss(scaled_distance, each).item())

    def _sorted_target(self) -> Tensor:
        # Groups and cliques stand in spectral order already: one after the other.
        target = target_links(self.config)
        if self.config.graph_prior in SPECTRAL:
            return target
        order = degree_order(target)
        return target[order][:, order]


def _permuted(target: Tensor, order: Tensor) -> Tensor:
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    return target[rank][:, rank]


def structure_loss(scaled_distance: Tensor, target: Tensor) -> Tensor:
    """Mean over pairs of -(t log P + (1 - t) log(1 - P)) with log P = -scaled_distance.

    Shapes: scaled_distance and target [u u] -> scalar.
    """
    log_p = -scaled_distance
    log_not = torch.log(-torch.expm1(log_p.clamp(max=-1e-6)))
    entropy = -(target * log_p + (1 - target) * log_not)
    u = target.shape[0]
    off_diagonal = 1 - torch.eye(u, dtype=target.dtype, device=target.device)
    return (entropy * off_diagonal).sum() / (u * (u - 1))


def prior_signatures(config: NACConfig) -> Tensor:
    """Signatures whose link probabilities follow the prior as closely as their number allows.

    A descent on the regularizer, in the prior's own order. Groups start at the leading
    eigenvectors of the wanted cosines, 1 + epsilon log(target); the others at random.

    Shapes: -> [u s], of length sqrt(s).
    """
    target = target_links(config)
    generator = torch.Generator().manual_seed(config.seed)
    start = torch.randn(config.modules, config.signature_dim, generator=generator)
    if config.graph_prior in SPECTRAL:
        wanted = 1 + config.epsilon * torch.log(target.clamp_min(config.p_min))
        wanted = wanted.clamp_min(-1).fill_diagonal_(1)
        vectors = leading_vectors(wanted, config.signature_dim, seed=config.seed)
        values = ((wanted @ vectors) * vectors).sum(0).clamp_min(1e-6)
        found = F.normalize(vectors * values.sqrt(), dim=-1)
        start = 0.03 * start
        start[:, : found.shape[1]] += found
    steps = 100 if config.modules <= 1024 else 30
    return _descend(F.normalize(start, dim=-1), target, config.epsilon, steps=steps)


def _descend(signatures: Tensor, target: Tensor, epsilon: float, *, steps: int) -> Tensor:
    # Adam on the sphere with the gradient by hand: autograd would keep ten u x u matrices.
    step, first, second = 0.03, torch.zeros_like(signatures), torch.zeros_like(signatures)
    for index in range(1, steps + 1):
        links = torch.exp((signatures @ signatures.mT - 1) / epsilon).clamp_(max=1 - 1e-4)
        slope = target - (1 - target) * links / (1 - links)
        gradient = -slope.fill_diagonal_(0) @ signatures
        gradient -= (gradient * signatures).sum(-1, keepdim=True) * signatures
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient.square()
        scale = (second / (1 - 0.95**index)).mean().sqrt() + 1e-12
        move = first / (1 - 0.9**index) / scale
        signatures = F.normalize(signatures - step * (1 - index / (steps + 1)) * move, dim=-1)
    return signatures * math.sqrt(signatures.shape[-1])
