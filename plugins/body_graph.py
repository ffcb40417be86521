# SPDX-License-Identifier: Apache-2.0
"""Write function bodies as Python calls: each call adds a node and returns its output's name."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from saccade.plugins.contract import DOMAIN, Op

_LOOP_SCALARS = (TensorProto.INT64, TensorProto.BOOL, TensorProto.BOOL)
# The name of a tensor, or a number that becomes a constant; "" omits an optional input.
Value = str | int | float | bool | Sequence[int]


class BodyGraph:
    """Nodes under construction; a loop has its own graph and reads outer values by name."""

    def __init__(self, outside: "BodyGraph | None" = None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        # Counters and constants are in the outermost graph, which every loop can read.
        self._root: BodyGraph = outside._root if outside else self
        self._constants: dict[tuple[str, Any], str] = {}
        self._count = 0

    def many(self, operator: str, outputs: int, *inputs: Value, **attributes: Any) -> list[str]:
        """Add a node with several outputs."""
        read = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        names = [self._name(operator) for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, read, names, **attributes))
        return names

    def __call__(self, operator: str, *inputs: Value, **attributes: Any) -> str:
        """Add a node with one output."""
        return self.many(operator, 1, *inputs, **attributes)[0]

    def constant(self, value: Value) -> str:
        """Add a float32, int64 or bool scalar, or an int64 vector; equal values are added once."""
        held = list(value) if isinstance(value, Sequence) else value
        key = (type(held).__name__, repr(held))
        root = self._root
        if key not in root._constants:
            kind = np.float32 if isinstance(held, float) else None
            tensor = numpy_helper.from_array(np.asarray(held, kind))
            root._constants[key] = self._name("Constant")
            node = helper.make_node("Constant", [], [root._constants[key]], value=tensor)
            root.nodes.append(node)
        return root._constants[key]

    def attribute(self, name: str, kind: type) -> str:
        """Add the value of an attribute of the function, as a scalar."""
        field = "value_float" if kind is float else "value_int"
        refers = AttributeProto(
            name=field,
            ref_attr_name=name,
            type=AttributeProto.FLOAT if kind is float else AttributeProto.INT,
        )
        node = helper.make_node("Constant", [], [self._name(name)])
        node.attribute.append(refers)
        self.nodes.append(node)
        return node.output[0]

    def loop(
        self,
        rounds: Value,
        carried: Sequence[tuple[str, int]],
        body: Callable[..., tuple[Sequence[str], Value]],
        condition: Value = True,
    ) -> list[str]:
        """Add a Loop: `body(graph, round, *state)` returns the next state and whether to continue.

        `carried` pairs each initial value with its element type. Returns the last state.
        """
        inner = BodyGraph(self)
        round_, before = inner._name("round"), inner._name("go_on")
        kinds = [kind for _, kind in carried]
        state = [inner._name("state") for _ in carried]
        after, go_on = body(inner, round_, *state)
        made = {name for node in inner.nodes for name in node.output}
        # A loop can only return values that it has produced itself.
        outputs = [
            str(name) if name in made else inner("Identity", name) for name in (go_on, *after)
        ]
        scalars = zip((round_, before, outputs[0]), _LOOP_SCALARS, strict=True)
        *given, go_on_info = (helper.make_tensor_value_info(*scalar, []) for scalar in scalars)
        graph = helper.make_graph(
            inner.nodes,
            "loop",
            [*given, *map(_any_shape, state, kinds)],
            [go_on_info, *map(_any_shape, outputs[1:], kinds)],
        )
        # Pass even a constant condition: onnx's evaluator treats a missing one as false.
        initial = [name for name, _ in carried]
        return self.many("Loop", len(kinds), rounds, condition, *initial, body=graph)

    def function(self, op: Op, outputs: Sequence[str], opset: int) -> onnx.FunctionProto:
        """Return the finished body of `op`; its inputs have the contract's names."""
        for port, name in zip(op.outputs, outputs, strict=True):
            self.nodes.append(helper.make_node("Identity", [name], [port.name]))
        return helper.make_function(
            DOMAIN,
            op.node,
            [port.name for port in op.inputs],
            [port.name for port in op.outputs],
            self.nodes,
            [helper.make_opsetid("", opset)],
            attribute_protos=[
                helper.make_attribute(attribute.name, attribute.default)
                for attribute in op.attributes.values()
            ],
        )

    def _name(self, stem: str) -> str:
        self._root._count += 1
        return f"{stem.lower()}_{self._root._count}"


def _any_shape(name: str, kind: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, None)
