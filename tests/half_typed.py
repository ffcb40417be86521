# SPDX-License-Identifier: Apache-2.0
"""Make variants of another type from an artefact's file, faster than an export."""

import hashlib
from dataclasses import replace
from pathlib import Path

import onnx

from saccade.exporter.artefact.manifest import (
    SUFFIX,
    FileEntry,
    Manifest,
    read_manifest,
    write_manifest,
)
from saccade.exporter.graph.layer_types import MATRIX_NODES

_KINDS = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}


def half_typed(proto: onnx.ModelProto, precision: str) -> onnx.ModelProto:
    """Put every matrix node of the main graph between casts to that type and back."""
    nodes = []
    for node in proto.graph.node:
        if node.op_type not in MATRIX_NODES:
            nodes.append(node)
            continue
        node = onnx.NodeProto.FromString(node.SerializeToString())
        for index, name in enumerate(node.input):
            node.input[index] = f"{node.name}/in{index}"
            nodes.append(_cast(name, node.input[index], _KINDS[precision]))
        result = node.output[0]
        node.output[0] = f"{node.name}/out"
        nodes += [node, _cast(node.output[0], result, onnx.TensorProto.FLOAT)]
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


def add_variant(
    folder: Path, source: str, precision: str, proto: onnx.ModelProto, **changes: object
) -> Manifest:
    """Write `proto` into the folder as a variant of another precision; return its manifest."""
    old = read_manifest(folder / f"{source}{SUFFIX}")
    name = source.rpartition("-")[0] + f"-{precision}"
    data = proto.SerializeToString(deterministic=True)
    (folder / f"{name}.onnx").write_bytes(data)
    manifest = replace(
        old,
        variant=replace(old.variant, name=name, precision=precision),
        file=FileEntry(f"{name}.onnx", hashlib.sha256(data).hexdigest(), len(data)),
        **changes,
    )
    write_manifest(folder, manifest)
    return manifest


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [source], [target], name=f"{target}/cast", to=kind)
