# SPDX-License-Identifier: Apache-2.0
"""The sparsemax body: every opset, few nodes, and a loop that goes as far as the slowest row."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from one_node import one_node_model
from rtx_builds import build, needs_rtx

from saccade.plugins.ops import OPS, sparsemax
from saccade.plugins.sparsemax.body import sparsemax as body

CASES = [("float32", 20), ("float16", 21), ("float32", 22), ("float16", 23)]


def model(dtype: str, opset: int) -> onnx.ModelProto:
    axes = {"X": "b 2 n", "Y": "b 2 n"}
    return one_node_model(OPS["Sparsemax"], dtype, axes=axes, opset=opset)


def run(x: np.ndarray, dtype: str = "float32", opset: int = 20) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    proto = one_node_model(OPS["Sparsemax"], dtype, opset=opset)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return session.run(None, {"X": x.astype(dtype)})[0]


@pytest.mark.parametrize(("dtype", "opset"), CASES)
def test_every_opset_is_valid_and_exact(dtype: str, opset: int) -> None:
    onnx.checker.check_model(model(dtype, opset), full_check=True)
    x = np.random.default_rng(0).standard_normal((3, 2, 50)).astype(dtype)
    (expected,) = sparsemax.reference(x)
    assert np.abs(run(x, dtype, opset) - expected).max() <= sparsemax.tolerance[dtype]


def test_nothing_is_sorted_and_the_graph_stays_small() -> None:
    loops = [node for node in body().node if node.op_type == "Loop"]
    nodes = [*body().node, *(loop.attribute[0].g.node for loop in loops)]
    assert len(loops) == 1
    assert len(nodes) <= 80
    assert not {node.op_type for node in body().node} & {"TopK", "Sort", "CumSum"}


def falling_slowly(n: int) -> np.ndarray:
    """A row whose support shrinks in many rounds, as each gap is larger than the one above."""
    return -np.cumsum(np.geomspace(1e-6, 1, n))


def test_goes_on_until_the_slowest_row_is_done() -> None:
    """Rounds that a batch mate needs change nothing in a row that is done."""
    slow = falling_slowly(50)
    easy = np.where(np.arange(50) < 3, 0.0, -np.arange(50))
    x = np.stack([easy, slow, np.full(50, np.nan), np.zeros(50)]).astype(np.float32)
    (expected,) = sparsemax.reference(x)
    actual = run(x)
    np.testing.assert_allclose(actual, expected, atol=2e-7, rtol=0)
    for row, alone in zip(actual, x, strict=True):
        np.testing.assert_array_equal(row, run(alone[None])[0])


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
    assert np.abs(run(x) - expected).max() <= sparsemax.tolerance["float32"]


@needs_rtx
def test_builds_an_engine(tmp_path: Path) -> None:
    for dtype, opset in CASES:
        path = tmp_path / f"{dtype}-{opset}.onnx"
        onnx.save(model(dtype, opset), path)
        build(path)
