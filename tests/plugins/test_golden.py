# SPDX-License-Identifier: Apache-2.0
"""Exact answers recorded for the ops: every implementation on every case that its type allows."""

import json
import warnings
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from ops_implementations import ROLES, as_read, implementation, skip_without_gpu
from places import TESTS
from safetensors.numpy import load_file

from saccade.plugins.ops import OPS, svpn_fast
from saccade.plugins.tvmax.reference import groups, prox

GOLDEN = TESTS / "golden" / "ops"
# The slowest way to run the same graph as "body".
RUN_HERE = tuple(role for role in ROLES if role != "body in onnx's reference")
ALPHAS = (0.3, 0.5, 0.7, 1.0)
RECORDED = {
    "Sparsemax": "sparsemax.npz",
    "TVMax": "tvmax.npz",
    "MaskedTVMax": "tvmax_batch.npz",
    "SvPN": "svpn_exact.npz",
    "SvPNFast": "svpn_fast.npz",
}


@lru_cache
def manifest(name: str) -> dict[str, Any]:
    files = json.loads((GOLDEN / "manifest.json").read_text())["files"]
    return next(file for file in files if file["file"] == name)


@lru_cache
def arrays(name: str) -> Any:
    return dict(np.load(GOLDEN / name))


def ids(name: str) -> list[str]:
    return [case["id"] for case in manifest(name)["cases"]]


def case_of(name: str, identity: str) -> dict[str, Any]:
    return next(case for case in manifest(name)["cases"] if case["id"] == identity)


def run(
    op_name: str, role: str, inputs: list[np.ndarray], **attributes: Any
) -> tuple[np.ndarray, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return implementation(OPS[op_name], role)(inputs, attributes)


def computes_double(role: str) -> bool:
    """Bodies compute in float32, for TensorRT has no other type."""
    return not role.startswith("body")


def types(role: str, **attributes: float) -> tuple[str, ...]:
    """float64 too where the role has it, and the recorded attributes are what it is given."""
    exact = as_read(role, attributes) == attributes
    return ("float64", "float32") if computes_double(role) and exact else ("float32",)


@pytest.mark.parametrize("identity", ids("sparsemax.npz"))
@pytest.mark.parametrize("role", RUN_HERE)
def test_sparsemax(role: str, identity: str) -> None:
    case, data = case_of("sparsemax.npz", identity), arrays("sparsemax.npz")
    z, p = data[f"{identity}/z"], data[f"{identity}/p"]
    z, p = np.moveaxis(z, case["axis"], -1), np.moveaxis(p, case["axis"], -1)
    allowed = 1e-12 if computes_double(role) else 2e-7
    (answers,) = run("Sparsemax", role, [z.astype(np.float64)])
    if computes_double(role) or not case["needs_float64"]:
        np.testing.assert_allclose(answers, p, rtol=0, atol=allowed)
    if computes_double(role):
        np.testing.assert_array_equal((answers > 0).sum(-1), data[f"{identity}/support_size"])
    if not case["needs_float64"]:
        (answers,) = run("Sparsemax", role, [z.astype(np.float32)])
        np.testing.assert_allclose(answers, p, rtol=0, atol=2e-7)


@pytest.mark.parametrize("identity", ids("tvmax.npz"))
@pytest.mark.parametrize("role", RUN_HERE)
def test_tvmax(role: str, identity: str) -> None:
    case, data = case_of("tvmax.npz", identity), arrays("tvmax.npz")
    z, p = data[f"{case['input']}/z"], data[f"{identity}/p"]
    for dtype in types(role, lam=case["lam"]):
        answers, error = run("TVMax", role, [z.astype(dtype)], lam=case["lam"])
        allowed = 1e-6 if dtype == "float64" else 1e-5
        assert 0 <= error <= allowed
        assert np.linalg.norm(answers - p) <= max(
            float(error), 1e-9 if dtype == "float64" else 1e-6
        )
        np.testing.assert_allclose(answers, p, rtol=0, atol=allowed)


@pytest.mark.parametrize("identity", ids("tvmax_batch.npz"))
@pytest.mark.parametrize("role", RUN_HERE)
def test_masked_tvmax(role: str, identity: str) -> None:
    case, data = case_of("tvmax_batch.npz", identity), arrays("tvmax_batch.npz")
    sizes = data[f"{identity}/sizes"].astype(np.int64)
    for dtype in types(role, lam=case["lam"]):
        z = data[f"{identity}/z"].astype(dtype)
        answers, error = run("MaskedTVMax", role, [z, sizes], lam=case["lam"])
        allowed = 1e-6 if dtype == "float64" else 1e-5
        assert (error <= allowed).all()
        np.testing.assert_allclose(answers, data[f"{identity}/p"], rtol=0, atol=allowed)
        assert (answers[~data[f"{identity}/mask"]] == 0).all()


@pytest.mark.parametrize("identity", ids("svpn_exact.npz"))
@pytest.mark.parametrize("role", RUN_HERE)
def test_svpn(role: str, identity: str) -> None:
    data = arrays("svpn_exact.npz")
    largest = float(data[f"{identity}/singular_values"].max())
    checked = 0
    for alpha in ALPHAS:
        if f"{identity}/y_alpha{alpha:g}" not in data:
            continue
        y, x = data[f"{identity}/y_alpha{alpha:g}"], data[f"{identity}/x"]
        scale = max(largest**alpha, np.finfo(np.float64).tiny)
        for dtype in types(role, alpha=alpha):
            (answers,) = run("SvPN", role, [x.astype(dtype)], alpha=alpha)
            allowed = 1e-12 if dtype == "float64" else 2e-5
            assert np.abs(answers - y).max() <= allowed * scale, f"alpha {alpha}, {dtype}"
        checked += 1
    assert checked


@pytest.mark.parametrize("identity", ids("svpn_fast.npz"))
@pytest.mark.parametrize("role", RUN_HERE)
def test_svpn_fast(role: str, identity: str) -> None:
    case, data = case_of("svpn_fast.npz", identity), arrays("svpn_fast.npz")
    source = case.get("input", identity)
    start = data.get(f"{source}/v0", np.ones(case["shape"][-1]))
    attributes = {
        "alpha": case["alpha"],
        "singular_values": case["num_sv"] or 0,
        "iterations": case["num_iter"],
    }
    for dtype in types(role, alpha=case["alpha"]):
        inputs = [data[f"{source}/x"].astype(dtype), start.astype(dtype)]
        for key, epsilon in (("y", 0.0), ("y_official_eps", 1e-5)):
            if f"{identity}/{key}" not in data:
                continue
            expected = data[f"{identity}/{key}"]
            (actual,) = run("SvPNFast", role, inputs, **attributes, epsilon=epsilon)
            exact = dtype == "float64" and types(role, epsilon=epsilon)[0] == dtype
            allowed = 1e-10 if exact else 2e-5
            scale = np.abs(expected).max() or 1.0
            assert np.abs(actual - expected).max() <= allowed * scale, f"{key}, {dtype}"


@pytest.mark.parametrize("name", OPS)
def test_rows_that_need_a_gpu(name: str) -> None:
    skip_without_gpu(name, rows=len(ids(RECORDED[name])))


@pytest.mark.parametrize("identity", ids("tvmax.npz"))
def test_the_reference_has_the_recorded_point_and_its_groups(identity: str) -> None:
    case, data = case_of("tvmax.npz", identity), arrays("tvmax.npz")
    z = data[f"{case['input']}/z"].astype(np.float64)
    np.testing.assert_allclose(prox(z, case["lam"]), data[f"{identity}/prox"], rtol=0, atol=1e-9)
    if f"{identity}/groups" in data and case["lam"] > 0:
        actual, expected = groups(z, case["lam"]).ravel(), data[f"{identity}/groups"].ravel()
        # Labels are arbitrary; which cells share one is not.
        pairs = set(zip(actual.tolist(), expected.tolist(), strict=True))
        assert len(pairs) == len(set(actual.tolist())) == len(set(expected.tolist()))


# svPN fast against what the official module answered, gradients included.


OFFICIAL = TESTS / "golden" / "sot"
MODULES = {
    case["id"]: case
    for case in json.loads((OFFICIAL / "svpn.json").read_text())["cases"]
    if case["config"]["vec"] == "full"
}


@pytest.fixture(scope="module")
def official():
    return {**np.load(OFFICIAL / "svpn.npz"), **load_file(OFFICIAL / "svpn.safetensors")}


@pytest.mark.parametrize("identity", MODULES)
def test_the_official_modules_outputs_and_gradients(identity, official, form):
    case, config = MODULES[identity], MODULES[identity]["config"]
    q = torch.from_numpy(official[f"{identity}/input"]).requires_grad_(True)
    start = official.get(f"{identity}/weight", np.ones(q.shape[-1], np.float32))
    v0 = torch.from_numpy(start).requires_grad_(True)
    y = svpn_fast(
        q,
        v0,
        alpha=config["alpha"],
        singular_values=config["svNum"] or 0,
        iterations=config["iterNum"],
    )
    actual = {"output": y.detach().flatten(1)}
    if case["grad"]:
        y.flatten(1).backward(torch.from_numpy(official[f"{identity}/probe"]))
        actual |= {"grad/input": q.grad, "grad/weight": v0.grad}
    allowed = case["tolerance"]["atol"]
    assert set(allowed) <= set(actual)
    for name, atol in allowed.items():
        expected = official[f"{identity}/{name}"]
        np.testing.assert_allclose(
            actual[name].numpy(), expected, rtol=case["tolerance"]["rtol"], atol=atol, err_msg=name
        )
