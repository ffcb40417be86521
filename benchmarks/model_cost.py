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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from fold import inputs_of, ratio, traced
from result_file import RESULTS, write_result

from saccade.exporter.runtimes.runners import onnx_session
from saccade.models.captioner.config import PRESETS as CAPTIONERS
from saccade.models.families import build
from saccade.models.interface import component_named
from saccade.models.sot.config import PRESETS as SOT_MODELS
from saccade.models.vqa.config import PRESETS as VQA_MODELS
from saccade.plugins import onnxruntime_library

AIMS = {"sparsemax": 1.1, "tvmax": 1.3}


def session_of(family: str, config: Any, role: str, budget: str | None = None) -> Any:
    """Return the folded model as a session with the ops' kernels."""
    model: Any = build(family, config.to_dict()).eval()
    if budget is not None:
        model = model.at(model.budget(budget))
    folded = model.fold()
    file = traced(folded, role).SerializeToString()
    return onnx_session(file, kernels=onnxruntime_library()), component_named(folded, role)


def compared(dear: tuple[Any, Any], cheap: tuple[Any, Any], batch: int, aim: float) -> Any:
    """Return the expensive model's time divided by the cheap one's, on the same inputs."""
    inputs = inputs_of(dear[1], batch)
    figures = ratio(
        lambda: dear[0].run(None, inputs), lambda: cheap[0].run(None, inputs), aim, moment_s=2.0
    )
    return {"batch": batch, **figures}


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
    result: dict[str, Any] = {}
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
    write_result(RESULTS / "model_cost.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
