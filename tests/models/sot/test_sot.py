# SPDX-License-Identifier: Apache-2.0
"""Second-order transformer: sizes, budgets, fusions, texts, its invariant."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_families import CONFIGS

from saccade.core.errors import SaccadeError, ShapeError
from saccade.exporter.gate.metrics import FLOORS, THRESHOLDS, row_errors
from saccade.models.sot.config import AUTHORS, SoTConfig
from saccade.models.sot.head import ExactSvPN, normalization
from saccade.models.sot.head import pooling as head_pooling
from saccade.models.sot.model import SoT
from saccade.plugins.ops import svpn_fast

TINY = SoTConfig(
    dim=16,
    heads=2,
    layers=2,
    mlp_dim=24,
    classes=5,
    pool_heads=2,
    m=3,
    n=4,
    gcp_dim=5,
)
TEXT = replace(TINY, input="tokens", max_tokens=7)
AUTHORS_TINY = SoTConfig.from_dict(TINY.to_dict() | AUTHORS)


def lively(config):
    """A model whose tokens differ, as fresh weights hardly let them."""
    model = SoT(config).double().eval()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.3)
    return model


def images(count=3):
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8))


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({}, {"exact": 1.0, "fast": 2 / 3, "class": 1 / 3}),
        (AUTHORS, {"fast": 1.0, "class": 1 / 3}),
        ({"fusion": "concat"}, {"exact": 1.0, "fast": 2 / 3}),
        ({"fusion": "late", "pooling": "gap"}, {"exact": 1.0, "class": 1 / 3}),
        ({"normalization": "layer-norm"}, {"exact": 1.0, "class": 1 / 3}),
        ({"fusion": "class"}, {"exact": 1.0}),
    ],
)
def test_budgets_of_a_head(changes, labels):
    model = SoT(SoTConfig.from_dict(TINY.to_dict() | changes))
    assert {budget.label: budget.share for budget in model.budgets()} == labels
    own, *others = model.budgets()
    assert torch.equal(model.at(own)(images()), model(images()))
    for other in others:
        assert not torch.equal(model.at(other)(images()), model(images()))


def test_class_budget_drops_the_words_term():
    model = lively(TINY)
    answer = model.answer(images())
    small = model.at(model.budget("class"))
    torch.testing.assert_close(small(images()), answer.class_logits)
    torch.testing.assert_close(answer.class_logits + answer.word_logits, model(images()))


def test_a_budget_that_is_not_there_is_named():
    model = SoT(replace(TINY, fusion="visual"))
    with pytest.raises(SaccadeError, match="this model has exact, fast"):
        model.budget("class")
    # What was trained with the fast norm has the exact one only where it is asked for.
    official = lively(AUTHORS_TINY)
    exact = official.at(official.budget("exact"))
    assert (exact.config.normalization, exact.config.mean_removal) == ("svpn", "scalar")
    assert torch.isfinite(exact(images())).all()


def test_late_fusion_answers_the_mean_of_the_probabilities():
    model = lively(replace(TINY, fusion="late"))
    answer, outputs = model.answer(images()), model.outputs(images())
    mean = (answer.class_logits.softmax(-1) + answer.word_logits.softmax(-1)) / 2
    torch.testing.assert_close(outputs["probabilities"], mean)
    torch.testing.assert_close(outputs["logits"].exp(), mean)
    labels = torch.tensor([0, 3, 2])
    both = [answer.class_logits, answer.word_logits]
    expected = sum(torch.nn.functional.cross_entropy(each, labels) for each in both)
    torch.testing.assert_close(model.loss(images(), labels), expected)


@pytest.mark.parametrize("pooling", ["mgcrp", "gap", "gcp"])
@pytest.mark.parametrize(
    ("class_token", "fusion"), [("first", "sum"), ("last", "late"), ("last", "aggr-all")]
)
def test_what_stands_behind_a_text_does_not_count(pooling, class_token, fusion):
    removal = "scalar" if pooling == "gcp" else "none"
    changes = {"pooling": pooling, "class_token": class_token, "fusion": fusion}
    config = replace(TEXT, mean_removal=removal, **changes)
    model = lively(config)
    short = SoT(replace(config, max_tokens=4)).double().eval()
    short.load_state_dict(model.state_dict())
    tokens = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.manual_seed(0))
    expected = short.outputs(tokens[:, :4], torch.tensor([4, 4]))
    tokens[:, 4:] = torch.nan
    actual = model.outputs(tokens, torch.tensor([4, 4]))
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name])
    alone = model.outputs(tokens, torch.tensor([1, 4]))
    assert torch.isfinite(alone["logits"]).all()


def test_class_token_of_bert_and_gpt():
    tokens = torch.randn(1, 7, 16, dtype=torch.float64, generator=torch.manual_seed(0))
    for class_token, place in (("first", 0), ("last", 4)):
        model = lively(replace(TEXT, class_token=class_token, fusion="class"))
        expected = model.head.class_fc(tokens[:, place])
        torch.testing.assert_close(model(tokens, torch.tensor([5])), expected)


def test_texts_need_their_length_and_size():
    model = SoT(TEXT)
    with pytest.raises(SaccadeError, match="length: found none"):
        model(torch.zeros(1, 7, 16))
    with pytest.raises(ShapeError, match=r"expected \[b, 7, 16\]"):
        model(torch.zeros(1, 6, 16), torch.tensor([1]))


@pytest.mark.parametrize("pooling", ["mgcrp", "gap", "gcp"])
def test_pool_dropout_is_of_the_pooled_vector_while_training(pooling):
    pool = head_pooling(replace(TINY, pooling=pooling, pool_dropout=0.75)).double()
    tokens = torch.randn(40, 9, 16, dtype=torch.float64, generator=torch.manual_seed(0))
    whole = pool.eval()(tokens).vector
    assert (whole != 0).all()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        dropped = pool.train()(tokens).vector
    kept = dropped != 0
    assert 0.15 < kept.double().mean() < 0.35
    torch.testing.assert_close(dropped[kept], 4 * whole[kept])


@pytest.mark.parametrize("divisor", ["tokens", "channels"])
def test_gcp_divides_by_what_its_field_says(divisor):
    # Many steps, which is the square root itself; 9 tokens of 5 channels, then 7 of them.
    pool = head_pooling(replace(TINY, pooling="gcp", gcp_divisor=divisor, mpn_steps=40)).double()
    tokens = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.manual_seed(0))
    kept = torch.arange(9).expand(2, 9) < 7
    rows, columns = torch.triu_indices(5, 5)
    for mask, count in ((None, 9), (kept, 7)):
        x = pool.reduce(tokens)[:, :count]
        values, vectors = torch.linalg.eigh(x.mT @ x / {"tokens": count, "channels": 5}[divisor])
        root = vectors @ (values.sqrt()[..., None] * vectors.mT)
        torch.testing.assert_close(pool(tokens, mask).vector, root[:, rows, columns])


def test_epn_gives_a_matrix_or_each_of_its_columns_length_one():
    q = torch.randn(6, 2, 3, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    ones = torch.ones(6, 2, dtype=torch.float64)
    whole = normalization(replace(TINY, normalization="epn"))(q)
    torch.testing.assert_close(whole.square().sum((-2, -1)), ones)
    columns = normalization(replace(TINY, normalization="epn", epn_axis="rows"))(q)
    torch.testing.assert_close(columns.square().sum(-2), ones[..., None].expand(6, 2, 4))
    root = q.sign() * q.abs().sqrt()
    torch.testing.assert_close(whole / whole[..., :1, :1], root / root[..., :1, :1])


def test_fast_svpn_that_learns_no_start_starts_from_ones():
    q = torch.randn(6, 3, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    config = replace(TINY, normalization="svpn-fast", singular_values=2, iterations=2)
    for learned in (False, True):
        norm = normalization(replace(config, learned_start=learned)).double()
        start = np.ones(4) if not learned else norm.start.detach().numpy()
        given = {"alpha": 0.5, "singular_values": 2, "iterations": 2, "epsilon": 0.0}
        expected = svpn_fast(q.numpy(), start, **given)
        torch.testing.assert_close(norm(q).detach(), torch.from_numpy(expected))


def test_invariant_of_the_singular_values_tells_exact_from_fast():
    model = lively(TINY)
    (component,) = model.components()
    invariant = component.invariants["svpn_singular_values"]
    inputs = {"image": images(8).numpy()}
    everything = {"logits", "probabilities", "embedding", "attention", "covariance", "pooled"}
    for budget, kept in (("exact", True), ("fast", False)):
        outputs = model.at(model.budget(budget)).outputs(images(8))
        assert set(outputs) == everything == {*component.outputs, *component.optional}
        answers = {name: value.detach().numpy() for name, value in outputs.items()}
        # With the matrices in the file, and with nothing but the embedding.
        for given in (answers, {"embedding": answers["embedding"]}):
            assert (invariant(inputs, given, {}) <= 1) is kept
            # A file that overflows: some rows have no singular values.
            name = "pooled" if "pooled" in given else "embedding"
            broken = {**given, name: given[name].copy()}
            broken[name][1] = np.nan
            broken[name][2, ..., -1] = np.inf
            assert not invariant(inputs, broken, {}) <= 1
    assert not model.at(model.budget("fast")).components()[0].invariants


# Exact svPN with a ridge: its formula, and why models with nearly lost ranks need it.


@pytest.mark.parametrize("shape", [(3, 2, 4, 6), (5, 6, 4), (4, 4)])
def test_singular_values_follow_the_formula(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape, dtype=torch.float64, generator=torch.manual_seed(0))
    u, s, vh = torch.linalg.svd(q, full_matrices=False)
    ridge = 0.2 * q.square().sum((-2, -1)).sqrt()[..., None]
    power = s * (s.square() + ridge.square()) ** ((0.4 - 1) / 2)
    expected = u @ torch.diag_embed(power) @ vh
    torch.testing.assert_close(ExactSvPN(0.4, 0.2)(q), expected, atol=1e-12, rtol=1e-12)


def test_the_slope_is_bounded_where_a_rank_is_lost() -> None:
    slopes = {}
    for ridge in (0.0, 1e-3):
        q = torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64)).requires_grad_()
        ExactSvPN(0.5, ridge)(q)[1, 1].backward()
        assert q.grad is not None
        slopes[ridge] = q.grad[1, 1].item()
    assert slopes[0.0] > 1e4
    assert slopes[1e-3] == pytest.approx(1e-3**-0.5, rel=0.01)
    zero = torch.zeros(2, 3, 3, requires_grad=True)
    ExactSvPN(0.5, 1e-3)(zero).sum().backward()
    assert torch.isfinite(zero.grad).all()  # type: ignore[arg-type]


def test_other_budgets_leave_the_ridge_out() -> None:
    model = SoT(SoTConfig(svpn_ridge=0.01))
    ridges = [model.at(budget).config.svpn_ridge for budget in model.budgets()]
    assert ridges == [0.01, 0.0, 0.0]


def nearly_singular(ridge: float) -> SoT:
    """A tiny model whose covariances have two rows that differ by a few roundings.

    Four words give no more than four ranks, so larger matrices would have lost some exactly, and
    those amplify nothing. A class token would hide the small entries.
    """
    shape = CONFIGS["sot"] | {"m": 3, "n": 3, "fusion": "visual"}
    model = SoT(SoTConfig(**shape, svpn_ridge=ridge)).eval()
    with torch.no_grad():
        weight = model.head.pool.project.weight  # type: ignore[union-attr]
        weight[1] = weight[0] * (1 + 3e-6 * torch.randn(24, generator=torch.manual_seed(0)))
    return model


@torch.no_grad()
def test_a_ridge_is_the_remedy_for_a_nearly_lost_rank() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3), dtype=np.uint8)
    worst = {}
    for ridge in (0.0, 1e-3):
        model = nearly_singular(ridge)
        answers = {key: value.numpy() for key, value in model.outputs(torch.tensor(image)).items()}
        wide = deepcopy(model).double().outputs(torch.tensor(image))
        expected = {"embedding": wide["embedding"].numpy()}
        worst[ridge] = row_errors([answers], expected, FLOORS["fp32"])["embedding"].max()
        (component,) = model.components()
        (invariant,) = component.invariants.values()
        assert invariant({"image": image}, answers, expected) < 0.1
        assert ("--set svpn_ridge=0.001" in component.remedy) == (ridge == 0)
    assert worst[0.0] > 3 * THRESHOLDS["fp32"]["relative_error"]
    assert worst[1e-3] < THRESHOLDS["fp32"]["relative_error"] / 3
