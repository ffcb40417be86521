# SPDX-License-Identifier: Apache-2.0
"""Where signatures start: at the graph prior, or at one drawn graph as in the authors' code."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.errors import SaccadeError
from saccade.models.nac.config import NACConfig
from saccade.models.nac.graph_orders import leading_vectors
from saccade.models.nac.graph_priors import SPECTRAL, target_links

MARGIN = 0.8  # distance that linked pairs keep below and all others above, where nothing is cut


def start_signatures(config: NACConfig) -> Tensor:
    """The start that `signature_init` names, if it is not random.

    Shapes: -> [u s].
    """
    if config.signature_init == "prior":
        return prior_signatures(config)
    return hinge_signatures(config)


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


def hinge_signatures(config: NACConfig, *, steps: int = 1000) -> Tensor:
    """Signatures of which those closer than the margin are the links of one drawn graph.

    The margin is `truncate` where links are cut. The start is orthogonal.

    Shapes: -> [u s].
    Raises: SaccadeError if the graph cannot be drawn with so many modules.
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
    """Adam on the distances that are on the wrong side of the margin.

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
    """One graph of `signature_init`'s family, with the authors' numbers.

    barabasi-albert: each module after the third links to two earlier ones, by their degree.
    planted-partition: ten groups (`graph_group` where they do not fill the modules), linked with
    probability 0.9 inside and 0.05 outside. watts-strogatz: a ring with the next tenth of all
    modules, of which links 0.4 are moved.

    Shapes: -> bool [u u], symmetric, without the diagonal.
    Raises: SaccadeError if there are too few modules.
    """
    u, name = config.modules, config.signature_init
    size = u // 10 if u % 10 == 0 else config.graph_group
    if u < 4:
        raise SaccadeError(
            f"signature_init {name!r}: found {u} modules, expected at least 4 for such a graph. "
            "Take signature_init=prior, or more modules."
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
    found = np.zeros((modules, modules), bool)
    found[0, 1 : links + 1] = True  # a star
    ends = [0] * links + list(range(1, links + 1))  # each module as often as it has links
    for module in range(links + 1, modules):
        chosen: set[int] = set()
        while len(chosen) < links:
            chosen.add(ends[rng.integers(len(ends))])
        found[module, list(chosen)] = True
        ends += [*chosen, *[module] * links]
    return found


def _partition(modules: int, size: int, rng: np.random.Generator) -> np.ndarray:
    group = np.arange(modules) // size
    chance = np.where(group[:, None] == group, 0.9, 0.05)
    return np.triu(rng.random((modules, modules)) < chance, 1)


def _small_world(modules: int, near: int, rng: np.random.Generator) -> np.ndarray:
    found = np.zeros((modules, modules), bool)
    ring = [(a, (a + step) % modules) for step in range(1, near // 2 + 1) for a in range(modules)]
    for a, b in ring:
        found[a, b] = found[b, a] = True
    for a, b in ring:
        strangers = np.flatnonzero(~found[a])
        strangers = strangers[strangers != a]
        if rng.random() < 0.4 and len(strangers):
            found[a, b] = found[b, a] = False
            other = rng.choice(strangers)
            found[a, other] = found[other, a] = True
    return found
