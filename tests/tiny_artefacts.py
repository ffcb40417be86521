# SPDX-License-Identifier: Apache-2.0
"""An artefact folder made without an export, and engine folders whose plans are a few bytes.

The model maps an image of 4x4 pixels through two matrices, which is enough for a valid repository.
"""

import hashlib
import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from saccade.core.files import json_bytes, sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import (
    Cost,
    FileEntry,
    Manifest,
    MultiplyAdds,
    ParentEntry,
    Parity,
    VariantEntry,
    write_manifest,
)
from saccade.exporter.gate.metrics import FLOORS, THRESHOLDS
from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest, write_engine_manifest
from saccade.models.interface import TensorSpec
from saccade.models.preprocessing import Preprocessing
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.repository import Finding, Target, open_repository
from saccade.serving.repository.preflight.verb import steps

MODEL, LABELS = "tiny", ("circle", "square", "star")
SETTINGS = {"b1000": 1.0, "b0500": 0.5}
FULL, HALF = (f"{MODEL}-{budget}-fp32" for budget in SETTINGS)
INPUTS = (TensorSpec("image", "b 4 4 1", "uint8"),)
OUTPUTS = (
    TensorSpec("logits", "b 3", "float32"),
    TensorSpec("probabilities", "b 3", "float32"),
    TensorSpec("embedding", "b 4", "float32"),
)
LIMIT = {"relative_error": THRESHOLDS["fp32"]["relative_error"]}
PREPROCESSING = Preprocessing(4, 4, 1, (0.5,), (0.5,))
FIGURES = {"inferences_per_second": 1.0, "p50_ms": 1.0, "p95_ms": 1.0, "p99_ms": 1.0}
ENTRY: dict[str, Any] = {
    "variant": FULL, "sha256": "0" * 64, "budget": 1.0, "precision": "fp32",
    "runtime": "onnxruntime 1", "device": "here", "top5": None, "grpc": None, "dominated_by": None,
    "score": {
        "name": "accuracy", "value": 0.5, "higher_is_better": True, "unit": "", "n": 1,
        "interval": [0.4, 0.6], "data": "d", "data_sha256": "0" * 64,
    },
    "in_process": {"threads": 1, "best_batch": 1, "batch_1": FIGURES},
}  # fmt: skip


def onnx_model(seed: int = 0) -> onnx.ModelProto:
    """Return the model, with weights from a seed."""
    rng = np.random.default_rng(seed)
    weights = {
        "embed": rng.standard_normal((16, 4)).astype(np.float32) / 255,
        "classify": rng.standard_normal((4, 3)).astype(np.float32),
        "rows": np.array([-1, 16]),
    }
    node = onnx.helper.make_node
    nodes = [
        node("Cast", ["image"], ["floats"], name="cast", to=onnx.TensorProto.FLOAT),
        node("Reshape", ["floats", "rows"], ["pixels"], name="reshape"),
        node("MatMul", ["pixels", "embed"], ["embedding"], name="embedding"),
        node("MatMul", ["embedding", "classify"], ["logits"], name="logits"),
        node("Softmax", ["logits"], ["probabilities"], name="softmax"),
    ]

    def value(spec: TensorSpec) -> Any:
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
        return onnx.helper.make_tensor_value_info(spec.name, kind, list(spec.shape))

    graph = onnx.helper.make_graph(
        nodes,
        "tiny",
        [value(spec) for spec in INPUTS],
        [value(spec) for spec in OUTPUTS],
        [onnx.numpy_helper.from_array(weight, name) for name, weight in weights.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 20)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def manifest_of(budget_name: str, data: bytes, parent: ParentEntry, **changes: Any) -> Manifest:
    """Return the manifest of one variant."""
    name, budget = f"{MODEL}-{budget_name}-fp32", SETTINGS[budget_name]
    kept = round(16 * budget)
    known: dict[str, Any] = {
        "variant": VariantEntry(
            name, MODEL, "nac", "", budget_name, budget, kept, 16, "modules", "fp32"
        ),
        "file": FileEntry(f"{name}.onnx", hashlib.sha256(data).hexdigest(), len(data)),
        "parent": parent,
        "inputs": INPUTS,
        "outputs": OUTPUTS,
        "preprocessing": PREPROCESSING,
        "labels": LABELS,
        "facts": {},
        "custom_ops": (),
        "opset": 20,
        "ir_version": 10,
        "tools": {"onnx": "1"},
        "cost": Cost(76, MultiplyAdds(kept * 5, {"tiny": kept * 5}), 256),
        "parity": Parity(
            True, {"relative_error": 0.0}, LIMIT, (), 256, 64, (1,), floor=FLOORS["fp32"]
        ),
    }
    # Fields that later releases added are empty for such a small model.
    empty = {field.name: field for field in fields(Manifest) if field.name not in known}
    for field in empty.values():
        if field.default is MISSING and field.default_factory is MISSING:
            known[field.name] = {} if str(field.type).startswith("dict") else ()
    return replace(Manifest(**known), **changes)


def artefacts(folder: Path, checkpoint: bool = True) -> Path:
    """Write a folder like `saccade export`, with two variants and their checkpoint."""
    folder.mkdir(parents=True)
    parent = ParentEntry(f"{MODEL}.safetensors", "0" * 64)
    if checkpoint:
        parent = _checkpoint(folder / parent.name)
    for seed, budget in enumerate(SETTINGS):
        data = onnx_model(seed).SerializeToString()
        manifest = manifest_of(budget, data, parent)
        (folder / manifest.file.name).write_bytes(data)
        write_manifest(folder, manifest)
    return folder


def int8_artefacts(folder: Path) -> Path:
    """Write a folder with one variant, whose first matrix and its input are in int8."""
    folder.mkdir(parents=True)
    data = _quantized(onnx_model()).SerializeToString()
    manifest = manifest_of("b1000", data, ParentEntry(f"{MODEL}.safetensors", "0" * 64))
    name = f"{MODEL}-b1000-int8"
    manifest = replace(
        manifest,
        variant=replace(manifest.variant, name=name, precision="int8"),
        file=replace(manifest.file, name=f"{name}.onnx"),
        parity=replace(
            manifest.parity,
            thresholds={key: THRESHOLDS["int8"][key] for key in ("one_minus_cosine",)},
            figures={"one_minus_cosine": 0.0},
            floor=FLOORS["int8"],
        ),
    )
    (folder / manifest.file.name).write_bytes(data)
    write_manifest(folder, manifest)
    return folder


def _quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its first product between QuantizeLinear and DequantizeLinear.

    Weights use six bits: without VNNI, CPUs add pairs of products in 16 bits, and clip them.
    """
    values = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    scale = np.float32(np.abs(values["embed"]).max() / 31)
    added = {
        "weight": np.round(values["embed"] / scale).astype(np.int8), "weight_scale": scale,
        "pixels_scale": np.float32(255 / 127), "zero": np.int8(0),
    }  # fmt: skip
    node = onnx.helper.make_node
    around = [
        node("QuantizeLinear", ["pixels", "pixels_scale", "zero"], ["pixels_8"], name="quantize"),
        node("DequantizeLinear", ["pixels_8", "pixels_scale", "zero"], ["pixels_q"], name="read"),
        node("DequantizeLinear", ["weight", "weight_scale", "zero"], ["embed_q"], name="weights"),
    ]
    nodes = [*model.graph.node]
    product = next(each for each in nodes if each.name == "embedding")
    product.input[:] = ["pixels_q", "embed_q"]
    place = nodes.index(product)
    copies = [onnx.NodeProto.FromString(each.SerializeToString()) for each in nodes]
    del model.graph.node[:]
    model.graph.node.extend([*copies[:place], *around, *copies[place:]])
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in added.items()
    )
    return model


def write_repository(folder: Path) -> Path:
    """Write such a folder and the repository that a server loads; return the repository."""
    artefacts(folder / "exported", checkpoint=False)
    deploy(folder / "exported", RepositoryOptions(out=folder / "repository"))
    return folder / "repository"


def _checkpoint(path: Path) -> ParentEntry:
    import torch

    from saccade.models.checkpoint import save

    images = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), dtype=np.uint8)
    checkpoint = save(
        path, family="nac", config={}, weights={"none": torch.zeros(1)},
        preprocessing=PREPROCESSING, labels=LABELS, calibration={"image": images}, card={},
    )  # fmt: skip
    return ParentEntry(path.name, checkpoint.sha256)


def engines(folder: Path, out: Path, capability: str = "8.9", **changes: Any) -> Path:
    """Write a folder like `saccade build`, with a plan of a few bytes for each variant."""
    out.mkdir(parents=True)
    for manifest in ArtefactFolder(folder).manifests:
        name = manifest.variant.name
        data = f"ftrt {name} {capability}".encode()
        (out / f"{name}.plan").write_bytes(data)
        shapes = {"min": (1, 4, 4, 1), "opt": (8, 4, 4, 1), "max": (64, 4, 4, 1)}
        known: dict[str, Any] = {
            "variant": manifest.variant,
            "file": FileEntry(f"{name}.plan", hashlib.sha256(data).hexdigest(), len(data)),
            "parent": ParentEntry(manifest.file.name, manifest.file.sha256),
            "inputs": manifest.inputs,
            "outputs": manifest.outputs,
            "engine": "tensorrt",
            "version": "10.16.0.72",
            "compute_capabilities": (capability,),
            "driver": "580.95",
            "profiles": {"image": shapes},
            "options": {},
            "timing_cache_sha256": None,
            "plugins": {},
            "layer_types": {"fp32": 2},
            "build_seconds": 1.0,
        }
        write_engine_manifest(out, replace(EngineManifest(**known), **changes))
    return out


def examine(repository: Path, target: Target) -> list[Finding]:
    """Return the findings of preflight, without its separate process."""
    return [run() for _, _, run in steps(open_repository(repository), target)]


def rehash(repository: Path) -> None:
    """Update the hashes of a changed repository, so that the fault itself must be detected."""
    path = repository / "saccade.json"
    content = json.loads(path.read_text())
    present = sorted(
        path for path in repository.rglob("*") if path.is_file() and not path.is_symlink()
    )
    content["files"] = {
        name.relative_to(repository).as_posix(): sha256_of(name) for name in present if name != path
    }
    path.write_bytes(json_bytes(content))
