# SPDX-License-Identifier: Apache-2.0
"""The graph priors: what they want, how a circuit is matched to them, and what the loss does."""

import math

import pytest
import torch
from torch import Tensor

from saccade.models.nac.graph_priors import (
    GraphStructure,
    degree_order,
    prior_signatures,
    spectral_order,
    structure_loss,
    target_links,
)
from saccade.models.nac.kernel import evaluation_bias, signature_distance
from saccade.models.nac.model import NAC, NACConfig

PRIORS = ("scale-free", "planted-partition", "ring-of-cliques", "erdos-renyi")
SPECTRAL = PRIORS[1:3]


def config(prior: str, modules: int, **changes: object) -> NACConfig:
    return NACConfig(modules=modules, graph_prior=prior, **changes)


def off_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)]


def shuffled(modules: int) -> Tensor:
    return torch.randperm(modules, generator=torch.Generator().manual_seed(1))


def scaled_distance(links: Tensor) -> Tensor:
    """-log P of these links, the diagonal 0 as of signatures."""
    return -torch.log(links.clamp_min(1e-9)).fill_diagonal_(0)


@pytest.mark.parametrize("modules", (1, 2, 3, 17, 100, 2048))
@pytest.mark.parametrize("prior", PRIORS)
def test_targets_are_symmetric_probabilities(prior: str, modules: int) -> None:
    target = target_links(config(prior, modules))
    assert target.shape == (modules, modules)
    assert torch.equal(target, target.T) and not target.diagonal().any()
    links = off_diagonal(target)
    assert ((links > 0) & (links < 1)).all()
    if prior in ("scale-free", "erdos-renyi") and modules >= 17:
        assert target.sum().item() / modules == pytest.approx(8.0, rel=0.01)


def test_targets_have_their_shape() -> None:
    degrees = {prior: target_links(config(prior, 96)).sum(-1) for prior in PRIORS}
    assert degrees["scale-free"][0] > 4 * degrees["scale-free"].mean()
    assert degrees["scale-free"].median() < 0.8 * degrees["scale-free"].mean()
    assert degrees["erdos-renyi"].std() < 1e-4
    partition = target_links(config("planted-partition", 96, graph_group=32))
    assert partition[0, 31] == pytest.approx(0.8) and partition[31, 32] == pytest.approx(0.02)
    ring = target_links(config("ring-of-cliques", 96, graph_group=32))
    differ = (ring != partition).nonzero().tolist()
    assert differ == [[0, 95], [31, 32], [32, 31], [63, 64], [64, 63], [95, 0]]


@pytest.mark.parametrize("modules", (64, 320))
@pytest.mark.parametrize("prior", PRIORS)
def test_a_shuffled_prior_is_found_again(prior: str, modules: int) -> None:
    # A ring is known by its bridges, which a background of many links would hide.
    changes = {"graph_outside": 1e-4} if prior == "ring-of-cliques" else {}
    settings = config(prior, modules, **changes)
    target, order = target_links(settings), shuffled(modules)
    links = scaled_distance(target[order][:, order])
    loss = structure_loss(links, GraphStructure(settings).align(links)).item()
    exact = structure_loss(scaled_distance(target), target).item()
    assert loss == pytest.approx(exact, rel=0.02)
    assert prior == "erdos-renyi" or structure_loss(links, target).item() > 1.1 * exact


def test_many_modules_are_sorted_by_iterated_eigenvectors() -> None:
    settings = config("planted-partition", 1040, graph_group=130)
    target, order = target_links(settings), shuffled(1040)
    links = scaled_distance(target[order][:, order])
    loss = structure_loss(links, GraphStructure(settings).align(links)).item()
    exact = structure_loss(scaled_distance(target), target).item()
    assert loss == pytest.approx(exact, rel=0.05)


def test_orders() -> None:
    links = torch.tensor([[0.0, 0.1, 0.1], [0.1, 0.0, 0.9], [0.1, 0.9, 0.0]])
    assert degree_order(links).tolist() == [1, 2, 0]
    assert degree_order(torch.ones(4, 4)).tolist() == [0, 1, 2, 3]
    position = shuffled(40)
    path = 1.0 * ((position[:, None] - position).abs() == 1)
    along = position[spectral_order(path + 1e-6)]
    assert along.tolist() in (list(range(40)), list(range(39, -1, -1)))


@pytest.mark.parametrize("prior", PRIORS)
def test_descent_reaches_the_prior(prior: str) -> None:
    settings = config(prior, 48, graph_refresh_steps=5)
    structure = GraphStructure(settings)
    generator = torch.Generator().manual_seed(0)
    signatures = torch.randn(48, 16, generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([signatures], lr=0.05)
    losses = []
    for _ in range(120):
        losses.append(structure.loss(signatures))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    target = target_links(settings)
    floor = structure_loss(scaled_distance(target), target)
    assert losses[-1] - floor < 0.2 * (losses[0] - floor)


def test_collapse_is_undone() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1, 16, generator=generator)
    signatures = base + 1e-3 * torch.randn(48, 16, generator=generator)
    signatures.requires_grad_()
    structure = GraphStructure(config("planted-partition", 48))
    optimizer = torch.optim.Adam([signatures], lr=0.05)

    def mean_link() -> float:
        distance = signature_distance(signatures.detach(), signatures.detach())
        return off_diagonal(evaluation_bias(distance, 0.25).exp()).mean().item()

    assert mean_link() > 0.999
    for _ in range(150):
        loss = structure.loss(signatures)
        optimizer.zero_grad()
        loss.backward()
        assert torch.isfinite(signatures.grad).all()
        optimizer.step()
    assert mean_link() < 0.5


@pytest.mark.parametrize("prior", PRIORS)
def test_signatures_start_at_the_prior(prior: str) -> None:
    settings = config(prior, 96)
    signatures, target = prior_signatures(settings), target_links(settings)
    assert torch.equal(signatures, prior_signatures(settings))
    links = evaluation_bias(signature_distance(signatures, signatures), settings.epsilon).exp()
    assert off_diagonal(links).mean() == pytest.approx(off_diagonal(target).mean(), rel=0.25)
    if prior != "erdos-renyi":
        pairs = torch.stack([off_diagonal(links), off_diagonal(target)])
        assert torch.corrcoef(pairs)[0, 1] > (0.98 if prior in SPECTRAL else 0.6)


def test_only_learned_links_are_regularized() -> None:
    for changes in ({"connectivity": "frozen"}, {"connectivity": "dense"}, {"conditional": True}):
        assert NAC(config("scale-free", 8, **changes)).graph_loss().item() == 0
    assert NAC(config("scale-free", 1)).graph_loss().item() == 0
    model = NAC(config("scale-free", 8))
    model.graph_loss().backward()
    assert model.generator.signatures.grad.any()
    frozen = NAC(config("ring-of-cliques", 32, connectivity="frozen"))
    assert "signatures" in dict(frozen.generator.named_buffers())
    expected = prior_signatures(frozen.config)
    assert torch.equal(frozen.generator.signatures, expected)


PAIRS = {(0, 1): (0.5, 0.9), (0, 2): (0.2, 0.1), (1, 2): (0.8, 0.3)}  # link, and what is wanted
KINDS = {
    "cross-entropy": lambda p, t: -(t * math.log(p) + (1 - t) * math.log(1 - p)),
    "mse": lambda p, t: (p - t) ** 2,
    "kl": lambda p, t: t * math.log(t / p) + (1 - t) * math.log((1 - t) / (1 - p)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_a_mean_over_pairs(kind: str) -> None:
    links, target = torch.ones(3, 3).double(), torch.eye(3).double()
    for (a, b), (p, t) in PAIRS.items():
        links[a, b] = links[b, a] = p
        target[a, b] = target[b, a] = t
    terms = [KINDS[kind](p, t) for p, t in PAIRS.values()] * 2
    # Of modules with themselves, which cross entropy leaves out, nothing is wrong here.
    count = 6 if kind == "cross-entropy" else 9
    loss = structure_loss(-links.log(), target, kind=kind).item()
    assert loss == pytest.approx(sum(terms) / count, rel=1e-4)
    clip = sorted(terms)[2] + 1e-3
    clipped = sum(max(clip, term) for term in terms) + clip * (count - 6)
    loss = structure_loss(-links.log(), target, kind=kind, clip=clip).item()
    assert loss == pytest.approx(clipped / count, rel=1e-4)


def test_the_permutation_is_looked_for_again_after_some_steps(monkeypatch) -> None:
    structure, seen = GraphStructure(config("scale-free", 12, graph_refresh_steps=3)), []
    align = structure.align
    monkeypatch.setattr(structure, "align", lambda *given: seen.append(1) or align(*given))
    signatures = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    counted = []
    for _ in range(7):
        structure.loss(signatures)
        counted.append(len(seen))
    assert counted == [1, 1, 1, 2, 2, 2, 3]
