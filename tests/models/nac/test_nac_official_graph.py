# SPDX-License-Identifier: Apache-2.0
"""The authors' graph: targets, matching, start graphs, cut links, noise, a training with them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import load
from saccade.models.layers.transformer import dropped_path
from saccade.models.nac.graph_priors import (
    GraphStructure,
    drawn_graph,
    hinge_signatures,
    hungarian_order,
    structure_loss,
    target_links,
)
from saccade.models.nac.kernel import evaluation_bias, sampled_bias, signature_distance, skmdpa
from saccade.models.nac.model import NAC, NACConfig
from saccade.models.nac.modulation import noised
from saccade.models.training.train import TrainOptions, train

OFFICIAL = {
    "prior_form": "official",
    "structure_loss": "mse",
    "matching": "hungarian",
    "graph_refresh_steps": 1,
    "epsilon": 1.0,
    "graph_inside": 0.9,
    "graph_outside": 0.05,
}
GROUPED = ("planted-partition", "ring-of-cliques")


def official(modules: int, prior: str = "scale-free", **changes: object) -> NACConfig:
    return NACConfig(**{"modules": modules, "graph_prior": prior, **OFFICIAL, **changes})


@pytest.mark.parametrize(
    ("modules", "degree"), ((256, 3.6), (320, 4.1), (640, 6.0), (960, 7.4), (1280, 8.6))
)
def test_scale_free_degree_follows_from_the_number_of_modules(modules: int, degree: float) -> None:
    target = target_links(official(modules)).double()
    links = (target.sum() - target.trace()) / modules
    assert round(links.item(), 1) == degree
    assert target[0, 0] == 1 and target.max() == 1


def test_groups_have_their_diagonal_and_a_ring_its_hubs() -> None:
    partition = target_links(official(40, "planted-partition", graph_group=4))
    assert partition.diagonal().eq(0.9).all() and partition[3, 4] == pytest.approx(0.05)
    ring = target_links(official(40, "ring-of-cliques", graph_group=4))
    sure = ring == 1
    assert sure[4].nonzero().flatten().tolist() == [0, *range(4, 12)]
    assert sure[36].nonzero().flatten().tolist() == [32, *range(36, 40)]  # not the first clique
    assert torch.equal(ring[~sure], partition[~sure]) and torch.equal(ring, ring.T)


@pytest.mark.parametrize("prior", ("scale-free", *GROUPED))
def test_rows_find_a_planted_permutation(prior: str) -> None:
    settings = official(60, prior, graph_group=6)
    target = target_links(settings).double()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    # Rows are compared with their columns as they stand, so that only a graph whose rows are
    # known by their sizes is found where the columns are shuffled as well.
    links = target[order][:, order] if prior == "scale-free" else target[order]
    recovered = hungarian_order(links, target)
    assert torch.equal(links[recovered], target[:, order] if prior == "scale-free" else target)
    assert recovered.sort().values.equal(torch.arange(60)) and not torch.equal(links, target)
    if prior == "scale-free":
        scaled = -torch.log(links)
        aligned = GraphStructure(settings).align(scaled)
        assert structure_loss(scaled, aligned, kind="mse") < 1e-12
        assert structure_loss(scaled, target, kind="mse") > 1e-3


def test_with_bandwidth_one_no_circuit_is_sparse() -> None:
    modules, generator = 12, torch.Generator().manual_seed(0)
    simplex = torch.eye(modules).double() - 1 / modules
    tried = torch.randn(50, modules, 5, generator=generator).double()
    opposed = torch.cat([torch.ones(6, 3), -torch.ones(6, 3)]).double()
    least = math.exp(-1 - 1 / (modules - 1))

    def mean_link(signatures: torch.Tensor) -> float:
        links = evaluation_bias(signature_distance(signatures, signatures), 1.0).exp()
        return ((links.sum() - links.trace()) / (modules * (modules - 1))).item()

    assert min(mean_link(each) for each in (*tried, opposed)) > least
    assert mean_link(simplex) == pytest.approx(least, rel=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SaccadeError, match="64 modules in groups of 10, expected groups that fill"):
        target_links(official(64, "planted-partition", graph_group=10))
    with pytest.raises(SaccadeError, match="found 3 modules, expected at least 4"):
        hinge_signatures(NACConfig(modules=3, signature_init="barabasi-albert"))


STARTS = {"barabasi-albert": 3.8, "planted-partition": 0.9 * 3 + 0.05 * 36, "watts-strogatz": 4}


@pytest.mark.parametrize("name", STARTS)
def test_signatures_start_as_one_drawn_graph(name: str) -> None:
    settings = NACConfig(modules=40, signature_dim=24, signature_init=name, connectivity="frozen")
    links = drawn_graph(settings)
    assert torch.equal(links, drawn_graph(settings))
    assert torch.equal(links, links.T) and not links.diagonal().any()
    spread = 1.0 if name == "planted-partition" else 1e-9
    assert links.sum().item() / 40 == pytest.approx(STARTS[name], abs=spread)
    if name == "barabasi-albert":
        assert links.sum(0).max() > 3 * STARTS[name]  # a hub
    signatures = NAC(settings).generator.signatures
    distance = signature_distance(signatures, signatures)
    apart = ~torch.eye(40, dtype=torch.bool)
    assert ((distance < 0.8) == links)[apart].double().mean() > 0.95


def test_a_cut_link_is_not_heard_and_nobody_is_deaf() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, 4, generator=generator).double() for _ in range(3))
    distance = torch.tensor([[0.1, 0.95, 0.5], [0.2, 0.3, 0.4], [1.2, 1.1, 1.9]]).double()
    model = NAC(NACConfig(modules=3, truncate=0.9, epsilon=1.0))
    cut = model.kernel.eval().constant(distance)
    heard = skmdpa(q, k, v, cut)
    alone = skmdpa(q[:, :1], k[:, [0, 2]], v[:, [0, 2]], -distance[:1, [0, 2]])
    assert (heard[:, :1] - alone).abs().max() < 1e-14
    assert torch.equal(heard[:, 1:2], skmdpa(q, k, v, -distance)[:, 1:2])
    assert (heard - skmdpa(q, k, v, -distance))[:, 2].abs().max() < 1e-14
    assert model.kernel.links(cut)[0, 1] < 1e-37


@pytest.mark.parametrize("drawn", (0.0, 1.0))
def test_a_draw_is_kept_within_what_the_type_tells(
    drawn: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, drawn).double())
    log_p = torch.tensor([-800.0, -0.5, 0.0]).double().requires_grad_()
    eps = torch.finfo(torch.float64).eps
    limits = {"tau": 0.1, "p_min": eps, "p_max": 1 - eps}
    log_k = sampled_bias(log_p, clamp_sample=True, **limits)
    least, most = math.log(torch.finfo(torch.float64).tiny), math.log(1 - eps)
    if drawn == 0:  # the draw counts as eps: log K = (logit P + log eps) / tau where that is low
        p = math.exp(-0.5)
        between = 10 * (math.log(p / (1 - p)) + math.log(eps))
        assert log_k.tolist() == pytest.approx([least, between, -math.log(2)], rel=1e-9)
    else:
        assert log_k.tolist() == pytest.approx([-math.log(2), most, most], rel=1e-9)
    (slope,) = torch.autograd.grad(log_k.sum(), log_p)
    assert slope.ne(0).tolist() == [False, drawn == 0, False]


def test_training_draws_a_kernel_a_sample_a_batch_or_none() -> None:
    distance = torch.rand(6, 6)
    draws = {}
    for draw in ("none", "batch", "sample"):
        kernel = NAC(NACConfig(modules=6, kernel_draw=draw, propagator_layers=1)).kernel
        draws[draw] = [*kernel.layers(distance, 3), kernel.read_out(distance, 3)]
    assert all(torch.equal(bias, -distance / 0.25) for bias in draws["none"])
    assert [tuple(bias.shape) for bias in draws["batch"]] == [(6, 6)] * 2
    assert all(bias.shape == (3, 6, 6) and not bias[0].equal(bias[1]) for bias in draws["sample"])


def test_learned_bandwidths_are_one_a_layer_and_stay_above_zero() -> None:
    model = NAC(NACConfig(modules=6, epsilon_learned=True, propagator_layers=3, epsilon=0.5))
    assert model.kernel.bandwidth.tolist() == [0.5] * 4
    with torch.no_grad():
        model.kernel.bandwidth.copy_(torch.tensor([0.5, 1.0, -3.0, 0.25]))
    distance = torch.rand(6, 6)
    biases = list(model.eval().kernel.layers(distance, 2))
    for bias, epsilon in zip(biases, (0.5, 1.0, 0.01), strict=True):
        assert torch.allclose(bias, -distance / epsilon)
    assert torch.allclose(model.kernel.read_out(distance, 2), -distance / 0.25)
    mean = torch.stack([bias.exp() for bias in biases]).mean(0)
    assert torch.allclose(model.kernel.links(model.kernel.constant(distance)), mean)


def test_noise_of_training_keeps_the_mean_and_its_bounds() -> None:
    torch.manual_seed(0)
    residual = torch.ones(4000, 2, 3)
    kept = dropped_path(residual, 0.4, training=True)
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert torch.equal(kept[:, 0, 0], kept[:, 1, 2])  # whole samples
    assert kept.mean().item() == pytest.approx(1, abs=0.05)
    code = torch.randn(1000, 8, requires_grad=True)
    moved = noised(code, 0.05, training=True)
    share = ((moved - code) / code).detach()
    assert share.abs().max() < 0.0501 and share.abs().max() > 0.049
    assert share.mean().abs() < 0.002
    moved.sum().backward()
    assert torch.equal(code.grad, torch.ones(1000, 8))
    assert torch.equal(dropped_path(residual, 0.4, training=False), residual)
    assert torch.equal(noised(residual, 0.5, training=False), residual)


def test_repulsion_pushes_close_signatures_apart() -> None:
    model = NAC(NACConfig(modules=8, structure_loss="none", repulsion=0.4, signature_init="random"))
    with torch.no_grad():
        model.generator.signatures[1] = 1.01 * model.generator.signatures[0]
        model.generator.signatures[1, 0] += 0.1
    model.graph_loss().backward()
    step = model.generator.signatures - 0.1 * model.generator.signatures.grad
    before = 1 - F.cosine_similarity(*model.generator.signatures[:2], dim=0)
    assert 1 - F.cosine_similarity(*step[:2], dim=0) > before
    assert NAC(NACConfig(modules=8, structure_loss="none")).graph_loss().item() == 0


def test_a_nac_trains_with_the_authors_graph(tmp_path: Path) -> None:
    theirs = {
        **OFFICIAL,
        "kernel_draw": "sample",
        "kernel_clamp": "dtype",
        "truncate": 0.9,
        "epsilon_learned": True,
        "drop_path": 0.1,
        "code_noise": 0.05,
        "modfc_norm_affine": False,
        "ffn_gate": "geglu",
        "signature_init": "random",
    }
    model = {"modules": 16, "dim": 16, "propagator_layers": 2, "dropout_ordered": 0.0}
    options = TrainOptions(tmp_path / "nac.safetensors", set=model | theirs, steps=24, threads=1)
    trained = load(train("nac", options).path).build()
    assert {name: getattr(trained.config, name) for name in theirs} == theirs
    started = NAC(trained.config)
    layer = trained.propagators[0]
    assert layer.ffn.widen.linear.out_features == 2 * trained.config.ffn_dim
    assert layer.query.norm.weight is None and layer.ffn.widen.norm.weight is None
    bandwidths = trained.kernel.bandwidth.detach().numpy()
    assert len(set(bandwidths.tolist())) == 3 and np.all(bandwidths != 1)
    # What the loss is, written out.
    unit = F.normalize(trained.generator.signatures.detach().double(), dim=-1)
    distance, target = 1 - unit @ unit.T, target_links(trained.config).double()
    expected = 0.0
    for epsilon in bandwidths[:2].tolist():
        links = torch.exp(-distance / epsilon) * (distance <= 0.9)
        order = hungarian_order(links, target)
        expected += (links[order][:, order] - target).square().mean().item()
    assert trained.graph_loss().item() == pytest.approx(expected, rel=1e-4)
    assert not torch.equal(trained.generator.signatures, started.generator.signatures)


def test_signatures_start_on_the_right_side_of_the_cut() -> None:
    settings = NACConfig(
        modules=40, signature_dim=24, signature_init="watts-strogatz", truncate=0.4
    )
    signatures = hinge_signatures(settings)
    distance, apart = signature_distance(signatures, signatures), ~torch.eye(40, dtype=torch.bool)
    assert ((distance < 0.4) == drawn_graph(settings))[apart].double().mean() > 0.95
    assert distance[apart].max() > 0.8


def test_drawn_links_follow_their_probabilities() -> None:
    changes = {"modules": 200, "signature_dim": 8}
    partition = drawn_graph(NACConfig(**changes, signature_init="planted-partition"))
    group = torch.arange(200) // 20
    same = (group[:, None] == group) & ~torch.eye(200, dtype=torch.bool)
    assert partition[same].double().mean().item() == pytest.approx(0.9, abs=0.02)
    other = group[:, None] != group
    assert partition[other].double().mean().item() == pytest.approx(0.05, abs=0.01)
    world = drawn_graph(NACConfig(**changes, signature_init="watts-strogatz"))
    step = (torch.arange(200)[:, None] - torch.arange(200)).abs()
    near = torch.minimum(step, 200 - step) <= 10  # a tenth of all, half on each side
    assert world[near].double().sum().item() / world.sum().item() == pytest.approx(0.6, abs=0.08)
