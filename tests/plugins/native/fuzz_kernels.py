# SPDX-License-Identifier: Apache-2.0
"""Drives one op's ONNX Runtime kernel with whatever hypothesis thinks of; check_fuzz.py runs it.

python fuzz_kernels.py OP LIBRARY EXAMPLES: each example is a node with attributes, good or bad, and
tensors, good or bad. Bad ones must be refused by name; good ones must agree with the reference,
and an item's answer must not depend on its neighbours. The sanitizers watch.
"""

import ctypes
import sys
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from one_node import one_node_model

from saccade.core.errors import SaccadeError, ShapeError
from saccade.plugins.contract import Op
from saccade.plugins.ops import OPS

# Values at the edges of what each attribute may be, and beyond them.
ATTRIBUTES = {
    "lam": (0.0, 0.01, 0.1, 1.0, 1e30, 1e-40, -0.0, -1.0, np.nan, np.inf),
    "tolerance": (1e-6, 1e-3, 1e-30, 1e30, 0.0, -1.0, np.nan, np.inf),
    "max_iterations": (2000, 100, 1, 2, 0, -1, -(2**63)),
    "alpha": (0.5, 1.0, 0.3, 1e-30, 0.0, -1.0, 1.0000001, np.nan),
    "singular_values": (1, 0, 2, 40, -1),
    "iterations": (1, 2, 9, 0, -5),
    "epsilon": (1e-5, 0.0, 1.0, 1e30, -1e-5, np.nan, np.inf),
}
# Attributes under which the answer is compared, whatever the values.
ORDINARY = {
    "lam": (0.0, 0.01, 0.1, 1.0),
    "tolerance": (1e-6,),
    "max_iterations": (2000,),
    "alpha": (0.5, 1.0, 0.3),
    # A second value starts from a vector that the first has made orthogonal: rounding decides.
    "singular_values": (1,),
    "iterations": (1, 2),
    "epsilon": (1e-5, 1.0),
}
SPECIAL = {
    "float64": (np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, 1e30, -1e30, -1e9, -1e8, 1e308, 1.0),
    "float32": (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 1e30, -1e30, -1e9, -1e8, 3e38, 1.0),
    "float16": (np.nan, np.inf, -np.inf, 0.0, -0.0, 6e-8, 65504.0, -65504.0, 1.0),
}
KINDS = ("normal", "ties", "large", "small", "mixed", "special")
SIDES = st.sampled_from((0, 1, 2, 3, 4, 5, 7, 8, 9, 14, 16, 17, 31, 33))
LENGTHS = st.sampled_from((0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 196, 1025))
LEADING = st.lists(st.sampled_from((0, 1, 2, 3, 5, 16, 17, 33)), max_size=3)
MOST_ELEMENTS = 6000


def values(kind: str, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape)
    if kind == "ties":
        x = np.round(x)
    elif kind == "large":
        x = x * (1e3 if dtype == "float16" else 1e4)
    elif kind == "small":
        x = x * (6e-6 if dtype == "float16" else 1e-20)
    elif kind in ("mixed", "special"):
        odd = random.choice(SPECIAL[dtype], size=shape)
        x = np.where(random.random(shape) < (0.05 if kind == "mixed" else 0.8), odd, x)
    return np.asarray(x, dtype)


@st.composite
def tensors(draw: Any, op: Op, dtype: str) -> tuple[str, list[np.ndarray]]:
    """Arrays of one kind of values, one a port; some have shapes that do not fit."""
    kind = draw(st.sampled_from(KINDS))
    leading = draw(LEADING)
    axes = [draw(LENGTHS)] if op.node == "Sparsemax" else [draw(SIDES), draw(SIDES)]
    while leading and np.prod([*leading, *axes], dtype=float) > MOST_ELEMENTS:
        leading = leading[1:]
    seed = draw(st.integers(0, 2**32 - 1))
    wrong = draw(st.integers(0, 15)) == 0
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4))) if wrong else (*leading, *axes)
    arrays = [values(kind, shape, dtype, seed)]
    if op.node == "SvPNFast":
        extra = draw(st.sampled_from((0,) * 12 + (1, -1)))
        length = max(shape[-1] + extra, 0) if shape else 3
        arrays.append(values(draw(st.sampled_from(("normal", kind))), (length,), dtype, seed + 1))
    if op.node == "MaskedTVMax":
        arrays.append(draw(sizes(shape, seed)))
    return kind, arrays


@st.composite
def sizes(draw: Any, shape: tuple[int, ...], seed: int) -> np.ndarray:
    odd = draw(st.integers(0, 9))
    if odd == 0 or len(shape) < 2:
        return np.zeros(draw(st.lists(st.integers(0, 3), max_size=3)), np.int64)
    random = np.random.default_rng(seed + 2)
    chosen = random.integers(0, np.array(shape[-2:]) + 1, size=(*shape[:-2], 2))
    if odd == 1 and chosen.size:
        at = random.integers(chosen.size)
        chosen.flat[at] = draw(st.sampled_from((-1, 100, 2**62, -(2**63))))
    return chosen


@st.composite
def attributes(draw: Any, op: Op) -> dict[str, Any]:
    choices = draw(st.sampled_from((ORDINARY, ORDINARY, ORDINARY, ATTRIBUTES)))
    foreign = {"axis": -1} if draw(st.integers(0, 31)) == 0 else {}
    return foreign | {
        name: np.float32(value).item() if attribute.kind is float else value
        for name, attribute in op.attributes.items()
        for value in [draw(st.sampled_from(choices[name]))]
    }


def is_comparable(op: Op, kind: str, arrays: list[np.ndarray], chosen: dict[str, Any]) -> bool:
    """True where the contract's tolerances apply; elsewhere only the form of an answer does."""
    known = {name: {np.float32(number).item() for number in ORDINARY[name]} for name in chosen}
    if not all(np.float32(value).item() in known[name] for name, value in chosen.items()):
        return False
    if op.node == "Sparsemax":
        return True
    # The reference of TVMax takes seconds for a large grid.
    is_slow = "lam" in chosen and (arrays[0].size > 400 or np.prod(arrays[0].shape[-2:]) > 128)
    return kind in ("normal", "ties") and not is_slow


def fits(op: Op, arrays: list[np.ndarray]) -> bool:
    try:
        op.output_shapes(*(array.shape for array in arrays))
    except ShapeError:
        return False
    if op.node != "MaskedTVMax":
        return True
    return bool((arrays[1] >= 0).all() and (arrays[1] <= arrays[0].shape[-2:]).all())


def is_valid(op: Op, chosen: dict[str, Any]) -> bool:
    try:
        op.defaults(chosen)
    except SaccadeError:
        return False
    return True


class Harness:
    """One op's node with one library."""

    def __init__(self, op: Op, path: str) -> None:
        self.op, self.path = op, path
        self.kernels = ctypes.CDLL(path)
        self.kernels.saccade_choose_target.argtypes = [ctypes.c_char_p]
        self.counts = {"refused sessions": 0, "refused runs": 0, "compared": 0, "ran": 0}

    def session(self, dtype: str, chosen: dict[str, Any], threads: int) -> Any:
        model = one_node_model(self.op, dtype, body=False)
        node = model.graph.node[0]
        del node.attribute[:]
        node.attribute.extend(onnx.helper.make_attribute(*each) for each in chosen.items())
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        # Every tensor from malloc, where the sanitizer puts its red zones around it.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.register_custom_ops_library(self.path)
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, session: Any, arrays: list[np.ndarray]) -> list[np.ndarray]:
        feeds = {port.name: each for port, each in zip(self.op.inputs, arrays, strict=True)}
        return session.run(None, feeds)

    def refuses(self, call: Any, what: str) -> None:
        try:
            call()
        except Exception as error:
            assert f"saccade::{self.op.node} (node '" in str(error), error
            self.counts[what] += 1
        else:
            raise AssertionError(f"{what}: was taken")

    def example(self, data: Any) -> None:
        dtype = data.draw(st.sampled_from(tuple(SPECIAL)), "dtype")
        chosen = data.draw(attributes(self.op), "attributes")
        threads = data.draw(st.sampled_from((1, 2)), "threads")
        target = data.draw(st.sampled_from((b"baseline", b"avx2", b"avx512")), "target")
        if self.kernels.saccade_choose_target(target):
            self.kernels.saccade_choose_target(None)
        if not is_valid(self.op, chosen):
            self.refuses(lambda: self.session(dtype, chosen, threads), "refused sessions")
            return
        session = self.session(dtype, chosen, threads)
        for _ in range(data.draw(st.integers(1, 3), "runs")):
            kind, arrays = data.draw(tensors(self.op, dtype), "tensors")
            if not fits(self.op, arrays):
                self.refuses(lambda given=arrays: self.run(session, given), "refused runs")
                continue
            answers = self.run(session, arrays)
            self.counts["ran"] += 1
            self.check_forms(answers, arrays)
            self.check_isolation(session, answers, arrays, data)
            if is_comparable(self.op, kind, arrays, chosen):
                self.check_answer(answers, arrays, chosen, dtype)

    def check_forms(self, answers: list[np.ndarray], arrays: list[np.ndarray]) -> None:
        shapes = self.op.output_shapes(*(array.shape for array in arrays))
        assert [answer.shape for answer in answers] == list(shapes)
        types = [str(arrays[0].dtype) if p.dtype == "T" else p.dtype for p in self.op.outputs]
        assert [str(answer.dtype) for answer in answers] == types

    def check_isolation(
        self, session: Any, answers: list[np.ndarray], arrays: list[np.ndarray], data: Any
    ) -> None:
        leading = arrays[0].shape[: arrays[0].ndim - len(self.op.inputs[0].axes.split()) + 1]
        if 0 in leading:
            return
        at = tuple(data.draw(st.integers(0, size - 1), "item") for size in leading)
        alone = [
            np.ascontiguousarray(each[at]) if "..." in port.axes else each
            for port, each in zip(self.op.inputs, arrays, strict=True)
        ]
        for whole, one in zip(answers, self.run(session, alone), strict=True):
            np.testing.assert_array_equal(whole[at], one)

    def check_answer(
        self, answers: list[np.ndarray], arrays: list[np.ndarray], chosen: dict, dtype: str
    ) -> None:
        with np.errstate(all="ignore"):
            expected = self.op.reference(*arrays, **chosen)
        np.testing.assert_array_equal(np.isnan(answers[0]), np.isnan(expected[0]))
        known = np.where(np.isnan(expected[0]), 0, expected[0])
        away = np.abs(np.nan_to_num(answers[0].astype(np.float64)) - known) / self.op.scale(known)
        assert away.max(initial=0) <= 4 * self.op.tolerance[dtype], away.max()
        self.counts["compared"] += 1


def main(name: str, path: str, examples: int) -> None:
    if name == "overrun":
        # Two rows where there is room for one: the sanitizer must end this process.
        row = np.zeros(64, np.float32)
        ctypes.CDLL(path).saccade_sparsemax(
            1,
            row.ctypes.data_as(ctypes.c_void_p),
            row.copy().ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(2),
            ctypes.c_int64(64),
            None,
        )
        return
    harness = Harness(OPS[name], path)
    run = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )(given(st.data())(harness.example))
    run()
    print(name, harness.counts)
    assert all(harness.counts.values()), "an example of each sort is expected"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
