# SPDX-License-Identifier: Apache-2.0
"""Check the types of a finished engine with the engine inspector; needs a GPU."""

import json
import re
from typing import Any

from saccade.core.errors import GateFailed, SaccadeError
from saccade.exporter.runtimes.tensorrt.expected_types import ExpectedTypes

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
