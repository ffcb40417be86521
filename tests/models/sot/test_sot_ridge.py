# SPDX-License-Identifier: Apache-2.0
"""Exact svPN with a ridge: its formula, and why models with nearly lost ranks need it."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from tiny_families import CONFIGS

from saccade.exporter.gate.metrics import FLOORS, THRESHOLDS, row_errors
from saccade.models.sot.config import SoTConfig
from saccade.models.sot.head import ExactSvPN
from saccade.models.sot.model import SoT


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
