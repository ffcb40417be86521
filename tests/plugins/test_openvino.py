# SPDX-License-Identifier: Apache-2.0
"""The bodies in OpenVINO, which knows no local function: written out, compiled, held to the table.

It reads some operators otherwise than ONNX Runtime does, and says nothing: an explicit 0 of
HardSigmoid's beta is its default there, and the largest of -inf is a number.
"""

import sys
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from ops_cases import CASES
from ops_implementations import as_read
from test_conformance import disagreement

# With it, the import alone writes an identity into the home folder.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
openvino = pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[dev]'")
pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")

from one_node import one_node_model  # noqa: E402

from saccade.exporter.graph.precision import inlined  # noqa: E402
from saccade.plugins.ops import OPS  # noqa: E402

# The other types are in benchmarks/results/ops_runtimes.json. (In float64 it clips infinities.)
DTYPE = "float32"
TABLE = [
    pytest.param(op, case, id=f"{op}-{case}")
    for op, cases in CASES.items()
    for case, each in cases.items()
    if DTYPE in each.dtypes
]


@lru_cache
def compiled(name: str, attributes: tuple[Any, ...], ranks: tuple[int, ...]) -> Any:
    op = OPS[name]
    axes = {
        port.name: " ".join(f"{port.name.lower()}_{axis}" for axis in range(rank))
        for port, rank in zip(op.inputs, ranks, strict=True)
    }
    proto = inlined(one_node_model(op, DTYPE, dict(attributes), axes=axes))
    core = openvino.Core()
    # On a CPU with AMX it computes in bfloat16 otherwise.
    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    return core.compile_model(core.read_model(proto.SerializeToString()), "CPU", exact)


@pytest.mark.parametrize(("name", "case"), TABLE)
def test_agrees_with_reference(name: str, case: str) -> None:
    op, given = OPS[name], CASES[name][case]
    arrays = given.arrays(DTYPE)
    expected = op.reference(*arrays, **as_read("body", op.defaults(given.attributes)))
    ranks = tuple(array.ndim for array in arrays)
    actual = compiled(name, tuple(sorted(given.attributes.items())), ranks)(arrays)
    assert disagreement(op, np.array(actual[0]), expected[0]) <= op.tolerance[DTYPE]
    if len(op.outputs) == 2:
        error = np.array(actual[1])
        assert np.array_equal(np.isnan(error), np.isnan(expected[1]))
        assert (error[~np.isnan(error)] <= 1e-5).all()
