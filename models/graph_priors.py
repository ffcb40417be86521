# SPDX-License-Identifier: Apache-2.0
"""Which link probabilities a graph prior wants, and how far a circuit is from them."""

import math

import torch
from saccade.models.nac_config import NACConfig
from saccade.models.skmdpa import link_probability, signature_distance
from torch import Tensor
from torch.nn import functional as F

EXACT_MODULES = 256  # above this many modules eigenvectors are iterated for, not decomposed
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
    rank = torch.arange(1, modules + 1, dtype=torch.float64)
    shape = 1 / torch.sqrt(rank[:, None] * rank)
    shape.fill_diagonal_(0)
    scale = torch.tensor(degree / 2, dtype=torch.float64)
    for _ in range(20):  # probabilities end at 1, so the hubs' excess goes to the others
        found = (scale * shape).clamp(max=0.95).sum() / modules
        scale = scale * degree / found.clamp_min(1e-12)
    return (scale * shape).clamp(max=0.95)


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
    `graph_refresh_steps` calls.

    Source: section 2.2, Graph Structure Regularizer.
    """

    def __init__(self, config: NACConfig) -> None:
        self.config = config
        self._sorted: Tensor | None = None
        self._aligned: Tensor | None = None
        self._calls = 0

    def loss(self, signatures: Tensor) -> Tensor:
        """Binary cross-entropy of the link probabilities against the target, off the diagonal.

        Shapes: signatures [u s] -> scalar, 0 where there is only one module.
        """
        u = signatures.shape[0]
        if u < 2:
            return signatures.sum() * 0
        distance = signature_distance(signatures, signatures)
        if self._aligned is None or self._calls % self.config.graph_refresh_steps == 0:
            links = link_probability(distance.detach(), self.config.epsilon)
            self._aligned = self._align(links)
        self._calls += 1
        return structure_loss(distance / self.config.epsilon, self._aligned.to(distance))

    def _align(self, links: Tensor) -> Tensor:
        if self._sorted is None:
            target = target_links(self.config)
            order = self._order(target)
            self._sorted = target[order][:, order]
        order = self._order(links)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(order.numel(), device=order.device)
        rank = rank.to(self._sorted.device)
        return self._sorted[rank][:, rank]

    def _order(self, links: Tensor) -> Tensor:
        if self.config.graph_prior not in SPECTRAL:
            return degree_order(links)
        circular = self.config.graph_prior == "ring-of-cliques"
        return spectral_order(links, circular=circular, seed=self.config.seed)


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

    The wanted cosines 1 + epsilon log(target) are a Gram matrix; its leading eigenvectors, scaled
    and brought to length 1, are the start of a short descent on the regularizer.

    Shapes: -> [u s].
    """
    target = target_links(config)
    gram = 1 + config.epsilon * torch.log(target.clamp_min(config.p_min))
    gram = gram.clamp_min(-1).fill_diagonal_(1)
    vectors = leading_vectors(gram, config.signature_dim, seed=config.seed)
    values = ((gram @ vectors) * vectors).sum(0).clamp_min(1e-6)
    signatures = F.normalize(vectors * values.sqrt(), dim=-1)
    missing = config.signature_dim - signatures.shape[1]
    signatures = F.pad(signatures, (0, missing)) if missing > 0 else signatures
    generator = torch.Generator().manual_seed(config.seed)
    noise = torch.randn(signatures.shape, generator=generator)
    signatures = F.normalize(signatures + 0.01 * noise, dim=-1)
    return _descend(signatures, target, config)


def _descend(signatures: Tensor, target: Tensor, config: NACConfig) -> Tensor:
    if config.modules < 2:
        return signatures
    steps = 60 if config.modules <= 1024 else 10
    signatures = signatures.clone().requires_grad_()
    with torch.enable_grad():
        optimizer = torch.optim.Adam([signatures], lr=0.02)
        for _ in range(steps):
            loss = structure_loss(
                signature_distance(signatures, signatures) / config.epsilon, target
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return F.normalize(signatures.detach(), dim=-1) * math.sqrt(config.signature_dim)
