# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX compiles every exported graph for its batch range; it needs no GPU for that."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

# A parser that meets what it does not support may abort the process, so it gets its own.
BUILD = """
import sys
import tensorrt_rtx as trt

logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(0)
parser = trt.OnnxParser(network, logger)
with open(sys.argv[1], "rb") as file:
    parsed = parser.parse(file.read())
assert parsed, [str(parser.get_error(index)) for index in range(parser.num_errors)]
config = builder.create_builder_config()
profile = builder.create_optimization_profile()
profile.set_shape("image", (1, 8, 8, 1), (8, 8, 8, 1), (64, 8, 8, 1))
config.add_optimization_profile(profile)
config.num_compute_capabilities = 1
assert config.set_compute_capability(trt.ComputeCapability.SM89, 0)
plan = builder.build_serialized_network(network, config)
assert plan is not None
print(network.get_input(0).dtype, *(network.get_output(i).name for i in range(3)), plan.nbytes)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt_rtx is not installed: pip install 'saccade[rtx]'",
)
@pytest.mark.parametrize("name", ["nac-b1000-fp32", "nac-b0125-fp32"])
def test_builds_an_engine(name: str, tiny_folder: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(tiny_folder / f"{name}.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    dtype, *outputs, size = done.stdout.split()
    assert dtype == "DataType.UINT8"
    assert outputs == ["logits", "probabilities", "embedding"]
    assert int(size) > 0
