# SPDX-License-Identifier: Apache-2.0
"""Count the nodes of a graph with all functions expanded, and the iterations of its loops.

Both are computed by multiplication: no function is expanded and no loop is run.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import onnx

NODES = 100_000  # a vision transformer with 24 blocks has 2,000
CALL_DEPTH = 32  # functions that call functions; saccade's call none
TURNS = 10**7  # total nodes run by loops with a constant number of iterations

Key = tuple[str, str, str]


def call_excesses(proto: onnx.ModelProto) -> Iterator[str]:
    """Yield how a model's calls and loops exceed the limits. Check the depth of graphs first."""
    yield from _Calls(proto).excesses()


def graphs_in(attribute: onnx.AttributeProto) -> tuple[onnx.GraphProto, ...]:
    """Return the graphs of an attribute: the body of a loop, the branches of a condition."""
    own = (attribute.g,) if attribute.HasField("g") else ()
    return (*own, *attribute.graphs)


@dataclass(frozen=True)
class _Load:
    """The number of nodes with every function expanded, and how many of them constant loops run."""

    nodes: int = 0
    turns: int = 0

    def __add__(self, other: "_Load") -> "_Load":
        return _Load(self.nodes + other.nodes, self.turns + other.turns)


@dataclass
class _Calls:
    """The call graph: each function is counted once, no matter how often it is called."""

    proto: onnx.ModelProto
    functions: dict[Key, onnx.FunctionProto] = field(default_factory=dict)
    known: dict[Key, _Load] = field(default_factory=dict)
    open: list[Key] = field(default_factory=list)

    def excesses(self) -> Iterator[str]:
        for function in self.proto.functions:
            key = _key(function.domain, function.name, function.overload)
            if key in self.functions:
                yield f"has two definitions of function {_said(key)}"
            self.functions[key] = function
        try:
            for key in self.functions:
                self._function(key)
            load = self._nodes(self.proto.graph.node, _Scope.of(self.proto.graph))
        except _TooDeep as error:
            yield str(error)
            return
        if load.nodes > NODES:
            yield (
                f"has {_large(load.nodes)} nodes with its functions expanded, expected at "
                f"most {NODES}"
            )
        if load.turns > TURNS:
            yield f"has loops that run {_large(load.turns)} nodes, expected at most {TURNS}"

    def _function(self, key: Key) -> _Load:
        if key in self.known:
            return self.known[key]
        if key in self.open:
            raise _TooDeep(f"has a function {_said(key)} that calls itself")
        if len(self.open) >= CALL_DEPTH:
            raise _TooDeep(f"has functions that call functions more than {CALL_DEPTH} deep")
        self.open.append(key)
        nodes = self.functions[key].node
        self.known[key] = self._nodes(nodes, _Scope().holding(nodes))
        self.open.pop()
        return self.known[key]

    def _nodes(self, nodes: Iterable[onnx.NodeProto], scope: "_Scope") -> _Load:
        total = _Load()
        for node in nodes:
            key = _key(node.domain, node.op_type, node.overload)
            total += self._function(key) if key in self.functions else _Load(1, 0)
            for attribute in node.attribute:
                for graph in graphs_in(attribute):
                    total += self._inside(node, graph, scope)
        return total

    def _inside(self, node: onnx.NodeProto, graph: onnx.GraphProto, scope: "_Scope") -> _Load:
        load = self._nodes(graph.node, _Scope.of(graph, scope))
        number = scope.number(node.input[0]) if node.op_type == "Loop" and node.input else None
        if number is None:
            return load
        # An iteration runs each node once, plus everything that loops inside it run.
        turns = max(0, number)
        return _Load(load.nodes, turns * max(1, load.nodes + load.turns))


class _TooDeep(Exception):
    """Functions call each other too deeply to be counted."""


@dataclass
class _Scope:
    """The names of a graph that stand for a known integer, and the enclosing graph."""

    outside: "_Scope | None" = None
    names: dict[str, int | None] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: onnx.GraphProto, outside: "_Scope | None" = None) -> "_Scope":
        scope = cls(outside, {value.name: None for value in graph.input})
        scope.names |= {tensor.name: _whole(tensor) for tensor in graph.initializer}
        return scope.holding(graph.node)

    def holding(self, nodes: Iterable[onnx.NodeProto]) -> "_Scope":
        """Return the scope extended by the constants that the nodes produce."""
        for node in nodes:
            value = _constant(node)
            self.names |= dict.fromkeys(node.output, value)
        return self

    def number(self, name: str) -> int | None:
        """Return the integer that a name stands for, if the file tells it."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.names:
            scope = scope.outside
        return None if scope is None else scope.names[name]


def _constant(node: onnx.NodeProto) -> int | None:
    if node.op_type != "Constant" or not node.attribute:
        return None
    held = node.attribute[0]
    return int(held.i) if held.name == "value_int" else _whole(held.t)


def _whole(tensor: onnx.TensorProto) -> int | None:
    """Return the value of a tensor with one integer, such as a number of iterations."""
    if tensor.data_type != onnx.TensorProto.INT64 or math.prod(tensor.dims) != 1:
        return None
    if len(tensor.raw_data) == 8:
        return int.from_bytes(tensor.raw_data, "little", signed=True)
    return tensor.int64_data[0] if len(tensor.int64_data) == 1 else None


def _key(domain: str, name: str, overload: str) -> Key:
    return ("" if domain == "ai.onnx" else domain, name, overload)


def _said(key: Key) -> str:
    return f"{'::'.join(word for word in key if word)!r:.80}"


def _large(number: int) -> str:
    # A hostile file can produce a number with thousands of digits.
    return str(number) if number < 10**12 else f"about 2^{number.bit_length() - 1}"
