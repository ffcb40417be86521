# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels' results, checked without a GPU: their threads run as coroutines.

This proves arithmetic, control flow and barriers, not speed and not the compiler for the device;
tests/plugins/native/harness_cases.py is the check on a GPU.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import CudaOnCpu, built
from ops_cases import CASES, normal

from saccade.plugins.ops import OPS

# Every item of a case goes to the workspace where a block has so little.
NO_SHARED_BYTES = 16
TABLE = [
    pytest.param(node, case, dtype, id=f"{node}-{case}-{dtype}")
    for node, cases in CASES.items()
    for case, each in cases.items()
    for dtype in each.dtypes
    if dtype != "float64"
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CudaOnCpu:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH: the kernels need CUDA's headers (CUDA toolkit)")
    folder: Path = tmp_path_factory.mktemp("cuda_on_cpu")
    return CudaOnCpu(built(folder))


def inputs(node: str, case: str, dtype: str) -> tuple[np.ndarray, ...]:
    ports = OPS[node].inputs
    return tuple(
        np.asarray(array, dtype if port.dtype == "T" else port.dtype)
        for array, port in zip(CASES[node][case].inputs, ports, strict=True)
    )


def assert_agrees(node: str, arrays: tuple, given: dict, actual: tuple) -> None:
    op = OPS[node]
    expected = op.reference(*arrays, **op.defaults(given))
    tolerance = op.tolerance[arrays[0].dtype.name] * op.scale(np.nan_to_num(expected[0]))
    np.testing.assert_array_equal(np.isnan(actual[0]), np.isnan(expected[0]))
    away = np.abs(actual[0].astype(np.float64) - expected[0])
    assert (np.nan_to_num(away) <= tolerance).all()
    if len(actual) == 2:
        broken = np.isnan(expected[1])
        np.testing.assert_array_equal(np.isnan(actual[1]), broken)
        assert ((actual[1] >= 0) & (actual[1] <= 1e-5) | broken).all()


@pytest.mark.parametrize(("node", "case", "dtype"), TABLE)
def test_agrees_with_reference(node: str, case: str, dtype: str, kernels: CudaOnCpu) -> None:
    arrays, given = inputs(node, case, dtype), CASES[node][case].attributes
    answers = kernels(OPS[node], arrays, given)
    assert_agrees(node, arrays, given, answers)
    # A missing barrier shows in an answer that depends on the order of the threads, and the
    # workspace must not change a bit.
    for again in (
        kernels(OPS[node], arrays, given, descending=True),
        kernels(OPS[node], arrays, given, shared_bytes=NO_SHARED_BYTES),
    ):
        for one, other in zip(answers, again, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("n", [31, 32, 33, 257, 513, 1025, 1500, 2048, 2049, 13000, 13004])
def test_sparsemax_of_every_row_length(n: int, kernels: CudaOnCpu) -> None:
    for dtype in ("float32", "float16"):
        arrays = (normal(3, n, seed=n).astype(dtype),)
        assert_agrees("Sparsemax", arrays, {}, kernels(OPS["Sparsemax"], arrays, {}))


def test_tvmax_of_a_large_grid(kernels: CudaOnCpu) -> None:
    arrays = (normal(1, 32, 32, seed=1).astype(np.float32),)
    given = {"lam": 0.1}
    assert_agrees("TVMax", arrays, given, kernels(OPS["TVMax"], arrays, given))


def test_an_unfinished_search_says_how_far_it_may_be(kernels: CudaOnCpu) -> None:
    arrays = (0.1 * normal(2, 14, 14, seed=2).astype(np.float32),)
    op = OPS["TVMax"]
    exact = op.reference(*arrays, lam=0.1)[0]
    bounds = []
    for rounds in (1, 10, 50):
        answers, error = kernels(op, arrays, {"lam": 0.1, "max_iterations": rounds})
        away = np.linalg.norm((answers - exact).reshape(2, -1), axis=-1)
        assert (error > 1e-5).all()
        assert (away <= error).all()
        bounds.append(error)
    assert (bounds[2] < bounds[0]).all()


def test_sizes_that_do_not_fit_break_their_grid_only(kernels: CudaOnCpu) -> None:
    z = normal(4, 3, 4, seed=3).astype(np.float32)
    sizes = np.array([[3, 4], [4, 4], [2, -1], [2, 2]])
    actual, error = kernels(OPS["MaskedTVMax"], (z, sizes), {})
    assert np.isnan(actual[1:3]).all()
    assert np.isnan(error[1:3]).all()
    for index in (0, 3):
        expected, _ = OPS["MaskedTVMax"].reference(z[index], sizes[index], lam=0.01)
        np.testing.assert_allclose(actual[index], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("node", CASES)
def test_batch_mates_do_not_matter(node: str, kernels: CudaOnCpu) -> None:
    case = "sizes" if node == "MaskedTVMax" else "random" if "max" in node.lower() else "square"
    arrays, given = inputs(node, case, "float32"), CASES[node][case].attributes
    shared = [len(array) == len(arrays[0]) and array.ndim > 1 for array in arrays]
    together = kernels(OPS[node], arrays, given)
    for index in range(len(arrays[0])):
        alone = kernels(
            OPS[node],
            tuple(
                array[index : index + 1] if cut else array
                for array, cut in zip(arrays, shared, strict=True)
            ),
            given,
        )
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], other[index])
