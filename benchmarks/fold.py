# SPDX-License-Identifier: Apache-2.0
"""Measure what folding saves in each family: read-outs, rounds and whole models, on one thread.

    python benchmarks/fold.py                # every family; nac writes results/fold.json
    python benchmarks/fold.py sparo vqa      # some; results/fold_families.json keeps the others

Parts are timed in torch, as written in the paper and after `fold`. Whole models are timed in torch
and, as exported files, in ONNX Runtime, which folds constants by itself. Their multiply-adds are
counted from those files.

A NAC is the configuration `bench` with batch 8, whole and pruned, and only its read-in, with and
without its ModFFN. Unfolded is its evaluation pass, with eq. 4 and 5 as written: keys and values of
every module and token, gains and links are computed from codes and signatures in each call.
(Training reorders the read-in; that path is not measured.)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from interleaved import in_blocks
from result_file import RESULTS, facts, write_result
from served_models import bench_config
from torch import Tensor, nn

from saccade.exporter.graph.cost import cost_of
from saccade.exporter.graph.samples import random_inputs
from saccade.exporter.graph.tracing import trace_component
from saccade.exporter.runtimes.runners import onnx_session, torch_runner
from saccade.models.captioner.config import PRESETS as CAPTIONERS
from saccade.models.families import FAMILIES, build
from saccade.models.interface import component_named
from saccade.models.nac.model import NAC
from saccade.models.slot_attention.config import PRESETS as SLOT_MODELS
from saccade.models.slot_attention.config import SlotConfig
from saccade.models.slot_attention.fold import fold_attention
from saccade.models.slot_attention.rounds import SlotAttention
from saccade.models.sot.config import PRESETS as SOT_MODELS
from saccade.models.sparo.config import PRESETS as SPARO_MODELS
from saccade.models.sparo.config import ReadOutShape
from saccade.models.sparo.fold import FoldedSlotReadOut
from saccade.models.sparo.pooling import SlotReadOut
from saccade.models.vqa.config import PRESETS as VQA_MODELS

RESULT, NAC_RESULT = RESULTS / "fold_families.json", RESULTS / "fold.json"
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
BATCH, BUDGET = 8, 0.125
# Ratios of a NAC: slow and fast, and the targets in torch by modules.
RATIOS: dict[str, tuple[str, str, dict[int, float]]] = {
    "read_in": ("unfolded read-in", "folded read-in", {256: 80.0, 1024: 80.0}),
    "read_in_with_ffn": ("unfolded read-in and ffn", "folded read-in and ffn", {}),
    "whole": ("unfolded", "folded", {256: 6.0, 1024: 4.0}),
    "budget": ("folded", f"folded, budget {BUDGET}", {256: 7.5, 1024: 16.0}),
}
PEAK = """
import re, sys, numpy
from pathlib import Path
from saccade.exporter.runtimes.runners import onnx_session
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
session = onnx_session(sys.argv[1])
before = peak()
session.run(None, {"image": numpy.zeros((int(sys.argv[2]), 32, 32, 3), numpy.uint8)})
print(before, peak() - before)
"""


def ratio(
    slow: Callable[[], Any],
    fast: Callable[[], Any],
    aim: float | None = None,
    *,
    rounds: int = ROUNDS,
    moment_s: float = MOMENT_S,
) -> dict[str, Any]:
    """Return how many times faster, as median and quartiles over interleaved rounds."""
    with torch.inference_mode():
        seconds = in_blocks(
            lambda index: fast(), lambda index: slow(), rounds=rounds, moment_s=moment_s
        ).to_dict()
    return {
        "slow_us": seconds["peer_us"],
        "fast_us": seconds["ours_us"],
        "times_faster": seconds["peer_over_ours"],
        "quartiles": seconds["quartiles"],
        "aim": aim,
    }


def traced(model: Any, role: str) -> Any:
    """Return a model's component as an ONNX graph."""
    component = component_named(model, role)
    return trace_component(model, component, inputs_of(component, 3), component.outputs)


def inputs_of(component: Any, count: int) -> dict[str, np.ndarray]:
    """Return random inputs, the same for the same component."""
    return random_inputs(component, np.random.default_rng(0), count)


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
    inputs = inputs_of(component_named(model, role), batch)
    row: dict[str, Any] = {"part": role, "batch": batch}
    calls: dict[str, dict[str, Callable[[], Any]]] = {"torch": {}, "onnxruntime": {}}
    for name, version in versions.items():
        proto = traced(version, role)
        row[f"{name}_multiply_adds"] = cost_of(proto, 0, inputs).multiply_adds.total
        session = onnx_session(proto.SerializeToString())
        run = torch_runner(version, role)
        calls["torch"][name] = lambda run=run: run(inputs)
        calls["onnxruntime"][name] = lambda session=session: session.run(None, inputs)
    for runtime, pair in calls.items():
        row[runtime] = ratio(pair["unfolded"], pair["folded"])
    return row


class State(nn.Module):
    """In place of a folded ModFFN: the state that goes into it."""

    def forward(self, state: Tensor, *_: Tensor | None) -> Tensor:
        return state


class ReadInAlone(nn.Module):
    """Read-in attention for the exporter: tokens in, one state per module out."""

    def __init__(self, model: nn.Module, *, folded: bool, ffn: bool) -> None:
        super().__init__()
        self.model, self.folded, self.ffn = model, folded, ffn
        if folded and not ffn:
            self.model = deepcopy(model)
            self.model.read_in.ffn = State()

    def forward(self, tokens: Tensor) -> Tensor:
        read_in = self.model.read_in
        if self.folded:
            return read_in.read(read_in.weights(tokens), tokens)
        code = self.model.generator.codes
        theta = self.model.initial_state(code)
        return (read_in if self.ffn else read_in.attend)(theta, tokens, code)


def models(modules: int) -> dict[str, nn.Module]:
    """Return everything that is timed, by name; those with `read-in` in the name take tokens."""
    model = NAC(bench_config(modules)).eval()
    folded = model.fold()
    return {
        "unfolded": model,
        "folded": folded,
        f"folded, budget {BUDGET}": model.prune(BUDGET).fold(),
        "unfolded read-in": ReadInAlone(model, folded=False, ffn=False),
        "folded read-in": ReadInAlone(folded, folded=True, ffn=False),
        "unfolded read-in and ffn": ReadInAlone(model, folded=False, ffn=True),
        "folded read-in and ffn": ReadInAlone(folded, folded=True, ffn=True),
    }


def inputs(config_modules: int) -> tuple[Tensor, Tensor]:
    """Return images and, for the read-in alone, their tokens."""
    config = bench_config(config_modules)
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, config.height_px, config.width_px, config.channels)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return images, torch.randn(BATCH, config.tokens or 0, config.dim, generator=generator)


def circuit(modules: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Time a NAC in eager torch and in ONNX Runtime, and count what its files cost."""
    images, tokens = inputs(modules)
    rounds = max(3, 15 * 256 // max(256, modules) + 2)
    calls: dict[str, dict[str, Callable[[], Any]]] = {"torch": {}, "onnxruntime": {}}
    files: dict[str, Any] = {}
    for index, (name, model) in enumerate(models(modules).items()):
        path = folder / f"{modules}-{index}.onnx"
        if "read-in" in name:
            x, feed = tokens, {"tokens": tokens.numpy()}
            path.write_bytes(_export_read_in(model, tokens))
        else:
            x, feed = images, {"image": images.numpy()}
            proto = traced(model, "")
            path.write_bytes(proto.SerializeToString())
            parameters = sum(p.numel() for p in model.parameters())
            files[name] = _file_figures(path, cost_of(proto, parameters, feed))
        session = onnx_session(path)
        calls["torch"][name] = lambda model=model, x=x: model(x)
        calls["onnxruntime"][name] = lambda session=session, feed=feed: session.run(None, feed)
    rows: dict[str, dict[str, Any]] = {}
    for runtime, own in calls.items():
        ratios = {}
        for name, (slow, fast, aims) in RATIOS.items():
            aim = aims.get(modules) if runtime == "torch" else None
            ratios[name] = ratio(own[slow], own[fast], aim, rounds=rounds, moment_s=0.4)
        rows[runtime] = {"rounds": rounds, "ratios": ratios}
    rows["onnxruntime"]["files"] = files
    return rows


def _file_figures(path: Path, cost: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", PEAK, str(path), str(BATCH)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded, grown = (int(number) / 1024 for number in done.stdout.split())
    return {
        "file_mib": path.stat().st_size / 2**20,
        "multiply_adds_per_sample": cost.multiply_adds.total,
        "multiply_adds_by_part": cost.multiply_adds.by_part,
        "peak_activation_mib_per_sample": cost.peak_activation_bytes / 2**20,
        "peak_memory_loaded_mib": loaded,
        "peak_memory_of_a_run_mib": grown,
    }


def _export_read_in(model: nn.Module, tokens: Tensor) -> bytes:
    with torch.no_grad():
        program = torch.onnx.export(
            model.eval(),
            (tokens,),
            dynamo=True,
            opset_version=20,
            input_names=["tokens"],
            dynamic_shapes=({0: torch.export.Dim("b", min=1)},),
            verbose=False,
        )
    assert program is not None
    return program.model_proto.SerializeToString()


def circuits(sizes: list[int]) -> dict[str, Any]:
    """Measure a NAC of each size."""
    result: dict[str, Any] = {
        "benchmark": "fold",
        "configuration": bench_config().to_dict(),
        "batch": BATCH,
        "threads": 1,
        "versions": {name: metadata.version(name) for name in ("torch", "onnx", "onnxruntime")},
        "peak_memory": "largest resident set (VmHWM) of a fresh process with the session loaded, "
        f"and how much one run of batch {BATCH} adds to it",
    }
    with tempfile.TemporaryDirectory() as folder:
        for modules in sizes:
            for runtime, row in circuit(modules, Path(folder)).items():
                result.setdefault(runtime, {})[str(modules)] = row
    return result


def main() -> None:
    """Measure the given families, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--modules", type=int, nargs="+", default=[256, 1024], help="of a NAC")
    options = parser.parse_args()
    chosen = options.family or list(FAMILIES)
    if unknown := sorted(set(chosen) - set(FAMILIES)):
        parser.error(f"unknown family {unknown[0]}, expected some of {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    families = json.loads(RESULT.read_text())["families"] if RESULT.exists() else {}
    for family in chosen:
        if family == "nac":
            row = circuits(options.modules)
            write_result(NAC_RESULT, row)
        else:
            row = {**facts(), "whole": whole(family)}
            if family == "sparo":
                row["read_out"] = read_outs()
            if family == "slot-attention":
                row["rounds"] = rounds()
            families[family] = row
            write_result(RESULT, {"families": families})
        print(family, json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
