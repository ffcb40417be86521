# SPDX-License-Identifier: Apache-2.0
"""A variant in the `openvino` backend of the bundled server."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from variant import BackendVariant, Run, given_parameters, whole

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
import openvino  # noqa: E402 - its telemetry is off, as in saccade

INTEGERS = ("INFERENCE_NUM_THREADS", "NUM_STREAMS")
HINTS = ("LATENCY", "THROUGHPUT")


class OpenVinoVariant(BackendVariant):
    """One variant in OpenVINO."""

    parameters = (*INTEGERS, "PERFORMANCE_HINT", "HINT_BF16")

    def open(self, config: dict[str, Any], path: Path) -> Run:
        """Compile the file for batches of any size."""
        given, numbers = given_parameters(config), {key: whole(config, key) for key in INTEGERS}
        hint = given.get("PERFORMANCE_HINT", HINTS[0])
        if hint not in HINTS:
            raise ValueError(
                f"parameter 'PERFORMANCE_HINT' is {hint!r}, expected {' or '.join(HINTS)}"
            )
        if (half := given.get("HINT_BF16", "NO")) not in ("YES", "NO"):
            raise ValueError(f"parameter 'HINT_BF16' is {half!r}, expected YES or NO")
        core = openvino.Core()
        properties = {
            "INFERENCE_NUM_THREADS": numbers["INFERENCE_NUM_THREADS"],
            "NUM_STREAMS": numbers["NUM_STREAMS"] or 1,
            "PERFORMANCE_HINT": hint,
            # Without it, OpenVINO chooses bfloat16 by itself on CPUs that have it.
            "INFERENCE_PRECISION_HINT": "bf16" if half == "YES" else "f32",
            # Each variant has its own process, and all of them would be pinned to the same cores.
            "ENABLE_CPU_PINNING": False,
        }
        compiled = core.compile_model(core.read_model(path), "CPU", properties)
        request = compiled.create_infer_request()

        def run(names: list[str], inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            answers = request.infer(dict(inputs), share_inputs=True)
            return [answers[compiled.output(name)] for name in names]

        return run


VARIANT = OpenVinoVariant
