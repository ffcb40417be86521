# SPDX-License-Identifier: Apache-2.0
"""Gradients of the torch operators against recorded exact ones, and at points of no derivative."""

import json
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from places import TESTS

from saccade.plugins.ops import sparsemax, svpn, svpn_fast, tvmax

GOLDEN = TESTS / "golden" / "ops"


@lru_cache
def data(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / name))


@lru_cache
def cases(name: str) -> list[dict[str, Any]]:
    files = json.loads((GOLDEN / "manifest.json").read_text())["files"]
    return next(file["cases"] for file in files if file["file"] == name)


def tensor(array: np.ndarray) -> Any:
    return torch.tensor(array.astype(np.float64))


def pulled_back(answer: Any, inputs: Any, cotangent: np.ndarray) -> Any:
    gradients = torch.autograd.grad(answer, inputs, tensor(cotangent))
    return gradients if isinstance(inputs, list) else gradients[0].numpy()


def assert_close(actual: Any, expected: np.ndarray, allowed: float, what: str) -> None:
    scale = max(float(np.abs(expected).max(initial=0)), 1e-3)
    difference = float(np.abs(np.asarray(actual) - expected).max(initial=0))
    assert difference <= allowed * scale, f"{what}: {difference} of {scale}"


def test_sparsemax(form: str) -> None:
    given = data("sparsemax.npz")
    for case in cases("sparsemax.npz"):
        name = case["id"]
        z = tensor(given[f"{name}/z"]).requires_grad_()
        gradients = pulled_back(sparsemax(z, case["axis"]), z, given[f"{name}/v"])
        assert_close(gradients, given[f"{name}/jvp"], 1e-13, name)


def test_tvmax(form: str) -> None:
    given = data("tvmax.npz")
    alike: dict[Any, list[dict[str, Any]]] = {}
    for case in cases("tvmax.npz"):
        p = given[f"{case['id']}/p"]
        # A weight that is the rounding of 0 would be in the recorded support.
        if not ((p > 0) & (p < 1e-14)).any():
            alike.setdefault((*case["shape"], case["lam"]), []).append(case)
    assert sum(map(len, alike.values())) >= len(cases("tvmax.npz")) - 2
    for (*_, lam), batch in alike.items():
        z = tensor(np.stack([given[f"{case['input']}/z"] for case in batch])).requires_grad_()
        cotangents = np.stack([given[f"{case['input']}/v"] for case in batch])
        for gradient, case in zip(pulled_back(tvmax(z, lam), z, cotangents), batch, strict=True):
            assert_close(gradient, given[f"{case['id']}/vjp_tvmax"], 1e-12, case["id"])


def test_masked_tvmax(form: str) -> None:
    given = data("tvmax_batch.npz")
    for case in cases("tvmax_batch.npz"):
        name = case["id"]
        z = tensor(given[f"{name}/z"]).requires_grad_()
        sizes = torch.tensor(given[f"{name}/sizes"].astype(np.int64))
        gradients = pulled_back(tvmax(z, case["lam"], sizes), z, given[f"{name}/v"])
        assert_close(gradients, given[f"{name}/vjp"], 1e-12, name)


def test_svpn(form: str) -> None:
    given = data("svpn_exact.npz")
    recorded = [key for key in given if "/vjp_alpha" in key]
    assert len(recorded) > 20
    for key in recorded:
        name, alpha = key.split("/vjp_alpha")
        q = tensor(given[f"{name}/x"]).requires_grad_()
        gradients = pulled_back(svpn(q, alpha=float(alpha)), q, given[f"{name}/v"])
        assert_close(gradients, given[key], 1e-8, key)


def test_svpn_fast(form: str) -> None:
    given = data("svpn_fast.npz")
    compared = 0
    for case in cases("svpn_fast.npz"):
        name, source = case["id"], case.get("input")
        if f"{name}/vjp_x_official_eps" not in given:
            continue
        inputs = [tensor(given[f"{source}/{name}"]).requires_grad_() for name in ("x", "v0")]
        y = svpn_fast(
            *inputs,
            alpha=case["alpha"],
            singular_values=case["num_sv"],
            iterations=case["num_iter"],
        )
        gradients = pulled_back(y, inputs, given[f"{source}/cotangent"])
        assert_close(gradients[0].numpy(), given[f"{name}/vjp_x_official_eps"], 1e-10, name)
        assert_close(gradients[1].numpy(), given[f"{name}/vjp_v0_official_eps"], 1e-10, name)
        compared += 1
    assert compared > 20


DEGENERATE = {
    "equal values": 3.0 * torch.eye(4, dtype=torch.float64),
    "nearly equal values": torch.diag(torch.tensor([2.0, 2.0 + 1e-13, 1.0]).double()),
    "rank one": torch.outer(torch.arange(1.0, 5), torch.arange(2.0, 5)).double(),
    "rank two, wide": torch.kron(torch.eye(2), torch.ones(2, 3)).double(),
    "zero": torch.zeros(3, 3, dtype=torch.float64),
}


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_svpn_where_singular_values_tie_or_vanish(case: str, alpha: float) -> None:
    """f(t Q) = t^alpha f(Q), so the gradient along Q is alpha <G, f(Q)>."""
    q = DEGENERATE[case].clone().requires_grad_()
    cotangent = torch.linspace(-1, 2, q.numel()).double().view_as(q)
    y = svpn(q, alpha=alpha)
    (actual,) = torch.autograd.grad(y, q, cotangent)
    assert actual.isfinite().all()
    along, expected = (actual * q).sum(), alpha * (cotangent * y).sum()
    torch.testing.assert_close(along, expected.detach(), atol=1e-11, rtol=1e-11)
    if alpha == 1.0 and case.startswith(("equal", "nearly")):
        torch.testing.assert_close(actual, cotangent, atol=1e-11, rtol=1e-11)


def test_svpn_at_equal_values_has_both_slopes() -> None:
    """At c I symmetric changes scale by alpha c^(alpha - 1), skew ones by c^(alpha - 1)."""
    q = (4.0 * torch.eye(3, dtype=torch.float64)).requires_grad_()
    g = torch.arange(9.0, dtype=torch.float64).view(3, 3)
    (actual,) = torch.autograd.grad(svpn(q, alpha=0.5), q, g)
    expected = 0.25 * (g + g.T) / 2 + 0.5 * (g - g.T) / 2
    torch.testing.assert_close(actual, expected, atol=1e-13, rtol=0)


def test_svpn_fast_at_zero_has_a_finite_gradient() -> None:
    q = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    v0 = torch.ones(4, dtype=torch.float64, requires_grad=True)
    for epsilon in (0.0, 1e-5):
        gradients = torch.autograd.grad(svpn_fast(q, v0, epsilon=epsilon).sum(), [q, v0])
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_tvmax_at_lam_0_fuses_nothing(form: str) -> None:
    z = torch.zeros(1, 2, 2, dtype=torch.float64, requires_grad=True)
    cotangent = np.array([[[1.0, 2.0], [3.0, 6.0]]])
    gradients = pulled_back(tvmax(z, lam=0.0), z, cotangent)
    np.testing.assert_allclose(gradients, cotangent - 3, atol=1e-15)
    gradients = pulled_back(tvmax(z, lam=0.1), z, cotangent)
    np.testing.assert_allclose(gradients, 0, atol=1e-15)


def test_masked_cells_have_no_gradient(form: str) -> None:
    z = torch.tensor([[[0.3, -torch.inf, 0.2], [0.1, 0.2, -1e9]]], dtype=torch.float64)
    z.requires_grad_()
    gradients = pulled_back(tvmax(z, lam=0.05), z, np.arange(6.0).reshape(1, 2, 3))
    assert gradients[0, 0, 1] == gradients[0, 1, 2] == 0
    assert np.isfinite(gradients).all()
