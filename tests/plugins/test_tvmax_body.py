# SPDX-License-Identifier: Apache-2.0
"""TVMax's ONNX bodies: batch mates do not matter, bounds are honest, every runtime reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from one_node import one_node_model
from rtx_builds import build, needs_rtx

from saccade.plugins.ops import OPS

_AXES = {"Z": "b {0} {0}", "sizes": "b 2", "P": "b {0} {0}", "error": "b"}


def model(name: str, side: int, opset: int = 20, **attributes: Any) -> "onnx.ModelProto":
    axes = {port: words.format(side) for port, words in _AXES.items()}
    return one_node_model(OPS[name], attributes=attributes, axes=axes, opset=opset)


def run(proto: "onnx.ModelProto", *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    held = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    p, error = held.run(None, dict(zip(("Z", "sizes"), arrays, strict=False)))
    return p, error


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def distance(p: np.ndarray, z: np.ndarray, lam: float) -> np.ndarray:
    exact = OPS["TVMax"].reference(z, lam=lam)[0]
    return np.linalg.norm((p - exact).reshape(len(z), -1), axis=1)


@pytest.mark.parametrize("side", [7, 14])
def test_a_finished_grid_is_left_alone(side: int) -> None:
    # Seven: 49 cells, so that rows of a batch would start at every place in a vector.
    far = -3 * normal(1, side, side) ** 2
    z = np.concatenate([far, normal(2, side, side, seed=1), far, np.zeros_like(far)])
    # A loose tolerance: each more round would change a grid that has met it, and its bound.
    proto = model("TVMax", side, lam=0.5, tolerance=0.05)
    together = run(proto, z)
    alone = [run(proto, each[None]) for each in z]
    for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("rounds", [1, 4, 15])
def test_the_bound_is_honest_where_rounds_run_out(rounds: int) -> None:
    z = normal(6, 9, 9, seed=2)
    p, error = run(model("TVMax", 9, lam=0.4, max_iterations=rounds), z)
    assert error.max() > 0.01 and np.isfinite(error).all()
    assert (distance(p, z, 0.4) <= error + 1e-6).all()
    np.testing.assert_allclose(p.sum(axis=(1, 2)), 1, atol=1e-6)


@pytest.mark.parametrize("tolerance", [1e-6, 1e-2])
def test_the_bound_meets_the_tolerance(tolerance: float) -> None:
    z = normal(6, 9, 9, seed=3)
    p, error = run(model("TVMax", 9, lam=0.4, tolerance=tolerance), z)
    assert (error <= max(tolerance, 1e-5)).all()
    assert (distance(p, z, 0.4) <= error + 1e-6).all()
    assert (error > 1e-5).any() == (tolerance == 1e-2)


def test_a_grid_without_answer_is_nan_in_its_own_cells() -> None:
    z, sizes = normal(2, 5, 5, seed=5), np.array([[3, 2], [5, 5]])
    z[0, 1, 1] = np.nan
    p, error = run(model("MaskedTVMax", 5, lam=0.1), z, sizes)
    assert np.isnan(p[0, :3, :2]).all() and not p[0, 3:].any() and not p[0, :, 2:].any()
    assert np.isnan(error[0])
    np.testing.assert_allclose(p[1], OPS["TVMax"].reference(z[1], lam=0.1)[0], atol=1e-5)


@pytest.mark.parametrize("opset", [20, 21, 22, 23])
@pytest.mark.parametrize("name", ["TVMax", "MaskedTVMax"])
def test_every_opset_checks_and_runs(name: str, opset: int) -> None:
    proto = model(name, 4, opset, lam=0.2)
    onnx.checker.check_model(proto, full_check=True)
    inputs = (normal(2, 4, 4, seed=4), np.array([[4, 4], [3, 2]]))[: len(OPS[name].inputs)]
    p, error = run(proto, *inputs)
    np.testing.assert_allclose(p, OPS[name].reference(*inputs, lam=0.2)[0], atol=1e-5)
    assert (error <= 1e-5).all()


@needs_rtx
@pytest.mark.parametrize(
    ("name", "side", "opset"), [("TVMax", 7, 20), ("TVMax", 14, 20), ("MaskedTVMax", 8, 23)]
)
def test_builds_an_engine_for_any_batch(name: str, side: int, opset: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(name, side, opset, lam=0.05), path)
    build(path)
