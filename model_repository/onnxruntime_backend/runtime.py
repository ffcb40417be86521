# SPDX-License-Identifier: Apache-2.0
"""A variant in the `onnxruntime` backend of the bundled server."""

import os
from pathlib import Path
from typing import Any

from variant import BackendVariant, Run, given_parameters, whole

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as in saccade: must precede the import
import onnxruntime

INTEGERS = ("intra_op_thread_count", "inter_op_thread_count", "execution_mode")
SWITCHES = ("enable_mem_arena", "enable_mem_pattern")
LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class OnnxRuntimeVariant(BackendVariant):
    """One variant in ONNX Runtime."""

    parameters = INTEGERS + SWITCHES
    fields = frozenset({"model_operations"})
    optimization = frozenset({"graph"})

    def open(self, config: dict[str, Any], path: Path) -> Run:
        """Open the configured session."""
        given, numbers = given_parameters(config), {key: whole(config, key) for key in INTEGERS}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = numbers["intra_op_thread_count"]
        options.inter_op_num_threads = numbers["inter_op_thread_count"]
        if numbers["execution_mode"]:
            options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        # A spinning thread would take its core from the server and from the other variants.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = given.get("enable_mem_arena", "1") != "0"
        options.enable_mem_pattern = given.get("enable_mem_pattern", "1") != "0"
        level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
        if level not in LEVELS:
            raise ValueError(f"optimization graph level is {level}, expected -1, 0, 1 or 2")
        options.graph_optimization_level = LEVELS[level]
        for library in config.get("model_operations", {}).get("op_library_filename", []):
            # NVIDIA's backend gives a bare name to the loader; here the file is next to the model.
            options.register_custom_ops_library(str(path.parent / library))
        providers = ["CPUExecutionProvider"]
        run: Run = onnxruntime.InferenceSession(str(path), options, providers=providers).run
        return run


VARIANT = OnnxRuntimeVariant
