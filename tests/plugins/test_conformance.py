# SPDX-License-Identifier: Apache-2.0
"""The table op x implementation x case x type: everyone against the reference."""

import warnings

import numpy as np
import pytest
from ops_cases import CASES, Case
from ops_implementations import ROLES, as_read, implementation, skip_without_gpu

from saccade.plugins.contract import Op
from saccade.plugins.ops import OPS

# Slow in Python, and the same graph as in ONNX Runtime: the smaller half of the table proves it.
_REFERENCE_EVALUATOR = "body in onnx's reference"


def table() -> list:
    return [
        pytest.param(op, role, case, dtype, id=f"{op}-{role}-{case}-{dtype}")
        for op, cases in CASES.items()
        for role in ROLES
        for case, each in cases.items()
        for dtype in each.dtypes
        if not (role == _REFERENCE_EVALUATOR and dtype != "float32")
    ]


@pytest.mark.parametrize("name", OPS)
def test_rows_that_need_a_gpu(name: str) -> None:
    """Rows of the table that this machine leaves out, in one row an op."""
    skip_without_gpu(name, rows=sum(len(case.dtypes) for case in CASES[name].values()))


def disagreement(op: Op, actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference on the op's scale; NaN on one side only is infinitely far."""
    assert actual.shape == expected.shape
    if expected.size == 0:
        return 0.0
    if (np.isnan(actual) != np.isnan(expected)).any():
        return np.inf
    known = np.where(np.isnan(expected), 0, expected)
    return float(np.max(np.abs(np.nan_to_num(actual) - known) / op.scale(known)))


@pytest.mark.parametrize(("name", "role", "case", "dtype"), table())
def test_agrees_with_reference(name: str, role: str, case: str, dtype: str) -> None:
    op, given = OPS[name], CASES[name][case]
    arrays = given.arrays(dtype)
    expected = op.reference(*arrays, **as_read(role, op.defaults(given.attributes)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = implementation(op, role)(arrays, given.attributes)
    assert actual[0].dtype.name == dtype
    computed_in = "float32" if role.startswith("body") and dtype == "float64" else dtype
    assert disagreement(op, actual[0], expected[0]) <= op.tolerance[computed_in]
    if len(actual) == 2:
        check_bound(op, actual, expected, computed_in)


def check_bound(op: Op, actual: tuple, expected: tuple, dtype: str) -> None:
    """`error` is under the tolerance, and no smaller than the distance it bounds."""
    error = np.asarray(actual[1], np.float64)
    assert actual[1].dtype == np.float32
    assert error.shape == expected[1].shape
    assert ((error >= 0) | np.isnan(expected[1])).all()
    allowed = {"float64": 1e-6, "float32": 1e-5, "float16": 1e-5}[dtype]
    assert (error <= allowed)[~np.isnan(expected[1])].all()
    if dtype == "float64":
        away = np.sqrt(np.square(actual[0] - expected[0]).sum(axis=(-2, -1)))
        assert (away <= error + 1e-9)[~np.isnan(expected[1])].all()


@pytest.mark.parametrize("name", OPS)
def test_the_table_can_fail(name: str) -> None:
    """A plausible wrong answer is caught by at least one case of the op."""
    op = OPS[name]
    caught = 0
    for case in CASES[name].values():
        arrays = case.arrays("float32")
        (expected, *_) = op.reference(*arrays, **op.defaults(case.attributes))
        wrong = wrong_answer(name, arrays[0].astype(np.float64))
        caught += disagreement(op, wrong, expected) > op.tolerance["float32"]
    assert caught >= len(CASES[name]) / 3


def wrong_answer(name: str, x: np.ndarray) -> np.ndarray:
    """Softmax for sparsemax, no fusion for TVMax, every power 1 for svPN."""
    if name.startswith("SvPN"):
        return x
    axes = -1 if name == "Sparsemax" else (-2, -1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if x.size == 0:
            return x
        weights = np.exp(x - x.max(axis=axes, keepdims=True))
        return weights / weights.sum(axis=axes, keepdims=True)


@pytest.mark.parametrize("name", OPS)
def test_declared_cases_hold_in_their_types(name: str) -> None:
    """A case of half precision has the same numbers in all types, so answers are comparable."""
    for case in CASES[name].values():
        if "float16" in case.dtypes:
            assert_same_in_half(case)


def assert_same_in_half(case: Case) -> None:
    for wide, half in zip(case.arrays("float64"), case.arrays("float16"), strict=True):
        np.testing.assert_allclose(half.astype(np.float64), wide, rtol=1e-3, atol=1e-7)
