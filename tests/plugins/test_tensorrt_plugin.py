# SPDX-License-Identifier: Apache-2.0
"""The TensorRT plugin library: found by a real registry, driven as TensorRT would, no spills.

What needs the library uses the one that `make plugins-tensorrt` has built; nothing here compiles,
and nothing needs a GPU.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import PACKAGE, ROOT

from saccade.plugins.native import spills
from saccade.plugins.ops import OPS

NATIVE = PACKAGE / "plugins" / "native"
LIBRARY = NATIVE / "lib" / "libsaccade_tensorrt.so"
HARNESS = ROOT / "build" / "tensorrt" / "tensorrt_harness"
REPORT = ROOT / "build" / "tensorrt" / "ptxas.log"
BUILD = "build it with: make plugins-tensorrt TENSORRT_INCLUDE_DIR=DIR (headers of TensorRT)"

needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason=f"no {LIBRARY.name}: {BUILD}")
needs_registry = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt_rtx is not installed: pip install '.[rtx]'",
)

# A registry that dislikes a library may abort the process, so it gets its own.
REGISTRY = """
import json, sys
import numpy as np
import tensorrt_rtx as trt

messages = []

class Logger(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)

    def log(self, severity, text):
        if severity <= trt.ILogger.Severity.ERROR:
            messages.append(text)

runtime = trt.Runtime(Logger())
registry = trt.get_plugin_registry()
known = {each.name for each in registry.all_creators}
registry.load_library(sys.argv[1])
creators = [each for each in registry.all_creators if each.name not in known]
TYPES = {"f": trt.PluginFieldType.FLOAT32, "i": trt.PluginFieldType.INT32}

def create(creator, **values):
    fields = []
    for name, value in values.items():
        kind = "i" if isinstance(value, int) else "f"
        data = np.array([value], {"i": np.int32, "f": np.float32}[kind])
        fields.append(trt.PluginField(name, data, TYPES[kind]))
    collection = trt.PluginFieldCollection(fields)
    return creator.create_plugin("node", collection, trt.TensorRTPhase.BUILD)

found = {}
given = json.loads(sys.argv[2])
for each in creators:
    same = registry.get_creator(each.name, "1", "")
    plugin = create(same, **given[each.name])
    core = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    build = plugin.get_capability_interface(trt.PluginCapabilityType.BUILD)
    runs = plugin.get_capability_interface(trt.PluginCapabilityType.RUNTIME)
    found[each.name] = {
        "fields": [field.name for field in each.field_names],
        "named": [core.plugin_name, core.plugin_version, core.plugin_namespace],
        "outputs": build.num_outputs,
        "kinds": [each.interface_info.kind for each in (core, build, runs)],
        "defaults": create(same) is not None,
    }
    assert not messages, messages
    assert create(same, **{**given[each.name], "lamb": 1.0}) is None
    found[each.name]["message"] = messages.pop()
refused = create(registry.get_creator("TVMax", "1", ""), lam=-1.0)
found["refused"] = [refused is None, messages]
print(json.dumps(found))
"""


def in_registry() -> dict:
    values = {
        node: {name: attribute.default for name, attribute in op.attributes.items()}
        for node, op in OPS.items()
    }
    command = [sys.executable, "-c", REGISTRY, str(LIBRARY), json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_library
@needs_registry
def test_a_registry_lists_and_creates_all_plugins() -> None:
    registered = in_registry()
    refused, messages = registered.pop("refused")
    assert set(registered) == set(OPS)
    for node, op in OPS.items():
        assert registered[node]["fields"] == list(op.attributes)
        # What the ONNX parser asks for: the node's type, version 1 and no namespace.
        assert registered[node]["named"] == [node, "1", ""]
        assert registered[node]["outputs"] == len(op.outputs)
        assert registered[node]["kinds"] == [
            "PLUGIN_V3ONE_CORE",
            "PLUGIN_V3ONE_BUILD",
            "PLUGIN_V3ONE_RUNTIME",
        ]
        assert registered[node]["defaults"]
        assert f"saccade::{node}" in registered[node]["message"]
        assert "'lamb'" in registered[node]["message"]
    assert refused
    assert messages == ["saccade::TVMax: lam is -1, expected a finite number >= 0."]


@needs_library
@pytest.mark.skipif(not HARNESS.exists(), reason=f"no {HARNESS.name}: {BUILD}")
@pytest.mark.parametrize("found_by", ["getCreators", "registry"])
def test_the_harness_drives_every_plugin(found_by: str) -> None:
    options = ["--no-gpu"]
    if found_by == "registry":
        libraries = importlib.util.find_spec("tensorrt_rtx_libs")
        if libraries is None or not libraries.submodule_search_locations:
            pytest.skip("tensorrt_rtx is not installed: pip install '.[rtx]'")
        (folder,) = libraries.submodule_search_locations
        options += ["--registry", str(next(Path(folder).glob("libtensorrt_rtx.so*")))]
    script = ROOT / "tests" / "plugins" / "native" / "harness_cases.py"
    done = subprocess.run(
        [sys.executable, str(script), str(HARNESS), str(LIBRARY), *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > 100


@needs_library
def test_the_library_needs_no_tensorrt_and_no_cuda_library() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed: apt-get install binutils")
    done = subprocess.run(
        ["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True
    )
    needed = re.findall(r"NEEDED.*\[(.+?)\]", done.stdout)
    assert needed
    assert not [plugin for plugin in needed if "nvinfer" in plugin or "cuda" in plugin]


@pytest.mark.skipif(not REPORT.exists(), reason=f"no {REPORT.name} of the compiler: {BUILD}")
def test_no_kernel_spills() -> None:
    seen = list(spills.kernels(REPORT.read_text()))
    assert seen
    assert [each for each in seen if each[2]] == []


def test_a_spill_is_found() -> None:
    report = (
        "ptxas info    : Compiling entry function 'kernel' for 'sm_90'\n"
        "ptxas info    : Function properties for kernel\n"
        "    16 bytes stack frame, 32 bytes spill stores, 60 bytes spill loads\n"
    )
    assert list(spills.kernels(report)) == [("kernel", "sm_90", 92)]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["NVCC=/nowhere/nvcc"], "Install the CUDA toolkit"),
        (["NVCC=true", "TENSORRT_INCLUDE_DIR=nowhere"], "TENSORRT_INCLUDE_DIR=DIR"),
    ],
)
def test_the_build_says_what_is_missing(given: list[str], message: str) -> None:
    command = ["make", "-n", "-f", str(NATIVE / "tensorrt.mk"), *given]
    outside = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(command, capture_output=True, text=True, env=outside)
    assert done.returncode != 0
    assert message in done.stderr
