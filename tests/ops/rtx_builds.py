# SPDX-License-Identifier: Apache-2.0
"""Engines by TensorRT-RTX, which needs no GPU for it: in a process of its own."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A parser that meets what it does not support may abort the process. Batches are 1 to 64, other
# free axes 1 to 300.
_BUILD = """
import json
import sys
import tensorrt_rtx as trt

builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
network = builder.create_network(0)
parser = trt.OnnxParser(network, builder.logger)
with open(sys.argv[1], "rb") as file:
    parsed = parser.parse(file.read())
assert parsed, [str(parser.get_error(index)) for index in range(parser.num_errors)]
config = builder.create_builder_config()
profile = builder.create_optimization_profile()
inputs = [network.get_input(index) for index in range(network.num_inputs)]
for each in inputs:
    ranges = [
        (size,) * 3 if size >= 0 else (1, 64, 300) if axis else (1, 8, 64)
        for axis, size in enumerate(each.shape)
    ]
    profile.set_shape(each.name, *zip(*ranges))
config.add_optimization_profile(profile)
config.num_compute_capabilities = 1
assert config.set_compute_capability(trt.ComputeCapability.SM89, 0)
plan = builder.build_serialized_network(network, config)
assert plan is not None
print(json.dumps({
    "inputs": {each.name: str(each.dtype) for each in inputs},
    "outputs": [network.get_output(index).name for index in range(network.num_outputs)],
    "bytes": plan.nbytes,
}))
"""

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt_rtx is not installed: pip install 'saccade[rtx]'",
)


def build(path: Path) -> dict[str, Any]:
    """Build an engine of an ONNX file; what was built, and how large it is."""
    command = [sys.executable, "-c", _BUILD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built: dict[str, Any] = json.loads(done.stdout)
    assert built["bytes"] > 0
    return built
