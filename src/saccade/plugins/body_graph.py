# SPDX-License-Identifier: Apache-2.0
"""Function bodies as Python calls: every call adds a node and returns the name of its output."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from saccade.plugins.contract import DOMAIN, Op

_LOOP_SCALARS = (TensorProto.INT64, TensorProto.BOOL, TensorProto.BOOL)
# A tensor by name, or a number that becomes a constant; "" is an optional input left out.
Value = str | int | float | bool | Sequence[int]


class BodyGraph:
    """Nodes under construction; a loop has its own, and reads what stands outside by name."""

    def __init__(self, outside: "BodyGraph | None" = None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        # Names count up and constants stand in the outermost graph, which every loop can read.
        self._root: BodyGraph = outside._root if outside else self
        self._constants: dict[tuple[str, Any], str] = {}
        self._count = 0

    def many(self, operator: str, outputs: int, *inputs: Value, **attributes: Any) -> list[str]:
        """Adds a node with several outputs."""
        read = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        names = [self._name(operator) for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, read, names, **attributes))
        return names

    def __call__(self, operator: str, *inputs: Value, **attributes: Any) -> str:
        """Adds a node with one output."""
        return self.many(operator, 1, *inputs, **attributes)[0]

    def constant(self, value: Value) -> str:
        """A float32, int64 or bool scalar, or a vector of int64; the same value only once."""
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
        """The value of the function's own attribute, as a scalar."""
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
        """Adds a Loop: `body(graph, round, *state)` gives the next state and whether to go on.

        `carried` pairs each initial value with its element type. Returns the last state.
        """
        inner = BodyGraph(self)
        round_, before = inner._name("round"), inner._name("go_on")
        kinds = [kind for _, kind in carried]
        state = [inner._name("state") for _ in carried]
        after, go_on = body(inner, round_, *state)
        made = {name for node in inner.nodes for name in node.output}
        # A loop cannot hand on what it did not make.
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
        # The condition is given even where it is constant: onnx's evaluator takes none for false.
        initial = [name for name, _ in carried]
        return self.many("Loop", len(kinds), rounds, condition, *initial, body=graph)

    def function(self, op: Op, outputs: Sequence[str], opset: int) -> onnx.FunctionProto:
        """The finished body of `op`; its inputs are the contract's names."""
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
