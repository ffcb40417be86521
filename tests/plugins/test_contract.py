# SPDX-License-Identifier: Apache-2.0
"""The contracts: what they declare, what they refuse, and that calling one needs numpy only."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from one_node import one_node_model

from saccade.core.errors import SaccadeError, ShapeError
from saccade.plugins.native import contracts
from saccade.plugins.onnx_model import attach_bodies, check_nodes
from saccade.plugins.ops import OPS, masked_tvmax, sparsemax, svpn, svpn_fast, tvmax

GRID = np.zeros((2, 3, 4))


def test_five_ops_are_declared_and_importing_them_loads_no_framework():
    code = (
        "import sys; from saccade.plugins.ops import OPS, sparsemax;"
        "import numpy; sparsemax(numpy.zeros((2, 3)));"
        "print(sorted(OPS), [m for m in ('torch', 'onnx', 'onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == (
        "['MaskedTVMax', 'Sparsemax', 'SvPN', 'SvPNFast', 'TVMax'] []"
    ), done.stderr


def test_reference_parameters_are_the_attributes():
    assert {name: list(op.attributes) for name, op in OPS.items()} == {
        "Sparsemax": [],
        "TVMax": ["lam", "tolerance", "max_iterations"],
        "MaskedTVMax": ["lam", "tolerance", "max_iterations"],
        "SvPN": ["alpha"],
        "SvPNFast": ["alpha", "singular_values", "iterations", "epsilon"],
    }


# What is wrong, of arrays that `of` makes for NumPy or for torch, and what is said.
WRONG: list[tuple[Callable[[Callable[..., Any]], object], str]] = [
    (lambda of: sparsemax(of(1.0)), "axis is -1"),
    (lambda of: sparsemax(of(GRID), axis=3), "axis is 3, expected one of the 3 axes"),
    (lambda of: sparsemax(of(GRID.astype(np.complex64))), "input X is complex64, expected float32"),
    (lambda of: tvmax(of(np.zeros(3))), r"input Z has shape \[3\], expected Z \[... h w\]"),
    (lambda of: tvmax(of(GRID), lam=-1), "lam is -1, expected a finite number >= 0"),
    (lambda of: tvmax(of(GRID), lam=float("nan")), "lam is nan"),
    (lambda of: tvmax(of(GRID), lam="0.1"), "lam is '0.1'"),
    (lambda of: tvmax(of(GRID), tolerance=0), "tolerance is 0, expected a finite number > 0"),
    (lambda of: tvmax(of(GRID), max_iterations=1.5), "max_iterations is 1.5, expected a whole"),
    (lambda of: tvmax(of(GRID), max_iterations=True), "max_iterations is True"),
    (lambda of: tvmax(of(GRID), sizes=of(np.array([[3, 4], [4, 4]]))), "saccade::MaskedTVMax.*4"),
    (lambda of: tvmax(of(GRID), sizes=of(np.array([[3, 4]]))), r"input sizes has shape \[1, 2\]"),
    (lambda of: tvmax(of(GRID), sizes=of(np.ones((2, 2)))), "sizes is float64, expected int64"),
    (lambda of: masked_tvmax(of(GRID), of(np.ones((2, 3), np.int64))), r"\[2, 3\]"),
    (lambda of: svpn(of(GRID), alpha=0), r"alpha is 0, expected a number in \(0, 1\]"),
    (lambda of: svpn(of(GRID), alpha=1.01), "alpha is 1.01"),
    (lambda of: svpn(of(np.zeros(4))), r"input Q has shape \[4\]"),
    (lambda of: svpn_fast(of(GRID), of(np.zeros(3))), r"input v0 has shape \[3\]"),
    (lambda of: svpn_fast(of(GRID), of(np.zeros(4)), iterations=0), "iterations is 0"),
    (lambda of: svpn_fast(of(GRID), of(np.zeros(4)), singular_values=-1), "singular_values is -1"),
    (lambda of: OPS["SvPN"].defaults({"beta": 1}), "attribute is 'beta', expected alpha"),
]


def error_of(words: str) -> type[SaccadeError]:
    return ShapeError if "shape" in words or "axis" in words else SaccadeError


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_wrong_input_says_op_found_and_expected(call, words):
    with pytest.raises(error_of(words), match=words) as raised:
        call(np.asarray)
    assert "saccade::" in str(raised.value)


def test_answers_have_the_type_of_the_question():
    half = sparsemax(np.zeros((2, 4), np.float16))
    assert half.dtype == np.float16
    assert sparsemax([0, 0]).tolist() == [0.5, 0.5]
    p, error = tvmax(GRID.astype(np.float32), return_error=True)
    assert (p.dtype, error.dtype, error.shape) == (np.float32, np.float32, (2,))


def test_axis_is_the_callers():
    z = np.random.default_rng(0).standard_normal((3, 4, 5))
    np.testing.assert_array_equal(
        sparsemax(z, axis=1), sparsemax(z.transpose(0, 2, 1)).transpose(0, 2, 1)
    )


def test_output_shapes_follow_the_axis_rule():
    assert OPS["MaskedTVMax"].output_shapes(("b", 14, 14), ("b", 2)) == (("b", 14, 14), ("b",))
    with pytest.raises(ShapeError, match=r"\[5, 2\]"):
        OPS["MaskedTVMax"].output_shapes((4, 14, 14), (5, 2))


def test_nodes_that_break_the_contract_are_named():
    model = one_node_model(OPS["SvPN"], body=False)
    assert check_nodes(model) == ("SvPN",)
    model.graph.node[0].name = "head/norm"
    model.graph.node[0].attribute[0].f = 2.0
    with pytest.raises(SaccadeError, match=r"saccade::SvPN \(node 'head/norm'\): alpha is 2.0"):
        check_nodes(model)
    model.graph.node[0].attribute[0].name = "alfa"
    with pytest.raises(SaccadeError, match="attribute is 'alfa', expected alpha"):
        check_nodes(model)
    model.graph.node[0].input.append("X")
    with pytest.raises(SaccadeError, match="2 inputs, expected 1: Q"):
        check_nodes(model)
    model.graph.node[0].op_type = "SVPN"
    with pytest.raises(SaccadeError, match="op is 'SVPN', expected one of Sparsemax"):
        check_nodes(model)


def test_nodes_inside_a_loop_get_their_body_too():
    import onnx

    model = one_node_model(OPS["SvPN"], body=False)
    inner = onnx.helper.make_graph([model.graph.node.pop()], "inner", [], [])
    branches = {"then_branch": inner, "else_branch": inner}
    model.graph.node.append(onnx.helper.make_node("If", ["flag"], ["Y"], **branches))
    attach_bodies(model)
    assert [function.name for function in model.functions] == ["SvPN"]


def test_the_command_lists_ops_and_says_what_is_missing():
    done = subprocess.run(
        [sys.executable, "-m", "saccade", "ops", "--json"], capture_output=True, text=True
    )
    content = json.loads(done.stdout)
    assert [op["name"] for op in content["ops"]] == [op.name for op in OPS.values()]
    for implementation in content["implementations"]:
        assert implementation["available"] or ":" in implementation["detail"], implementation
    table = subprocess.run(
        [sys.executable, "-m", "saccade", "ops"], capture_output=True, text=True
    ).stdout
    assert "max_iterations=2000" in table
    assert "[... h w]" in table


def test_cpp_reads_the_contracts_as_they_are():
    assert contracts.HEADER.read_text() == contracts.header(), "write it anew: see its first lines"
