# SPDX-License-Identifier: Apache-2.0
"""Check a manifest against its ONNX file and the checkpoint that it names."""

import json
from pathlib import Path
from typing import Any

import onnx

from saccade.core.schema import AGAIN
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.graph.canonical import flaws, tensor_specs
from saccade.exporter.graph.layer_types import float32_layers, matrix_types, opset_of
from saccade.exporter.graph.model_file import read_model, without_values
from saccade.models.budget import ComputeBudget
from saccade.models.checkpoint import Checkpoint
from saccade.plugins.onnx_model import check_nodes


def contradictions(
    path: Path,
    manifest: Manifest,
    checkpoint: Checkpoint,
    facts: dict[str, Any],
    budget: ComputeBudget,
) -> tuple[str, ...]:
    """Return the failed checks of a manifest as messages; empty if all passed.

    `facts` are the runtime metadata of the model at that budget.
    """
    proto = without_values(read_model(path, manifest.file)[0])
    entry = manifest.exported
    inputs, outputs = tensor_specs(proto.graph.input), tensor_specs(proto.graph.output)
    # Preprocessing is for components with an image input, labels for those with probabilities.
    takes_image = any(spec.name == "image" for spec in inputs)
    has_chances = any(spec.name == "probabilities" for spec in outputs)
    checks = (
        ("inputs", manifest.inputs, inputs),
        ("outputs", manifest.outputs, outputs),
        ("labels", manifest.labels, checkpoint.labels if has_chances else ()),
        (
            "preprocessing",
            manifest.preprocessing,
            checkpoint.preprocessing if takes_image else None,
        ),
        ("family", entry.family, checkpoint.family),
        ("setting", (entry.kept, entry.total, entry.unit), _counts(budget)),
        ("facts", manifest.facts, json.loads(json.dumps(facts))),
        ("bytes", manifest.file.bytes, path.stat().st_size),
        ("opset and IR version", (manifest.opset, manifest.ir_version), _versions(proto)),
        ("custom ops", manifest.custom_ops, check_nodes(proto)),
        ("float32 layers", manifest.float32_layers, _float32(proto, entry.precision)),
    )
    wrong = [
        f"{what} in the manifest: found {stated}, expected {actual}. {AGAIN}"
        for what, stated, actual in checks
        if stated != actual
    ]
    return (*flaws(proto, opset_of(entry.precision)), *wrong, *_mistyped(proto, entry.precision))


def _mistyped(proto: onnx.ModelProto, precision: str) -> list[str]:
    return [
        f"{name} computes in {kind}, but the variant's name promises {precision}. {AGAIN}"
        for name, kind in matrix_types(proto).items()
        if kind not in ("fp32", precision)
    ]


def _float32(proto: onnx.ModelProto, precision: str) -> tuple[str, ...]:
    return () if precision == "fp32" else float32_layers(proto)


def _counts(budget: ComputeBudget) -> tuple[int, int, str]:
    return budget.kept, budget.total, budget.unit


def _versions(proto: onnx.ModelProto) -> tuple[int, int]:
    opsets = {opset.domain: opset.version for opset in proto.opset_import}
    return opsets.get("", 0), proto.ir_version
