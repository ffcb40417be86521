# SPDX-License-Identifier: Apache-2.0
"""The NAC against the paper's equations, its pruning, and what it refuses."""

import math

import pytest
import torch
from small_nac import KINDS, SMALL, given, nac
from torch import Tensor

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.families import build
from saccade.models.nac.kernel import evaluation_bias, sampled_bias, signature_distance, skmdpa
from saccade.models.nac.layers import ReadIn
from saccade.models.nac.model import NACConfig
from saccade.models.nac.modulation import ModFC, Modulation


def test_mod_fc_is_equation_1() -> None:
    layer = ModFC(4, 3, Modulation(5, alpha=0.25)).double()
    x, code = torch.randn(2, 4).double(), torch.randn(2, 5).double()
    projected = code @ layer.code.weight.T
    centred = projected - projected.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt()
    expected = (x * (1 + 0.25 * normed)) @ layer.linear.weight.T + layer.linear.bias
    assert (layer(x, code) - expected).abs().max() < 1e-14


def test_evaluation_bias_is_equation_3_as_printed() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 8, generator=generator).double() for _ in range(3))
    signatures = torch.randn(9, 4, generator=generator).double()
    distance = signature_distance(signatures, signatures)
    kernel = torch.exp(-distance / 0.25)
    normalised = kernel / (1e-6 + kernel.sum(-1, keepdim=True))
    weights = (q @ k.mT / math.sqrt(8) + normalised.log()).softmax(-1)
    attended = skmdpa(q, k, v, evaluation_bias(distance, 0.25))
    assert (attended - weights @ v).abs().max() < 1e-12
    assert (attended - skmdpa(q, k, v, None)).abs().max() > 1e-3


@pytest.mark.parametrize("p", (1e-9, 0.05, 0.5, 0.9, 1.0))
def test_concrete_samples_link_with_probability_p(p: float) -> None:
    torch.manual_seed(0)
    distance = torch.full((200_000,), -0.25 * math.log(p)).requires_grad_()
    log_k = sampled_bias(-distance / 0.25, tau=0.5, p_min=1e-6, p_max=1 - 1e-4)
    clamped = min(max(p, 1e-6), 1 - 1e-4)
    linked = (log_k > math.log(0.5)).double().mean().item()
    assert abs(linked - clamped) < 5 * math.sqrt(clamped * (1 - clamped) / 200_000) + 1e-5
    assert torch.isfinite(log_k).all() and (log_k <= 0).all()
    (slope,) = torch.autograd.grad(log_k.sum(), distance)
    assert torch.isfinite(slope).all()
    assert (slope.abs().sum() > 0) == (1e-6 < p < 1 - 1e-4)


def test_temperature_sharpens_the_sample() -> None:
    distance = torch.full((10_000,), 0.2)
    spread = {}
    for tau in (0.1, 2.0):
        torch.manual_seed(0)
        kernel = sampled_bias(-distance / 0.25, tau=tau, p_min=1e-6, p_max=1 - 1e-4).exp()
        spread[tau] = ((kernel > 0.1) & (kernel < 0.9)).double().mean().item()
    assert spread[0.1] < 0.2 < 0.5 < spread[2.0]


def test_training_samples_and_evaluation_does_not() -> None:
    model = nac()
    arguments = given(model)
    assert torch.equal(model(**arguments), model(**arguments))
    model.train()
    torch.manual_seed(0)
    first = model(**arguments)
    assert not torch.equal(first, model(**arguments))
    torch.manual_seed(0)
    assert torch.equal(first, model(**arguments))


def test_modules_argument_runs_that_subset() -> None:
    for case in ("default", "conditioned", "dense"):
        model = nac(**KINDS[case])
        arguments = given(model)
        model.rank_modules(**arguments)
        logits = model(**arguments, modules=model.module_order[:4])
        assert (logits - model.prune(0.25)(**arguments)).abs().max() < 1e-12


@pytest.mark.parametrize("case", ("default", "conditional"))
def test_pruning_twice_is_pruning_once(case: str) -> None:
    model = nac(**KINDS[case])
    arguments = given(model)
    model.rank_modules(**arguments)
    assert torch.allclose(model.prune(0.5).prune(0.5)(**arguments), model.prune(0.25)(**arguments))


def test_a_pruned_configuration_holds_the_pruned_weights() -> None:
    for case in ("default", "conditional"):
        model = nac(**KINDS[case])
        arguments = given(model)
        model.rank_modules(**arguments)
        pruned = model.prune(0.25)
        again = build("nac", pruned.config.to_dict()).double().eval()
        again.load_state_dict(pruned.state_dict())
        assert torch.equal(again(**arguments), pruned(**arguments))


@pytest.mark.parametrize("budget", (0, -0.5, 1.5, 0.02, math.nan, math.inf))
def test_budgets_that_keep_nothing_are_refused(budget: float) -> None:
    with pytest.raises(SaccadeError, match=r"budget .* keeps no module of 16"):
        nac().prune(budget)


def test_modules_rank_by_degree_and_ties_by_index() -> None:
    model = nac(modules=5, signature_dim=2)
    with torch.no_grad():  # 1 and 3 point the same way, 4 is near them, 0 and 2 are far and equal
        angles = torch.tensor([2.0, 0.0, -2.0, 0.0, 0.3])
        model.generator.signatures.copy_(torch.stack([angles.cos(), angles.sin()], -1))
        model.generator.signatures[2] = model.generator.signatures[0] * 3
    assert model.rank_modules().tolist() == [1, 3, 4, 0, 2]
    assert nac(**KINDS["dense"]).module_order.tolist() == list(range(16))


def test_conditional_modules_rank_over_samples() -> None:
    model = nac(**KINDS["conditioned"])
    with pytest.raises(SaccadeError, match="calibration samples"):
        model.rank_modules()
    order = model.rank_modules(**given(model, batch=8))
    assert sorted(order.tolist()) == list(range(16)) != order.tolist()


@pytest.mark.parametrize("case", ("default", "tokens", "conditional"))
def test_read_in_reassociates_exactly(case: str) -> None:
    model = nac(**KINDS[case])
    arguments = given(model)
    direct = model.details(**arguments)
    model.read_in.direct = False
    for name, value in model.details(**arguments).items():
        assert (value - direct[name]).abs().max() < 1e-12


def test_read_in_is_equations_4_and_5() -> None:
    layer = ReadIn(NACConfig(**SMALL)).double().eval()
    generator = torch.Generator().manual_seed(0)
    theta, code, tokens = (
        torch.randn(shape, generator=generator).double()
        for shape in ((16, 16), (16, 6), (2, 7, 16))
    )
    actual = layer(theta, tokens, code)
    for u in (0, 9):
        q = layer.query(theta[u], code[u])
        k, v = layer.key(tokens[1], code[u]), layer.value(tokens[1], code[u])
        y = layer.output((k @ q / 4).softmax(0) @ v, code[u])
        expected = y + layer.ffn(layer.norm(y), code[u])
        assert (actual[1, u] - expected).abs().max() < 1e-12


def test_padding_beyond_the_length_is_not_seen() -> None:
    model = nac(**KINDS["tokens"])
    arguments = given(model)
    outputs = model(**arguments)
    padded = arguments["x"].clone()
    padded[0, 1:], padded[1, 3:] = 1e4, -7.0
    assert torch.equal(model(padded, arguments["length"]), outputs)
    alone = model(arguments["x"][1:2, :3], torch.tensor([3]))
    assert (alone - outputs[1:2]).abs().max() < 1e-12
    assert (model(arguments["x"]) - outputs).abs().max() > 1e-4


def test_logits_are_the_weighted_sum_of_one_linear_layer() -> None:
    model = nac()
    seen: list[Tensor] = []
    model.read_out.pool.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = model(**given(model))
    confidence = model.read_out.pool.score(seen[0]).softmax(1)
    assert (logits - (confidence * model.head(seen[0])).sum(1)).abs().max() < 1e-12


def test_pixels_of_any_type_are_scaled_inside() -> None:
    model = nac(**KINDS["colour"])
    image = given(model)["x"]
    assert torch.equal(model(image), model(image.double()))
    scaled = model.tokenizer.scale(image)
    assert scaled[0, 0, 0, 1] == pytest.approx((image[0, 0, 0, 1].item() / 255 - 0.5) / 0.2)


def test_modules_that_are_left_out_are_not_computed() -> None:
    model = nac().train()
    arguments = given(model)
    rows: list[int] = []
    model.read_in.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    model(**arguments, modules=model.module_order[:5])
    model(**arguments)
    assert rows == [5, 16]


def test_perceiver_has_neither_signatures_nor_code_weights() -> None:
    names = nac(**KINDS["perceiver"]).state_dict()
    assert not [name for name in names if "signature" in name or ".code." in name]


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"image: found shape \[1, 9, 8, 1\]"):
        nac()(torch.zeros(1, 9, 8, 1))
    with pytest.raises(ShapeError, match=r"tokens: found shape \[1, 6, 4\]"):
        nac(**KINDS["tokens"])(torch.zeros(1, 6, 4))
    with pytest.raises(SaccadeError, match="Pass condition="):
        nac(**KINDS["conditioned"])(torch.zeros(1, 8, 8, 1))
    with pytest.raises(SaccadeError, match="Leave condition out"):
        nac()(torch.zeros(1, 8, 8, 1), condition=torch.zeros(1, 2, 7))


@pytest.mark.parametrize(("budget", "kept"), [(0.28, 4), (0.28125, 5), (0.3, 5), (0.04, 1)])
def test_a_budget_keeps_the_nearest_number_of_modules(budget: float, kept: int) -> None:
    assert nac().prune(budget).config.modules == kept  # of 16; a half is rounded up
