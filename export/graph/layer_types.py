# SPDX-License-Identifier: Apache-2.0
"""The type in which each matrix layer of a graph multiplies, and what a precision requires."""

from collections.abc import Collection, Mapping

import onnx

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN
from saccade.plugins.onnx_model import OPSET

_BF16_OPSET = 22  # the first one with bfloat16 convolutions
MATRIX_NODES = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum")
_NAMES = {
    onnx.TensorProto.FLOAT: "fp32",
    onnx.TensorProto.FLOAT16: "fp16",
    onnx.TensorProto.BFLOAT16: "bf16",
    onnx.TensorProto.DOUBLE: "fp64",
}


def opset_of(precision: str) -> int:
    """Return the opset of files of that precision."""
    return _BF16_OPSET if precision == "bf16" else OPSET


def matrix_types(proto: onnx.ModelProto) -> dict[str, str]:
    """Return the precision in which each matrix node of the main graph multiplies, by name.

    A node whose inputs both come from DequantizeLinear is int8: a runtime multiplies the integers.
    """
    nodes = [node for node in proto.graph.node if node.op_type in MATRIX_NODES]
    makers = {name: node.op_type for node in proto.graph.node for name in node.output}
    types = element_types(proto)
    return {
        node.name: "int8"
        if all(makers.get(name) == "DequantizeLinear" for name in node.input[:2])
        else _NAMES[types[node.output[0]]]
        for node in nodes
    }


def element_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the element type of every tensor of the main graph for which inference knows it."""
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    types = {tensor.name: tensor.data_type for tensor in inferred.initializer}
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    return types | {value.name: value.type.tensor_type.elem_type for value in values}


def float32_layers(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Return the names of the matrix nodes that multiply in float32."""
    return tuple(sorted(name for name, kind in matrix_types(proto).items() if kind == "fp32"))


def check_types(
    name: str,
    precision: str,
    types: Mapping[str, str],
    cost: Mapping[str, int],
    float32: Collection[str],
) -> None:
    """Check that the graph has the precision that its name promises.

    Every matrix node must have it, except those in `float32`, which may have less than half of the
    multiply-adds (`cost` by node; if empty, any share is allowed).
    Raises: SaccadeError naming the nodes of another type.
    """
    wrong = sorted(
        node
        for node, kind in types.items()
        if kind != precision and not (kind == "fp32" and node in float32)
    )
    if wrong:
        types_text = ", ".join(f"{node} is {types[node]}" for node in wrong[:3])
        raise SaccadeError(
            f"{name}: {len(wrong)} of {len(types)} matrix layers are not {precision}: "
            f"{types_text}. {AGAIN} --precision {precision}"
        )
    whole = sum(cost.values())
    # Anything that is not a matrix node, such as a recurrent layer, is computed in float32.
    done = sum(count for node, count in cost.items() if types.get(node) == precision)
    if cost and 2 * done <= whole:
        raise SaccadeError(
            f"{name}: only {done:,} of {whole:,} multiply-adds are {precision}. "
            f"Use the fp32 variant instead: this one would save no time."
        )
