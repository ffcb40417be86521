# SPDX-License-Identifier: Apache-2.0
"""Check every variant of every shipped checkpoint in each precision: the gate and an engine.

    python benchmarks/shipped_engines.py                                # fp32 and fp16
    python benchmarks/shipped_engines.py digits-sum --precision fp32 int8

Each budget in each precision is exported and checked by the gate. Then TensorRT-RTX builds an
engine for each file, which needs no GPU. Refused variants are in the result with the reason. Rows
of other checkpoints and precisions stay in results/shipped_engines.json.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from result_file import write_result

from saccade.core.errors import GateFailed
from saccade.core.machine import this_machine
from saccade.exporter.artefact.variant import PRECISIONS, budget_option
from saccade.exporter.exported import ExportOptions, export
from saccade.exporter.runtimes.tensorrt.build import BuildOptions, build
from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.shipped import shipped_checkpoint

RESULT = Path(__file__).with_name("results") / "shipped_engines.json"
FOLDER = shipped_checkpoint("digits-sum").parent


def main() -> None:
    """Measure the requested checkpoints and precisions, and print each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
    parser.add_argument("name", choices=[*names, "all"], nargs="?", default="all")
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=["fp32", "fp16"])
    given = parser.parse_args()
    rows = json.loads(RESULT.read_text())["models"] if RESULT.exists() else {}
    for name in names if given.name == "all" else [given.name]:
        checkpoint = load(shipped_checkpoint(name))
        known = rows.get(name, {})
        if known.get("sha256") != checkpoint.sha256:
            known = {"sha256": checkpoint.sha256, "variants": {}}
        rows[name] = known
        for budget in checkpoint.build().budgets():
            text = budget_option(budget.label, budget.share)
            for precision in given.precision:
                entry = variant(checkpoint, text, precision)
                known["variants"].setdefault(budget.label, {})[precision] = entry
                write_result(RESULT, {"machine": this_machine().to_dict(), "models": rows})
                print(f"{name} {budget.label} {precision}: {line(entry)}", flush=True)


def variant(checkpoint: Checkpoint, budget: str, precision: str) -> dict[str, Any]:
    """Return the gate's figures and the engines of one budget in one precision."""
    with tempfile.TemporaryDirectory() as place:
        options = ExportOptions(
            Path(place) / "exported", budget=(budget,), precision=(precision,), int8_for="gpu"
        )
        try:
            exported = export(checkpoint, options)
        except GateFailed as failure:
            return {"refused": str(failure)}
        engines = build(exported.folder, BuildOptions(engine="tensorrt-rtx")).manifests
    return {
        "parity": {
            manifest.variant.role or "whole": manifest.parity.figures
            for manifest in exported.manifests
        },
        "engines": {each.variant.role or "whole": engine(each) for each in engines},
    }


def engine(manifest: EngineManifest) -> dict[str, Any]:
    """Return a built engine as a row of the table."""
    return {
        "version": manifest.version,
        "compute_capabilities": manifest.compute_capabilities,
        "bytes": manifest.file.bytes,
        "build_seconds": manifest.build_seconds,
        "layer_types": manifest.layer_types,
    }


def line(entry: dict[str, Any]) -> str:
    """Describe a row in words."""
    if "refused" in entry:
        return f"refused: {entry['refused'].splitlines()[0]}"
    worst = max(figure["relative_error"] for figure in entry["parity"].values())
    mib = sum(engine["bytes"] for engine in entry["engines"].values()) / 2**20
    return f"relative error {worst:.2g}, {len(entry['engines'])} engines, {mib:.1f} MiB"


if __name__ == "__main__":
    main()
