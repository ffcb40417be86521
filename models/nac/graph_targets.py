# SPDX-License-Identifier: Apache-2.0
"""The link probabilities that a graph prior wants, in the prior's own order."""

import math

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.models.nac.config import NACConfig

SPECTRAL = ("planted-partition", "ring-of-cliques")


def target_links(config: NACConfig) -> Tensor:
    """The prior's link probabilities, in the form that the configuration names.

    standard, diagonal 0:
    scale-free: expected links of preferential attachment, where node j of m links each meets the
    earlier node i with probability m / (2 sqrt(i j)), scaled to the mean degree asked for.
    planted-partition: `inside` within groups, `outside` between them. ring-of-cliques: the same,
    and one link of probability `inside` from each clique's last to the next one's first module.
    erdos-renyi: one probability for all.

    official: scale-free: min(1, sqrt(u) / (16 sqrt(i j))), whose degree follows from the number of
    modules. The others are equal groups, with the diagonal inside; in a ring of cliques the first
    module of each is linked surely to all of its own and of the next clique, and the last clique
    not to the first.

    Shapes: -> float32 [u u] symmetric; standard: off the diagonal within [p_min, p_max].
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
