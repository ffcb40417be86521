# SPDX-License-Identifier: Apache-2.0
"""The types in which a variant's matrix layers compute: promised, in the network, in the engine."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.core.errors import GateFailed, SaccadeError, require
from saccade.core.schema import AGAIN
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.tensorrt.child import Network
from saccade.models.interface import TensorSpec

# The parsers accept any opset silently; up to this one, graphs were built and compared.
NEWEST_OPSET = 23

_NAMES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8"}
_BINDINGS = {
    "float32": "FLOAT",
    "float16": "HALF",
    "int64": "INT64",
    "int32": "INT32",
    "uint8": "UINT8",
    "int8": "INT8",
    "bool": "BOOL",
}
_SHOWN = 3

_ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]|]+?)(?: \|[^\]]*)?\]")
# TensorRT 10 has one string for layout and type, TensorRT 11 has two.
_KEYS = ("Format/Datatype", "Datatype", "DataType", "Format")
_WORDS = {  # words in those strings
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "half": "fp16",
    "int8": "int8",
    "fp32": "fp32",
    "float": "fp32",
}
_WORD = re.compile("|".join(_WORDS))


@dataclass(frozen=True)
class ExpectedTypes:
    """The matrix nodes of a variant's graph: all of its precision, except those in float32."""

    name: str
    precision: str
    nodes: frozenset[str]
    float32_layers: frozenset[str]
    # True for variants of several files, where one file may be a read-out as a whole.
    is_component: bool = False

    def of(self, node: str) -> str:
        """Return the precision of a node."""
        return "fp32" if node in self.float32_layers else self.precision


def expected_types_of(artefact: ArtefactFolder, manifest: Manifest) -> ExpectedTypes:
    """Return the types that the variant's name and manifest promise for the nodes of its file.

    Raises: SaccadeError if the file cannot be read or has an opset that was never tested.
    """
    require("onnx", extra="export")
    from saccade.exporter.graph.layer_types import MATRIX_NODES
    from saccade.exporter.graph.model_file import read_model

    name = manifest.variant.name
    proto, _ = read_model(artefact.file(manifest), manifest.file)
    opset = next((opset.version for opset in proto.opset_import if not opset.domain), 0)
    if opset > NEWEST_OPSET:
        raise SaccadeError(
            f"{name}: its ONNX file has opset {opset}, expected at most {NEWEST_OPSET}: the "
            "newest that was tested with TensorRT's parser, which accepts any opset silently. "
            f"{AGAIN}"
        )
    nodes = frozenset(node.name for node in proto.graph.node if node.op_type in MATRIX_NODES)
    kept = frozenset(manifest.float32_layers)
    return ExpectedTypes(name, manifest.variant.precision, nodes, kept, bool(manifest.variant.role))


def layer_types(network: Network) -> dict[str, int]:
    """Count the network's matrix layers by the precision in which they multiply."""
    return dict(sorted(Counter(map(type_of, network.products)).items()))


def type_of(product: dict[str, Any]) -> str:
    """Return the precision of one matrix layer; int8 if both of its factors are dequantized."""
    if product["from"] and all(operator == "DEQUANTIZE" for operator in product["from"]):
        return "int8"
    kinds = {_NAMES.get(dtype, dtype) for dtype in (*product["inputs"], product["type"])}
    return kinds.pop() if len(kinds) == 1 else "+".join(sorted(kinds))


def prove_types(expected_types: ExpectedTypes, network: Network) -> None:
    """Check that every matrix node of the graph is a layer of the promised type.

    Layers with other names belong to a custom op's body, which computes in float32 by contract, or
    were added by the parser.

    Raises: GateFailed naming layers that have another type or are missing from the network.
    """
    name, nodes = expected_types.name, expected_types.nodes
    again = f"{AGAIN} --precision {expected_types.precision}"
    types = {product["name"]: type_of(product) for product in network.products}
    if lost := sorted(nodes - set(types)):
        raise GateFailed(
            f"{name}: the parsed network has no matrix layer {_some(lost)}, but the graph has "
            f"that node, so its type cannot be verified. {again}"
        )
    wrong = [
        f"{node} is {types[node]}, not {expected_types.of(node)}"
        for node in sorted(nodes)
        if types[node] != expected_types.of(node)
    ]
    if wrong:
        raise GateFailed(
            f"{name}: {len(wrong)} of {len(nodes)} matrix layers have a type that differs from "
            f"what the variant promises: {_some(wrong)}. {again}"
        )
    all_float32 = (
        expected_types.precision != "fp32" and nodes and nodes <= expected_types.float32_layers
    )
    if all_float32 and not expected_types.is_component:
        raise GateFailed(
            f"{name}: none of its {len(nodes)} matrix layers is {expected_types.precision}. {again}"
        )


def check_bindings(
    name: str,
    network: Network,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    again: str = AGAIN,
) -> None:
    """Check that the network has the manifest's inputs and outputs: names, types, axes.

    `again` says how to write the file that the network is of.
    Raises: SaccadeError naming the first that differs.
    """
    for kind, specs, actual in (
        ("inputs", inputs, network.inputs),
        ("outputs", outputs, network.outputs),
    ):
        expected = {spec.name: _binding(spec) for spec in specs}
        real = {tensor["name"]: (tensor["type"], tuple(tensor["shape"])) for tensor in actual}
        if set(expected) != set(real):
            raise SaccadeError(
                f"{name}: TensorRT's {kind} are {sorted(real)}, expected {sorted(expected)}. "
                f"{again}"
            )
        for array, (dtype, shape) in expected.items():
            if real[array][0] != dtype or not _same_shape(real[array][1], shape, kind):
                raise SaccadeError(
                    f"{name}: {array!r} of TensorRT's {kind} is {real[array][0]} "
                    f"{list(real[array][1])}, expected {dtype} {list(shape)} as in the manifest. "
                    f"{again}"
                )


def _binding(spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
    shape = tuple(-1 if isinstance(axis, str) else axis for axis in spec.shape)
    return _BINDINGS.get(spec.dtype, spec.dtype), shape


def _same_shape(actual: tuple[int, ...], expected: tuple[int, ...], kind: str) -> bool:
    if kind == "inputs" or len(actual) != len(expected):
        return actual == expected
    # The parser may leave an output axis open that the exporter has inferred.
    return all(a in (b, -1) for a, b in zip(actual, expected, strict=True))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def compare_with_inspector(expected_types: ExpectedTypes, said: str) -> dict[str, int]:
    """Count matrix nodes that the inspector shows with their type, and those inside fused layers.

    A fused layer shows only the types of its inputs and outputs, not those that it computes in.

    Raises: GateFailed naming a layer of one matrix node that has another type.
    """
    agreed, fused, wrong = 0, 0, []
    for layer in _layers(expected_types.name, said):
        inside = {
            node
            for node in _ONNX_LAYER.findall(layer.get("Metadata", ""))
            if node in expected_types.nodes
        }
        kinds = _kinds(layer)
        for node in inside:
            expected = expected_types.of(node)
            if expected in kinds:
                agreed += 1
            elif len(inside) > 1 or not kinds or expected == "int8":
                fused += 1
            else:
                wrong.append(f"{node} has {', '.join(sorted(kinds))} tensors, not {expected}")
    if wrong:
        raise GateFailed(
            f"{expected_types.name}: the engine's inspector shows other types than the graph: "
            f"{wrong[0]} (layers with other types: {len(wrong)}). The plan was not kept. Please "
            "report this with the manifest."
        )
    return {"agreed": agreed, "fused": fused}


def _layers(name: str, said: str) -> list[dict[str, Any]]:
    try:
        layers = json.loads(said).get("Layers", [])
    except (ValueError, AttributeError) as error:
        raise SaccadeError(
            f"{name}: the engine's inspector did not return a JSON object ({said!r:.80})."
        ) from error
    # Without details, a layer is a name only.
    return [layer for layer in layers if isinstance(layer, dict)]


def _kinds(layer: dict[str, Any]) -> set[str]:
    kinds = set()
    for tensor in (*layer.get("Inputs", ()), *layer.get("Outputs", ())):
        text = " ".join(str(tensor.get(key, "")) for key in _KEYS).lower()
        kinds |= {_WORDS[word] for word in _WORD.findall(text)}
    return kinds
