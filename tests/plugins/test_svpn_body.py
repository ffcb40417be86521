# SPDX-License-Identifier: Apache-2.0
"""The function bodies of SvPN and SvPNFast: batch mates, opsets, sizes, and TensorRT-RTX."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from one_node import one_node_model
from rtx_builds import build, needs_rtx

from saccade.plugins.ops import OPS

AXES = {"Q": "b 14 14", "v0": "14", "Y": "b 14 14"}
ATTRIBUTES = {"SvPN": {"alpha": 0.3}, "SvPNFast": {"singular_values": 2, "iterations": 3}}


def run(name: str, *arrays: np.ndarray, opset: int = 20, **attributes: float | int) -> np.ndarray:
    op = OPS[name]
    values = {**ATTRIBUTES[name], **attributes}
    proto = one_node_model(op, arrays[0].dtype.name, values, opset=opset)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [port.name for port in op.inputs]
    return session.run(None, dict(zip(names, arrays, strict=True)))[0]


def inputs(name: str, *shape: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    q = generator.standard_normal(shape).astype(np.float32)
    return [q] if name == "SvPN" else [q, np.ones(shape[-1], np.float32)]


def relative_error(name: str, actual: np.ndarray, arrays: list[np.ndarray], **attributes) -> float:
    op = OPS[name]
    (expected,) = op.reference(*arrays, **op.defaults({**ATTRIBUTES[name], **attributes}))
    return float(np.max(np.abs(actual - expected) / op.scale(expected)))


@pytest.mark.parametrize("opset", [20, 21, 22, 23])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_every_opset(name: str, opset: int) -> None:
    arrays = inputs(name, 2, 6, 7)
    proto = one_node_model(OPS[name], attributes=ATTRIBUTES[name], axes=AXES, opset=opset)
    onnx.checker.check_model(proto, full_check=True)
    answer = run(name, *arrays, opset=opset)
    assert relative_error(name, answer, arrays) <= OPS[name].tolerance["float32"]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (3, 2), (5, 5), (6, 40), (40, 6), (33, 34)])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_odd_and_even_sizes(name: str, shape: tuple[int, int]) -> None:
    arrays = inputs(name, 3, *shape)
    values = {} if name == "SvPN" else {"singular_values": min(2, *shape)}
    answer = run(name, *arrays, **values)
    assert relative_error(name, answer, arrays, **values) <= OPS[name].tolerance["float32"]


@pytest.mark.parametrize("name", ATTRIBUTES)
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
    assert relative_error("SvPN", run("SvPN", q), [q]) <= OPS["SvPN"].tolerance["float32"]


@needs_rtx
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_builds_an_engine(name: str, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "op.onnx"
    onnx.save(one_node_model(OPS[name], dtype, ATTRIBUTES[name], axes=AXES), path)
    build(path)
