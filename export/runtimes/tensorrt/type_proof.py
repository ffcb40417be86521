# SPDX-License-Identifier: Apache-2.0
"""Verify before a build that the network computes in the types that the variant promises."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from saccade.core.errors import GateFailed, SaccadeError
from saccade.core.schema import AGAIN
from saccade.exporter.runtimes.tensorrt.child import Network
from saccade.exporter.runtimes.tensorrt.expected_types import ExpectedTypes
from saccade.models.interface import TensorSpec

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
            f"{name}: {len(wrong)} of {len(nodes)} matrix layers have a type that differs from the "
            f"variant promises: {_some(wrong)}. {again}"
        )
    all_float32 = (
        expected_types.precision != "fp32" and nodes and nodes <= expected_types.float32_layers
    )
    if all_float32 and not expected_types.is_component:
        raise GateFailed(
            f"{name}: none of its {len(nodes)} matrix layers is {expected_types.precision}. {again}"
        )


def check_bindings(
    name: str, network: Network, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> None:
    """Check that the network has the manifest's inputs and outputs: names, types, axes.

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
                f"{AGAIN}"
            )
        for array, (dtype, shape) in expected.items():
            if real[array][0] != dtype or not _same_shape(real[array][1], shape, kind):
                raise SaccadeError(
                    f"{name}: {array!r} of TensorRT's {kind} is {real[array][0]} "
                    f"{list(real[array][1])}, expected {dtype} {list(shape)} as in the manifest. "
                    f"{AGAIN}"
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
