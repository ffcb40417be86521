# SPDX-License-Identifier: Apache-2.0
"""The distance of a circuit's links from a graph prior, under the closest permutation found."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.models.nac.config import NACConfig
from saccade.models.nac.graph_orders import degree_order, hungarian_order, permuted, spectral_order
from saccade.models.nac.graph_targets import SPECTRAL, target_links
from saccade.models.nac.skmdpa import evaluation_bias, signature_distance


class GraphStructure:
    """The loss that draws a circuit's links to the prior, with the permutation between them.

    `matching: sorted`: both matrices are sorted, by expected degree (scale-free, erdos-renyi) or
    spectrally (partition, ring), and compared entry by entry. One eigenvector says little of many
    groups, so a spectral permutation replaces the one before it (at first: the prior's own order)
    only if it is closer; a ring's order has no beginning, so it is tried from each module of a
    clique on. `matching: hungarian`: rows are assigned to rows.

    The permutation is a constant of the loss and is kept for `graph_refresh_steps` calls.

    Source: section 2.2, Graph Structure Regularizer.
    """

    def __init__(self, config: NACConfig) -> None:
        self.config = config
        self._target: Tensor | None = None  # sorted where the matching sorts
        self._aligned: list[Tensor] = []  # of each bandwidth, permuted onto the modules
        self._calls = 0

    def loss(self, signatures: Tensor, epsilons: Sequence[float | Tensor] | None = None) -> Tensor:
        """The configured loss of the link probabilities, summed over bandwidths that differ.

        Shapes: signatures [u s] -> scalar, 0 where there is only one module, or no such loss.
        """
        config = self.config
        if signatures.shape[0] < 2 or config.structure_loss == "none":
            return signatures.sum() * 0
        distance = signature_distance(signatures, signatures)
        epsilons = epsilons or [config.epsilon]
        scaled = [-evaluation_bias(distance, each, config.truncate) for each in epsilons]
        if not self._aligned or self._calls % config.graph_refresh_steps == 0:
            pairs = enumerate(scaled)
            self._aligned = [self.align(each.detach(), which) for which, each in pairs]
        self._calls += 1
        losses = [
            structure_loss(each, target, kind=config.structure_loss, clip=config.structure_clip)
            for each, target in zip(scaled, self._aligned, strict=True)
        ]
        return torch.stack(losses).sum()

    def state(self) -> dict[str, Any]:
        """What a resumed training run needs of the permutation in use."""
        return {"aligned": self._aligned, "calls": self._calls}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`, and of the one that held a single matrix or none."""
        aligned = state["aligned"]
        kept = aligned if isinstance(aligned, list) else [aligned]
        self._aligned = [each for each in kept if each is not None]
        self._calls = state["calls"]

    @torch.no_grad()
    def align(self, scaled_distance: Tensor, which: int = 0) -> Tensor:
        """The target in the order of the modules.

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
        tried = [permuted(target, order.roll(start)) for start in starts]
        tried.append(self._aligned[which].to(links) if self._aligned else target)
        kind = self.config.structure_loss
        return min(tried, key=lambda each: structure_loss(scaled_distance, each, kind=kind).item())

    def _sorted_target(self) -> Tensor:
        # Groups and cliques stand in spectral order already: one after the other.
        target = target_links(self.config)
        if self.config.graph_prior in SPECTRAL or self.config.matching == "hungarian":
            return target
        order = degree_order(target)
        return target[order][:, order]


def structure_loss(
    scaled_distance: Tensor, target: Tensor, *, kind: str = "cross-entropy", clip: float = 0.0
) -> Tensor:
    """The mean over pairs of how far P is from the target t, with log P = -scaled_distance.

    cross-entropy: -(t log P + (1 - t) log(1 - P)), off the diagonal. mse: (P - t)^2, and kl: that
    of two links that exist or not, P within 1e-6 of neither end; both with the diagonal. Terms
    below `clip` count as `clip`, without a gradient.

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
    """Minus the sum of the distances of pairs closer than `distance`: it pushes them apart.

    Shapes: signatures [u s] -> scalar.
    Source: the authors' code.
    """
    apart = signature_distance(signatures, signatures)
    close = torch.tril(apart < distance, diagonal=-1)
    return -(apart * close).sum()
