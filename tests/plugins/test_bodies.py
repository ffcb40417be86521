# SPDX-License-Identifier: Apache-2.0
"""Function bodies of the ops in ONNX Runtime: opsets, batch mates, rounds, bounds, engines."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from one_node import one_node_model
from rtx_builds import build, needs_rtx
from test_conformance import disagreement

from saccade.plugins.ops import OPS, sparsemax
from saccade.plugins.sparsemax.body import sparsemax as sparsemax_body

# Of every op: attributes, and axes of what a file takes and gives; {0} is a side.
_GRID = {"Z": "b {0} {0}", "sizes": "b 2", "P": "b {0} {0}", "error": "b"}
_MATRIX = {"Q": "b {0} {0}", "v0": "{0}", "Y": "b {0} {0}"}
FORMS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Sparsemax": ({}, {"X": "b 2 n", "Y": "b 2 n"}),
    "SvPN": ({"alpha": 0.3}, _MATRIX),
    "SvPNFast": ({"singular_values": 2, "iterations": 3}, _MATRIX),
    "TVMax": ({"lam": 0.2}, _GRID),
    "MaskedTVMax": ({"lam": 0.2}, _GRID),
}
MATRICES = ("SvPN", "SvPNFast")


def model(
    name: str, side: int = 14, dtype: str = "float32", opset: int = 20, **attributes: Any
) -> onnx.ModelProto:
    given, axes = FORMS[name]
    sized = {port: words.format(side) for port, words in axes.items()}
    return one_node_model(OPS[name], dtype, {**given, **attributes}, axes=sized, opset=opset)


def answers(proto: onnx.ModelProto, *arrays: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    names = [port.name for port in session.get_inputs()]
    return session.run(None, dict(zip(names, arrays, strict=True)))


def run(name: str, *arrays: np.ndarray, **attributes: Any) -> np.ndarray:
    """The op's first answer, from a file of any axes."""
    values = {**FORMS[name][0], **attributes}
    return answers(one_node_model(OPS[name], arrays[0].dtype.name, values), *arrays)[0]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(name: str, *shape: int, seed: int = 0) -> list[np.ndarray]:
    first, second = normal(*shape, seed=seed), np.ones(shape[-1], np.float32)
    sizes = np.array([[4, 4], [3, 2]])
    return [first, *{"SvPNFast": [second], "MaskedTVMax": [sizes]}.get(name, [])]


def error_of(name: str, actual: np.ndarray, arrays: list[np.ndarray], **attributes: Any) -> float:
    op = OPS[name]
    values = op.defaults({**FORMS[name][0], **attributes})
    return disagreement(op, actual, op.reference(*arrays, **values)[0])


@pytest.mark.parametrize("opset", [20, 21, 22, 23])
@pytest.mark.parametrize("name", FORMS)
def test_every_opset_is_valid_and_right(name: str, opset: int) -> None:
    dtype = "float16" if name == "Sparsemax" and opset % 2 else "float32"
    shape = {"Sparsemax": (3, 2, 50)}.get(name, (2, 4, 4))
    proto = model(name, shape[-1], dtype, opset)
    onnx.checker.check_model(proto, full_check=True)
    first, *rest = inputs(name, *shape, seed=4)
    arrays = [first.astype(dtype), *rest]
    actual, *bounds = answers(proto, *arrays)
    assert error_of(name, actual, arrays) <= OPS[name].tolerance[dtype]
    assert all((bound <= 1e-5).all() for bound in bounds)


BUILDS = [
    *(("Sparsemax", 14, *each) for each in (("float32", 20), ("float16", 21), ("float32", 22))),
    ("Sparsemax", 14, "float16", 23),
    *((name, 14, dtype, 20) for name in MATRICES for dtype in ("float32", "float16")),
    *(("TVMax", side, "float32", 20) for side in (7, 14)),
    ("MaskedTVMax", 8, "float32", 23),
]


@needs_rtx
@pytest.mark.parametrize(("name", "side", "dtype", "opset"), BUILDS)
def test_builds_an_engine(name: str, side: int, dtype: str, opset: int, tmp_path: Path) -> None:
    onnx.save(model(name, side, dtype, opset), tmp_path / "op.onnx")
    build(tmp_path / "op.onnx")


# Sparsemax: few nodes, and a loop that goes as far as the slowest row.


def test_nothing_is_sorted_and_the_graph_stays_small() -> None:
    nodes = sparsemax_body().node
    (loop,) = [node for node in nodes if node.op_type == "Loop"]
    assert len(nodes) < 80 and len(loop.attribute[0].g.node) <= 15
    assert not {node.op_type for node in nodes} & {"TopK", "Sort", "CumSum"}


def test_goes_on_until_the_slowest_row_is_done() -> None:
    """Rounds that a batch mate needs change nothing in a row that is done."""
    # A row whose support shrinks in many rounds, as each gap is larger than the one above.
    slow = -np.cumsum(np.geomspace(1e-6, 1, 50))
    easy = np.where(np.arange(50) < 3, 0.0, -np.arange(50))
    x = np.stack([easy, slow, np.full(50, np.nan), np.zeros(50)]).astype(np.float32)
    (expected,) = sparsemax.reference(x)
    actual = run("Sparsemax", x)
    np.testing.assert_allclose(actual, expected, atol=2e-7, rtol=0)
    for row, alone in zip(actual, x, strict=True):
        np.testing.assert_array_equal(row, run("Sparsemax", alone[None])[0])


@pytest.mark.parametrize("spread", [0.0, 1e-8, 1e-7, 1e-6, 1e-4])
@pytest.mark.parametrize("winners", [1, 2, 30])
def test_a_crowd_at_the_threshold(spread: float, winners: int) -> None:
    """Rounding takes a step past thousands of almost equal entries."""
    generator = np.random.default_rng(winners)
    top = -generator.random((8, winners)) * 0.3 / winners
    top[:, 0] = 0
    threshold = (top.sum(axis=1, keepdims=True) - 1) / winners
    crowd = threshold + spread * generator.standard_normal((8, 4000))
    x = np.concatenate([top, crowd], axis=1).astype(np.float32)
    (expected,) = sparsemax.reference(x)
    assert np.abs(run("Sparsemax", x) - expected).max() <= sparsemax.tolerance["float32"]


# Matrices: sizes, mates, and ranks that are lost.


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (3, 2), (5, 5), (6, 40), (40, 6), (33, 34)])
@pytest.mark.parametrize("name", MATRICES)
def test_odd_and_even_sizes(name: str, shape: tuple[int, int]) -> None:
    arrays = inputs(name, 3, *shape)
    values = {} if name == "SvPN" else {"singular_values": min(2, *shape)}
    answer = run(name, *arrays, **values)
    assert error_of(name, answer, arrays, **values) <= OPS[name].tolerance["float32"]


@pytest.mark.parametrize("name", MATRICES)
def test_mates_do_not_matter(name: str) -> None:
    """A matrix alone, and beside others that need more sweeps or are broken: the same bits."""
    q, *start = inputs(name, 5, 9, 9)
    q[1] = 4 * np.eye(9)
    q[2, 0, 0] = np.inf
    q[3] *= np.logspace(0, -4, 9, dtype=np.float32)
    together = run(name, q, *start)
    for index, each in enumerate(q):
        alone = run(name, each[None], *start)
        assert alone.tobytes() == together[index : index + 1].tobytes()


def test_rank_deficient_matrices_are_exact() -> None:
    """Whole numbers of rank 3: what float32 leaves of the other singular values counts as 0."""
    generator = np.random.default_rng(1)
    left = generator.integers(-2, 3, (4, 24, 3)).astype(np.float32)
    q = left @ generator.integers(-2, 3, (4, 3, 18)).astype(np.float32)
    assert error_of("SvPN", run("SvPN", q), [q]) <= OPS["SvPN"].tolerance["float32"]


# Grids: batch mates do not matter, and bounds are honest.


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
    together = answers(proto, z)
    alone = [answers(proto, each[None]) for each in z]
    for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("rounds", [1, 4, 15])
def test_the_bound_is_honest_where_rounds_run_out(rounds: int) -> None:
    z = normal(6, 9, 9, seed=2)
    p, error = answers(model("TVMax", 9, lam=0.4, max_iterations=rounds), z)
    assert error.max() > 0.01 and np.isfinite(error).all()
    assert (distance(p, z, 0.4) <= error + 1e-6).all()
    np.testing.assert_allclose(p.sum(axis=(1, 2)), 1, atol=1e-6)


@pytest.mark.parametrize("tolerance", [1e-6, 1e-2])
def test_the_bound_meets_the_tolerance(tolerance: float) -> None:
    z = normal(6, 9, 9, seed=3)
    p, error = answers(model("TVMax", 9, lam=0.4, tolerance=tolerance), z)
    assert (error <= max(tolerance, 1e-5)).all()
    assert (distance(p, z, 0.4) <= error + 1e-6).all()
    assert (error > 1e-5).any() == (tolerance == 1e-2)


def test_a_grid_without_answer_is_nan_in_its_own_cells() -> None:
    z, sizes = normal(2, 5, 5, seed=5), np.array([[3, 2], [5, 5]])
    z[0, 1, 1] = np.nan
    p, error = answers(model("MaskedTVMax", 5, lam=0.1), z, sizes)
    assert np.isnan(p[0, :3, :2]).all() and not p[0, 3:].any() and not p[0, :, 2:].any()
    assert np.isnan(error[0])
    np.testing.assert_allclose(p[1], OPS["TVMax"].reference(z[1], lam=0.1)[0], atol=1e-5)
