# SPDX-License-Identifier: Apache-2.0
"""Measure what folding saves in each family: read-outs, rounds and whole models, on one thread.

    python benchmarks/fold.py                # every family; nac writes results/fold.json
    python benchmarks/fold.py sparo vqa      # some; results/fold_families.json keeps the others

Parts are timed in torch, as written in the paper and after `fold`. Whole models are timed in torch
and, as exported files, in ONNX Runtime, which folds constants by itself. Their multiply-adds are
counted from those files.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from interleaved import in_blocks
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.exporter.graph.cost import cost_of
from saccade.exporter.graph.samples import random_inputs
from saccade.exporter.graph.tracing import trace_component
from saccade.exporter.runtimes.runners import onnx_session, torch_runner
from saccade.models.captioner.config import PRESETS as CAPTIONERS
from saccade.models.families import FAMILIES, build
from saccade.models.interface import component_named
from saccade.models.slot_attention.config import PRESETS as SLOT_MODELS
from saccade.models.slot_attention.config import SlotConfig
from saccade.models.slot_attention.fold import fold_attention
from saccade.models.slot_attention.rounds import SlotAttention
from saccade.models.sot.config import PRESETS as SOT_MODELS
from saccade.models.sparo.config import PRESETS as SPARO_MODELS
from saccade.models.sparo.config import ReadOutShape
from saccade.models.sparo.fold import FoldedSlotReadOut
from saccade.models.sparo.readout import SlotReadOut
from saccade.models.vqa.config import PRESETS as VQA_MODELS

RESULT = Path(__file__).with_name("results") / "fold_families.json"
ROUNDS, MOMENT_S = 9, 0.5
# Read-outs of the paper's two CLIP sizes: tokens, width, slots, and the target.
READ_OUTS = {"n=197, d=768, L=64": (197, 768, 64, 15.0), "n=50, d=768, L=128": (50, 768, 128, 10.0)}
SLOT_AIM = 3.0
# One whole model per family: preset, part and batch.
WHOLE: dict[str, tuple[Any, str, int]] = {
    "sparo": (SPARO_MODELS["vit-b-32-sparo"], "image", 1),
    "sot": (SOT_MODELS["sot-tiny"], "", 1),
    "slot-attention": (SLOT_MODELS["slot-attention-clevr"], "", 1),
    "vqa": (VQA_MODELS["vqa-grid"], "", 1),
    "captioner": (CAPTIONERS["captioner-paper"], "step", 1),
}


def ratio(slow: Callable[[], Any], fast: Callable[[], Any], aim: float | None) -> dict[str, Any]:
    """Return the speed-up as median and quartiles over interleaved rounds."""
    with torch.inference_mode():
        seconds = in_blocks(
            lambda index: fast(), lambda index: slow(), rounds=ROUNDS, moment_s=MOMENT_S
        ).to_dict()
    return {
        "unfolded_us": seconds["peer_us"],
        "folded_us": seconds["ours_us"],
        "times_faster": seconds["peer_over_ours"],
        "quartiles": seconds["quartiles"],
        "aim": aim,
    }


def read_outs() -> dict[str, Any]:
    """Time only SPARO's read-out, with a batch of 8 images."""
    rows = {}
    for name, (tokens, width, slots, aim) in READ_OUTS.items():
        shape = ReadOutShape(
            dim=width,
            head_of=tuple(range(slots)),
            attn_dim=64,
            value_dim=64,
            slot_dim=64,
            gated=False,
            share_kv=True,
        )
        torch.manual_seed(0)
        source = SlotReadOut(shape).eval()
        assert source.query is not None
        folded, x = FoldedSlotReadOut(source, source.query), torch.randn(8, tokens, width)
        rows[name] = ratio(lambda f=source, x=x: f(x), lambda f=folded, x=x: f(x), aim)
    return rows


def rounds() -> dict[str, Any]:
    """Time only the rounds of slot attention: 1,024 tokens, 11 slots, width 128, batch 4."""
    rows = {}
    for kind in ("t-sa", "ts-sa"):
        config = replace(
            SlotConfig(), attention=kind, slots=11, slot_dim=128, qkv_dim=128, grid_mlp_dim=256
        )
        torch.manual_seed(0)
        source = SlotAttention(config, 130).eval()
        side = torch.linspace(-1, 1, 32)
        grid = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).reshape(1, -1, 2)
        inputs = torch.cat([torch.randn(4, 1024, 128), grid.expand(4, -1, -1)], -1)
        state = torch.cat(
            [torch.randn(4, 11, 128), 0.5 * torch.randn(4, 11, 2), torch.full((4, 11, 2), 0.1)], -1
        )[..., : 130 if kind == "t-sa" else 132]
        folded = fold_attention(source)
        rows[kind] = ratio(
            lambda f=source, x=inputs, s=state: f(x, s),
            lambda f=folded, x=inputs, s=state: f(x, s),
            SLOT_AIM,
        )
    return rows


def whole(family: str) -> dict[str, Any]:
    """Time one model of the family, unfolded and folded, in torch and as files."""
    config, role, batch = WHOLE[family]
    model: Any = build(family, config.to_dict()).eval()
    versions = {"unfolded": model, "folded": deepcopy(model).fold()}
    inputs = _inputs(component_named(model, role), batch)
    row: dict[str, Any] = {"part": role, "batch": batch}
    calls: dict[str, dict[str, Callable[[], Any]]] = {"torch": {}, "onnxruntime": {}}
    for name, version in versions.items():
        component = component_named(version, role)
        proto = trace_component(version, component, _inputs(component, 3), component.outputs)
        row[f"{name}_multiply_adds"] = cost_of(proto, 0, inputs).multiply_adds.total
        session = onnx_session(proto.SerializeToString())
        run = torch_runner(version, role)
        calls["torch"][name] = lambda run=run: run(inputs)
        calls["onnxruntime"][name] = lambda session=session: session.run(None, inputs)
    for runtime, pair in calls.items():
        row[runtime] = ratio(pair["unfolded"], pair["folded"], None)
    return row


def _inputs(part: Any, count: int) -> dict[str, np.ndarray]:
    return random_inputs(part, np.random.default_rng(0), count)


def main() -> None:
    """Measure the given families, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    chosen = parser.parse_args().family or list(FAMILIES)
    if unknown := sorted(set(chosen) - set(FAMILIES)):
        parser.error(f"unknown family {unknown[0]}, expected some of {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"families": {}}
    for family in chosen:
        if family == "nac":
            script = Path(__file__).with_name("fold_nac.py")
            subprocess.run([sys.executable, str(script)], check=True)
            continue
        row: dict[str, Any] = {"machine": this_machine().to_dict(), "whole": whole(family)}
        if family == "sparo":
            row["read_out"] = read_outs()
        if family == "slot-attention":
            row["rounds"] = rounds()
        result["families"][family] = row
        write_result(RESULT, result)
        print(family, json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
