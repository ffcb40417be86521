# SPDX-License-Identifier: Apache-2.0
"""Every implementation of an op as the same kind of function: arrays in, arrays out."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from one_node import one_node_model

from saccade.plugins.contract import Op

Run = Callable[[Sequence[np.ndarray], dict[str, Any]], tuple[np.ndarray, ...]]

# What fills the table on a machine with the hardware: benchmarks/ops_gpu.py.
NEED_A_GPU = ("cuda", "tensorrt")
ROLES = (
    "torch",
    "torch with kernels",
    "body",
    "body in onnx's reference",
    "onnxruntime",
    "kernel baseline",
    "kernel avx2",
)


def as_read(role: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes as the role sees them: an ONNX file holds numbers in float32."""
    if not (role.startswith("body") or role == "onnxruntime"):
        return attributes
    return {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in attributes.items()
    }


def skip_without_gpu(name: str, rows: int) -> None:
    """Say in one row what of an op is not run here."""
    roles = " and by ".join(NEED_A_GPU)
    pytest.skip(
        f"needs an NVIDIA GPU: {rows} rows of {name} by {roles} were not run. "
        "Run `python benchmarks/ops_gpu.py --check` on a machine with one"
    )


def implementation(op: Op, role: str) -> Run:
    """The op in that role; skips, with the reason, where it cannot run here."""
    if role == "torch":
        return _torch(op, kernels=False)
    if role == "body":
        return lambda arrays, attributes: _session_run(op, arrays, attributes, library=None)
    if role == "body in onnx's reference":
        return lambda arrays, attributes: _onnx_reference(op, arrays, attributes)
    library = built_library()
    if role == "onnxruntime":
        return lambda arrays, attributes: _session_run(op, arrays, attributes, library=library)
    target = role.removeprefix("kernel ") if role.startswith("kernel ") else None
    return _torch(op, kernels=True, target=target)


@lru_cache
def built_library() -> str:
    """The native library; where there is no compiler, a skip, but a failure under CI."""
    from saccade.core.errors import SaccadeError
    from saccade.plugins import onnxruntime_library

    try:
        return str(onnxruntime_library())
    except SaccadeError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def _torch(op: Op, *, kernels: bool, target: str | None = None) -> Run:
    import torch

    from saccade.plugins.native import bindings

    run = op.implementation("eager")

    def call(arrays: Sequence[np.ndarray], attributes: dict[str, Any]) -> tuple[np.ndarray, ...]:
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        with torch.no_grad(), nullcontext() if kernels else bindings.without_kernels():
            if kernels and target is not None:
                _choose(bindings, target)
            try:
                answer = (
                    run(tensors[0], -1)
                    if op.node == "Sparsemax"
                    else run(*tensors, **op.defaults(attributes))
                )
            finally:
                if kernels and target is not None:
                    bindings.kernels().choose_target(None)
        return tuple(each.numpy() for each in (answer if isinstance(answer, tuple) else (answer,)))

    return call


def _choose(bindings: Any, target: str) -> None:
    if not bindings.kernels().choose_target(target):
        pytest.skip(f"this CPU has no {target}")


@lru_cache(maxsize=512)
def session(op_name: str, dtype: str, attributes: tuple[Any, ...], library: str | None) -> Any:
    import onnxruntime

    from saccade.plugins.ops import OPS

    model = one_node_model(OPS[op_name], dtype, dict(attributes))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def _session_run(
    op: Op, arrays: Sequence[np.ndarray], attributes: dict[str, Any], library: str | None
) -> tuple[np.ndarray, ...]:
    held = session(op.node, arrays[0].dtype.name, tuple(sorted(attributes.items())), library)
    feeds = {port.name: array for port, array in zip(op.inputs, arrays, strict=True)}
    return tuple(held.run(None, feeds))


def _onnx_reference(
    op: Op, arrays: Sequence[np.ndarray], attributes: dict[str, Any]
) -> tuple[np.ndarray, ...]:
    from onnx.reference import ReferenceEvaluator

    model = one_node_model(op, arrays[0].dtype.name, attributes)
    feeds = {port.name: array for port, array in zip(op.inputs, arrays, strict=True)}
    with np.errstate(all="ignore"):
        return tuple(ReferenceEvaluator(model).run(None, feeds))
