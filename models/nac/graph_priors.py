# SPDX-License-Identifier: Apache-2.0
"""Graph priors of a circuit's links: their targets, orders of a graph's nodes (by degree, along its
eigenvectors, by the rows of another graph), and the distance under the closest order found.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.core.errors import SaccadeError, require
from saccade.models.nac.config import NACConfig
from saccade.models.nac.kernel import evaluation_bias, signature_distance

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


MARGIN = 0.8  # linked pairs stay below this distance, others above, if no links are cut


def start_signatures(config: NACConfig) -> Tensor:
    """Return the initial signatures that `signature_init` names, if it is not random.

    Shapes: -> [u s].
    """
    if config.signature_init == "prior":
        return prior_signatures(config)
    return hinge_signatures(config)


def prior_signatures(config: NACConfig) -> Tensor:
    """Return signatures whose link probabilities follow the prior as closely as possible.

    They result from a descent on the regularizer, in the prior's own order. Groups start at the
    leading eigenvectors of the wanted cosines, 1 + epsilon log(target); the others at random.

    Shapes: -> [u s], of length sqrt(s).
    """
    target = target_links(config)
    generator = torch.Generator().manual_seed(config.seed)
    start = torch.randn(config.modules, config.signature_dim, generator=generator)
    if config.graph_prior in SPECTRAL:
        cosines = 1 + config.epsilon * torch.log(target.clamp_min(config.p_min))
        cosines = cosines.clamp_min(-1).fill_diagonal_(1)
        vectors = leading_vectors(cosines, config.signature_dim, seed=config.seed)
        values = ((cosines @ vectors) * vectors).sum(0).clamp_min(1e-6)
        signatures = F.normalize(vectors * values.sqrt(), dim=-1)
        start = 0.03 * start
        start[:, : signatures.shape[1]] += signatures
    steps = 100 if config.modules <= 1024 else 30
    return _descend(F.normalize(start, dim=-1), target, config.epsilon, steps=steps)


def _descend(signatures: Tensor, target: Tensor, epsilon: float, *, steps: int) -> Tensor:
    # Adam on the sphere with a manual gradient: autograd would store ten u x u matrices.
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


def hinge_signatures(config: NACConfig, *, steps: int = 1000) -> Tensor:
    """Return signatures of which those closer than the margin are the links of one drawn graph.

    If links are cut, the margin is `truncate`. The start is orthogonal.

    Shapes: -> [u s].
    Raises: SaccadeError if the graph cannot be drawn with this many modules.
    Source: the authors' code; the paper does not say how signatures start.
    """
    adjacency = drawn_graph(config)
    generator = torch.Generator().manual_seed(config.seed)
    start = torch.empty(config.modules, config.signature_dim)
    torch.nn.init.orthogonal_(start, generator=generator)
    return hinge_descent(start, adjacency, margin=config.truncate or MARGIN, steps=steps)


def hinge_descent(
    start: Tensor, adjacency: Tensor, *, margin: float, steps: int, rate: float = 1e-3
) -> Tensor:
    """Optimize with Adam the distances that are on the wrong side of the margin.

    Shapes: start [u s], adjacency bool [u u] -> [u s].
    """
    with torch.enable_grad():
        signatures = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([signatures], lr=rate)
        for _ in range(steps):
            unit = F.normalize(signatures, dim=-1)
            distance = 1 - unit @ unit.mT
            wrong = torch.where(adjacency, distance - margin, margin - distance).clamp_min(0)
            optimizer.zero_grad()
            wrong.mean().backward()
            optimizer.step()
    return signatures.detach()


def drawn_graph(config: NACConfig) -> Tensor:
    """Draw one graph of `signature_init`'s family, with the authors' numbers.

    barabasi-albert: each module after the third links to two earlier ones, by their degree.
    planted-partition: ten groups (`graph_group` if ten do not fill the modules), linked with
    probability 0.9 inside and 0.05 outside. watts-strogatz: a ring in which each module is linked
    to the next tenth of all modules; a share of 0.4 of the links is moved.

    Shapes: -> bool [u u], symmetric, without the diagonal.
    Raises: SaccadeError if there are too few modules.
    """
    u, name = config.modules, config.signature_init
    size = u // 10 if u % 10 == 0 else config.graph_group
    if u < 4:
        raise SaccadeError(
            f"signature_init {name!r}: found {u} modules, expected at least 4 for such a graph. "
            "Set signature_init=prior, or use more modules."
        )
    rng = np.random.default_rng(config.seed)
    draws = {
        "barabasi-albert": lambda: _preferential(u, rng),
        "planted-partition": lambda: _partition(u, size, rng),
        "watts-strogatz": lambda: _small_world(u, max(2, round(0.1 * u)), rng),
    }
    links = torch.from_numpy(draws[name]())
    return links | links.mT


def _preferential(modules: int, rng: np.random.Generator, links: int = 2) -> np.ndarray:
    linked = np.zeros((modules, modules), bool)
    linked[0, 1 : links + 1] = True  # a star
    ends = [0] * links + list(range(1, links + 1))  # each module once per link
    for module in range(links + 1, modules):
        chosen: set[int] = set()
        while len(chosen) < links:
            chosen.add(ends[rng.integers(len(ends))])
        linked[module, list(chosen)] = True
        ends += [*chosen, *[module] * links]
    return linked


def _partition(modules: int, size: int, rng: np.random.Generator) -> np.ndarray:
    group = np.arange(modules) // size
    chance = np.where(group[:, None] == group, 0.9, 0.05)
    return np.triu(rng.random((modules, modules)) < chance, 1)


def _small_world(modules: int, near: int, rng: np.random.Generator) -> np.ndarray:
    links = np.zeros((modules, modules), bool)
    ring = [(a, (a + step) % modules) for step in range(1, near // 2 + 1) for a in range(modules)]
    for a, b in ring:
        links[a, b] = links[b, a] = True
    for a, b in ring:
        strangers = np.flatnonzero(~links[a])
        strangers = strangers[strangers != a]
        if rng.random() < 0.4 and len(strangers):
            links[a, b] = links[b, a] = False
            other = rng.choice(strangers)
            links[a, other] = links[other, a] = True
    return links


SPECTRAL = ("planted-partition", "ring-of-cliques")


def target_links(config: NACConfig) -> Tensor:
    """Return the prior's link probabilities, in the form that the configuration names.

    standard, with diagonal 0:
    scale-free: expected links of preferential attachment, where node j, with m links per node,
    meets the earlier node i with probability m / (2 sqrt(i j)), scaled to the requested mean
    degree. planted-partition: `inside` within groups, `outside` between them. ring-of-cliques: the
    same, and one link of probability `inside` from each clique's last to the next one's first
    module. erdos-renyi: one probability for all.

    official: scale-free: min(1, sqrt(u) / (16 sqrt(i j))), whose degree follows from the number of
    modules. The others are equal groups, including the diagonal. In a ring of cliques, the first
    module of each is certainly linked to all of its own and of the next clique, but the last clique
    is not linked to the first.

    Shapes: -> float32 [u u] symmetric; standard: within [p_min, p_max] off the diagonal.
    Raises: SaccadeError if the official form has groups that do not fill the modules.
    Source: section 2.2; Barabasi and Albert 1999, Condon and Karp 1999, Erdos and Renyi 1959;
            official: the authors' code.
    """
    if config.prior_form == "official":
        return _official(config)
    u = config.modules
    if config.graph_prior == "scale-free":
        target = _scale_free(u, min(config.graph_degree, 0.9 * max(1, u - 1)))
    elif config.graph_prior == "erdos-renyi":
        target = torch.full((u, u), config.graph_degree / max(1, u - 1))
    else:
        target = _groups(config)
        if config.graph_prior == "ring-of-cliques":
            target = target.masked_fill(_bridges(u, config.graph_group), config.graph_inside)
    target = target.float().clamp(config.p_min, config.p_max)
    return target.fill_diagonal_(0)


def _groups(config: NACConfig) -> Tensor:
    group = torch.arange(config.modules) // config.graph_group
    same = group[:, None] == group
    return torch.where(same, config.graph_inside, config.graph_outside)


def _scale_free(modules: int, degree: float) -> Tensor:
    root = torch.arange(1, modules + 1).rsqrt()
    shape = torch.outer(root, root).fill_diagonal_(0)
    scale, links = degree / 2, shape
    for _ in range(20):  # probabilities stop at 0.95, so the hubs' excess goes to the others
        links = (scale * shape).clamp_(max=0.95)
        mean_degree = links.sum(dtype=torch.float64).item() / modules
        if modules < 2 or abs(mean_degree / degree - 1) < 1e-3:
            break
        scale *= degree / mean_degree
    return links


def _bridges(modules: int, size: int) -> Tensor:
    bridges = torch.zeros(modules, modules, dtype=torch.bool)
    cliques = math.ceil(modules / size)
    for clique in range(cliques if cliques > 2 else cliques - 1):
        last = min((clique + 1) * size, modules) - 1
        first = (last + 1) % modules
        bridges[last, first] = bridges[first, last] = True
    return bridges


def _official(config: NACConfig) -> Tensor:
    u, size = config.modules, config.graph_group
    if config.graph_prior == "scale-free":
        root = torch.arange(1, u + 1, dtype=torch.float64).rsqrt()
        return (math.sqrt(u) / 16 * torch.outer(root, root)).clamp(max=1).float()
    if u % size:
        raise SaccadeError(
            f"graph prior {config.graph_prior!r} in its official form: found {u} modules in "
            f"groups of {size}, expected groups that fill them. Set graph_group to a divisor of "
            f"{u} (the authors have ten groups), or prior_form=standard."
        )
    target = _groups(config).float()
    if config.graph_prior == "ring-of-cliques":
        for first in range(0, u, size):
            target[first, first : first + 2 * size] = 1
            target[first : first + 2 * size, first] = 1
    return target


class GraphStructure:
    """The loss that pulls a circuit's links to the prior, with the permutation between them.

    `matching: sorted`: both matrices are sorted, by expected degree (scale-free, erdos-renyi) or
    spectrally (partition, ring), and compared entry by entry. One eigenvector tells little about
    many groups, so a spectral permutation replaces the previous one (initially the prior's own
    order) only if it is closer. A ring's order has no beginning, so it is tried starting from each
    module of a clique. `matching: hungarian`: rows are assigned to rows.

    The permutation is constant in the loss and is kept for `graph_refresh_steps` calls.

    Source: section 2.2, Graph Structure Regularizer.
    """

    def __init__(self, config: NACConfig) -> None:
        self.config = config
        self._target: Tensor | None = None  # sorted if the matching sorts
        self._aligned: list[Tensor] = []  # per bandwidth, permuted onto the modules
        self._calls = 0

    def loss(self, signatures: Tensor, epsilons: Sequence[float | Tensor] | None = None) -> Tensor:
        """Return the configured loss of the link probabilities, summed over distinct bandwidths.

        Shapes: signatures [u s] -> scalar, 0 if there is only one module, or no such loss.
        """
        config = self.config
        if signatures.shape[0] < 2 or config.structure_loss == "none":
            return signatures.sum() * 0
        distance = signature_distance(signatures, signatures)
        epsilons = epsilons or [config.epsilon]
        scaled = [-evaluation_bias(distance, epsilon, config.truncate) for epsilon in epsilons]
        if not self._aligned or self._calls % config.graph_refresh_steps == 0:
            pairs = enumerate(scaled)
            self._aligned = [self.align(pair.detach(), which) for which, pair in pairs]
        self._calls += 1
        losses = [
            structure_loss(
                one_distance, target, kind=config.structure_loss, clip=config.structure_clip
            )
            for one_distance, target in zip(scaled, self._aligned, strict=True)
        ]
        return torch.stack(losses).sum()

    def state(self) -> dict[str, Any]:
        """Return the state of the current permutation, for resuming a training run."""
        return {"aligned": self._aligned, "calls": self._calls}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._aligned = state["aligned"]
        self._calls = state["calls"]

    @torch.no_grad()
    def align(self, scaled_distance: Tensor, which: int = 0) -> Tensor:
        """Return the target in the order of the modules.

        Shapes: scaled_distance [u u], -log of the link probabilities -> [u u].
        """
        links = torch.exp(-scaled_distance)
        if self._target is None:
            self._target = self._sorted_target()
        target = self._target.to(links)
        if self.config.matching == "hungarian":
            return permuted(target, hungarian_order(links, target))
        if self.config.graph_prior not in SPECTRAL:
            return permuted(target, degree_order(links))
        circular = self.config.graph_prior == "ring-of-cliques"
        order = spectral_order(links, circular=circular, seed=self.config.seed)
        starts = range(min(self.config.graph_group, links.shape[0])) if circular else range(1)
        candidates = [permuted(target, order.roll(start)) for start in starts]
        candidates.append(self._aligned[which].to(links) if self._aligned else target)
        kind = self.config.structure_loss
        return min(
            candidates,
            key=lambda candidate: structure_loss(scaled_distance, candidate, kind=kind).item(),
        )

    def _sorted_target(self) -> Tensor:
        # Groups and cliques are already in spectral order: one after the other.
        target = target_links(self.config)
        if self.config.graph_prior in SPECTRAL or self.config.matching == "hungarian":
            return target
        order = degree_order(target)
        return target[order][:, order]


def structure_loss(
    scaled_distance: Tensor, target: Tensor, *, kind: str = "cross-entropy", clip: float = 0.0
) -> Tensor:
    """Return the mean over pairs of how far P is from the target t, with log P = -scaled_distance.

    cross-entropy: -(t log P + (1 - t) log(1 - P)), off the diagonal. mse: (P - t)^2. kl: the
    divergence of two links that exist or not, with P at least 1e-6 from 0 and 1. mse and kl include
    the diagonal. Terms below `clip` count as `clip`, without a gradient.

    Shapes: scaled_distance and target [u u] -> scalar.
    Source: mse, kl and clip: the authors' code.
    """
    log_p, u = -scaled_distance, len(target)
    share, counted = u * u, torch.ones_like(target)
    if kind == "cross-entropy":
        log_not = torch.log(-torch.expm1(log_p.clamp(max=-1e-6)))
        terms = -(target * log_p + (1 - target) * log_not)
        share, counted = u * (u - 1), counted - torch.eye(u, dtype=target.dtype).to(target.device)
    elif kind == "mse":
        terms = (log_p.exp() - target).square()
    else:
        p = log_p.exp().clamp(1e-6, 1 - 1e-6)
        entropy = torch.xlogy(target, target) + torch.xlogy(1 - target, 1 - target)
        terms = entropy - target * p.log() - (1 - target) * torch.log1p(-p)
    return ((terms.clamp_min(clip) if clip else terms) * counted).sum() / share


def repulsion(signatures: Tensor, distance: float) -> Tensor:
    """Return minus the sum of the distances below `distance`: it pushes close pairs apart.

    Shapes: signatures [u s] -> scalar.
    Source: the authors' code.
    """
    apart = signature_distance(signatures, signatures)
    close = torch.tril(apart < distance, diagonal=-1)
    return -(apart * close).sum()
