# SPDX-License-Identifier: Apache-2.0
"""Engines of bare ONNX files by TensorRT-RTX, which needs no GPU for it."""

import importlib.util
import tempfile
from pathlib import Path

import onnx
import pytest

from saccade.exporter.runtimes.tensorrt.child import BuildJob, BuiltPlan, build_in_child

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt_rtx is not installed: pip install '.[rtx]'",
)


def build(path: Path) -> BuiltPlan:
    """Build an engine for batches of 1 to 64 and other free axes of 1 to 300."""
    profiles = {}
    for value in onnx.load(path).graph.input:
        ranges = [
            (axis.dim_value,) * 3 if axis.dim_value else (1, 64, 300) if index else (1, 8, 64)
            for index, axis in enumerate(value.type.tensor_type.shape.dim)
        ]
        shapes = zip(*ranges, strict=True)
        profiles[value.name] = dict(zip(("min", "opt", "max"), shapes, strict=True))
    job = BuildJob(path.stem, "tensorrt-rtx", path, profiles, ("8.9",))
    with tempfile.TemporaryDirectory() as place:
        built = build_in_child(job, Path(place), lambda network: None, lambda share: None)
        assert built.plan.stat().st_size > 0
    return built
