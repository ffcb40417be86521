# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of sparse and structured attention and of exact svPN in whole models.

    python benchmarks/model_cost.py          # writes results/model_cost.json

Whole files run in ONNX Runtime on random inputs, with kernels for custom ops, on one thread, in
interleaved rounds. The targets: the VQA network and the captioner's step take at most 1.1
(sparsemax) and 1.3 (TVMAX) times as long as with softmax. SoT-Tiny with exact svPN takes at most
1.1 times as long as with the fast one.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from interleaved import in_blocks
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.exporter.graph.samples import random_inputs
from saccade.exporter.graph.tracing import trace_component
from saccade.exporter.runtimes.runners import onnx_session
from saccade.models.captioner.config import PRESETS as CAPTIONERS
from saccade.models.families import build
from saccade.models.interface import component_named
from saccade.models.sot.config import PRESETS as SOT_MODELS
from saccade.models.vqa.config import PRESETS as VQA_MODELS
from saccade.plugins import onnxruntime_library

RESULT = Path(__file__).with_name("results") / "model_cost.json"
ROUNDS, MOMENT_S = 9, 2.0
AIMS = {"sparsemax": 1.1, "tvmax": 1.3}


def session_of(family: str, config: Any, role: str, budget: str | None = None) -> Any:
    """Return the folded model as a session with the ops' kernels."""
    model: Any = build(family, config.to_dict()).eval()
    if budget is not None:
        model = model.at(model.budget(budget))
    folded = model.fold()
    component = component_named(folded, role)
    proto = trace_component(folded, component, inputs_of(component, 3), component.outputs)
    return onnx_session(proto.SerializeToString(), kernels=onnxruntime_library()), component


def inputs_of(part: Any, count: int) -> dict[str, np.ndarray]:
    """Return random inputs, the same for the same part."""
    return random_inputs(part, np.random.default_rng(0), count)


def compared(dear: tuple[Any, Any], cheap: tuple[Any, Any], batch: int, aim: float) -> Any:
    """Return the expensive model's time divided by the cheap one's, on the same inputs."""
    inputs = inputs_of(dear[1], batch)
    seconds = in_blocks(
        lambda index: cheap[0].run(None, inputs),
        lambda index: dear[0].run(None, inputs),
        rounds=ROUNDS,
        moment_s=MOMENT_S,
    ).to_dict()
    return {
        "batch": batch,
        "times": seconds["peer_over_ours"],
        "quartiles": seconds["quartiles"],
        "cheap_us": seconds["ours_us"],
        "dear_us": seconds["peer_us"],
        "aim": aim,
    }


def attention_costs(family: str, config: Any, role: str, batch: int) -> dict[str, Any]:
    """Compare sparsemax and TVMAX with softmax, with everything else unchanged."""
    sessions = {
        kind: session_of(family, replace(config, attention=kind), role)
        for kind in ("softmax", *AIMS)
    }
    return {
        kind: compared(sessions[kind], sessions["softmax"], batch, aim)
        for kind, aim in AIMS.items()
    }


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    vqa = replace(VQA_MODELS["vqa-grid"], self_attention="softmax", solver="exact")
    result: dict[str, Any] = {"machine": this_machine().to_dict()}
    result["vqa"] = attention_costs("vqa", vqa, "", 1)
    result["vqa small"] = attention_costs("vqa", VQA_MODELS["vqa-shapes"], "", 1)
    result["captioner step"] = attention_costs(
        "captioner", CAPTIONERS["captioner-paper"], "step", 1
    )
    tiny = SOT_MODELS["sot-tiny"]
    exact, fast = (session_of("sot", tiny, "", name) for name in ("exact", "fast"))
    result["sot-tiny"] = {
        f"exact over fast, batch {batch}": compared(exact, fast, batch, 1.1) for batch in (1, 8)
    }
    write_result(RESULT, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
