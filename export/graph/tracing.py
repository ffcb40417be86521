# SPDX-License-Identifier: Apache-2.0
"""Trace a torch model to an ONNX graph with torch's exporter."""

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxscript
import torch
from onnxscript import rewriter
from onnxscript.rewriter.rules.common import _no_op
from torch import nn
from torch.onnx._internal.exporter import _registration

from saccade.core.errors import require
from saccade.exporter.graph.canonical import OUTPUT_PREFIX, clean, tidy
from saccade.exporter.graph.half_graph import fold_casts
from saccade.exporter.graph.layer_types import opset_of
from saccade.exporter.graph.model_file import (
    Weights,
    constant,
    evaluated,
    loader,
    location_of,
    set_apart,
)
from saccade.exporter.runtimes.half_products import HALF_TYPES, float32_modules, half_products
from saccade.models.interface import Arrays, Component, component_named
from saccade.plugins.contract import DOMAIN, DTYPES, VERSION, Op, Port
from saccade.plugins.onnx_model import IR_VERSION, OPSET, attach_bodies, set_nodes
from saccade.plugins.ops import OPS


def translations() -> dict[Any, Callable[..., Any]]:
    """Return a translation for each custom op: one torch operator to one node, same arguments."""
    table = {}
    for op in OPS.values():
        op.implementation("eager")  # registers the torch operator
        python_name = op.reference.__name__
        table[getattr(torch.ops.saccade, python_name).default] = _translation(op)
    return table


def _translation(op: Op) -> Callable[..., Any]:
    node = onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, VERSION), op.node, _schema(op))
    count = len(op.inputs)

    def translate(*arguments: Any, **given: Any) -> Any:
        # torch passes attributes by position if the caller did.
        positional = dict(zip(op.attributes, arguments[count:], strict=False))
        values = op.checked_attributes({**positional, **given}, where=op.name)
        return node(*arguments[:count], **values)

    return translate


def _schema(op: Op) -> onnx.defs.OpSchema:
    """Describe the node's inputs and attributes to the exporter; it is not registered anywhere."""
    schema = onnx.defs.OpSchema
    types = {"float32": "tensor(float)", "float16": "tensor(float16)", "float64": "tensor(double)"}
    fixed = {**types, "int64": "tensor(int64)"}

    def parameter(port: Port) -> Any:
        return schema.FormalParameter(port.name, "T" if port.dtype == "T" else fixed[port.dtype])

    return schema(
        op.node,
        DOMAIN,
        VERSION,
        inputs=[parameter(port) for port in op.inputs],
        outputs=[parameter(port) for port in op.outputs],
        type_constraints=[("T", [types[dtype] for dtype in DTYPES], "")],
        attributes=[
            schema.Attribute(
                attribute.name,
                schema.AttrType.FLOAT if attribute.kind is float else schema.AttrType.INT,
                required=False,
            )
            for attribute in op.attributes.values()
        ],
    )


_NAMES = """
    Abs Add And BitwiseAnd BitwiseNot BitwiseOr Cast CastLike Ceil Clip Compress Concat Constant
    ConstantOfShape DepthToSpace Div Equal Expand Eye EyeLike Flatten Floor Gather GatherElements
    GatherND Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Max Min Mul Neg NonZero
    Not OneHot Or Pad ReduceMax ReduceMin Relu Reshape Round ScatterElements ScatterND Shape
    Sign Size Slice SpaceToDepth Split Sqrt Squeeze Sub Tile TopK Transpose Trilu Unsqueeze Where
    Xor
"""
EXACT = frozenset(_NAMES.split())


def fold_constants(proto: onnx.ModelProto, weights: Weights | None = None) -> onnx.ModelProto:
    """Evaluate exact nodes with constant inputs, and remove unused branches.

    The exporter leaves a Transpose after half-precision weights, and the arithmetic of shapes.
    Function bodies do not change: a runtime inlines them as they are.

    Raises: MissingPackage without onnx-graphsurgeon.
    """
    surgeon = require("onnx_graphsurgeon", extra="export")
    logger = surgeon.logger.G_LOGGER
    logger.severity = logger.ERROR  # its warnings are about terminal colors
    if weights is not None:
        _fold_large(proto, weights)
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.functions[:]
    graph = surgeon.import_onnx(bare)
    graph.fold_constants(should_exclude_node=_rounds_as_it_likes).cleanup().toposort()
    folded = surgeon.export_onnx(graph)
    for held in (proto.graph.node, proto.graph.initializer, proto.graph.value_info):
        del held[:]
    proto.graph.node.extend(folded.graph.node)
    proto.graph.initializer.extend(folded.graph.initializer)
    return proto


def _fold_large(proto: onnx.ModelProto, weights: Weights) -> None:
    """Fold the nodes that read a placeholder, whose values the library could not find.

    Nothing is computed here that takes memory: the values follow from the placeholder's own.
    """
    graph = proto.graph
    opset = next(opset.version for opset in proto.opset_import if opset.domain == "")
    loads = {tensor.name: loader(tensor, weights) for tensor in graph.initializer}
    large = {tensor.name for tensor in graph.initializer if location_of(tensor)}
    results = {value.name for value in graph.output}
    kept = []
    for node in graph.node:
        inputs = [loads[name] for name in node.input if name in loads]
        is_constant = bool(inputs) and len(inputs) == sum(map(bool, node.input))
        if (
            node.domain
            or not is_constant
            or results.intersection(node.output)
            or (node.op_type not in EXACT and any(_is_float(load()) for load in inputs))
        ):
            kept.append(node)
            continue
        values = {
            name: evaluated(node, opset, inputs, index)
            for index, name in enumerate(node.output)
            if name
        }
        loads |= values
        if not large.intersection(node.input):
            kept.append(node)  # for the library
            continue
        made = [constant(name, load, weights) for name, load in values.items()]
        large |= {tensor.name for tensor in made if location_of(tensor)}
        graph.initializer.extend(made)
    set_nodes(graph, kept)


@contextmanager
def exact_folding() -> Iterator[None]:
    """Restrict the exporter's own constant folding to exact nodes, like `fold_constants`."""
    from onnxscript.optimizer import _constant_folding as folding

    class Exact(folding.ReferenceEvaluator):
        def evaluate(self, domain: str, op: str, version: int, *args: Any, **kwargs: Any) -> Any:
            if op not in EXACT and any(map(_is_float, args)):
                return None
            return super().evaluate(domain, op, version, *args, **kwargs)

    before = folding._reference_evaluator
    folding._reference_evaluator = Exact()
    try:
        yield
    finally:
        folding._reference_evaluator = before


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind not in "biu"


def _rounds_as_it_likes(node: Any) -> bool:
    kinds = (value.dtype for value in node.inputs)
    floats = any(kind is None or np.dtype(kind).kind not in "biu" for kind in kinds)
    return node.op not in EXACT and floats


_EXAMPLES = 3  # samples: torch would treat 0 and 1 as constants
_TABLE = cache(_registration.ONNXRegistry.from_torchlib)


class _OutputModule(nn.Module):
    """The module that the file computes: a component's named outputs, in a fixed order."""

    def __init__(self, model: Any, role: str, outputs: Sequence[str], precision: str) -> None:
        super().__init__()
        self.model = model
        self.component = component_named(model, role)
        self.outputs = tuple(outputs)
        self.products = (
            half_products(model, precision, accumulate=False)
            if precision in HALF_TYPES
            else nullcontext()
        )

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names = [spec.name for spec in self.component.inputs]
        with self.products:
            answers = self.component.run(**dict(zip(names, inputs, strict=True)))
        return tuple(answers[name] for name in self.outputs)


def trace_component(
    model: nn.Module,
    component: Component,
    samples: Arrays,
    outputs: Sequence[str],
    precision: str = "fp32",
    weights: Weights | None = None,
    float32: set[str] | None = None,
) -> onnx.ModelProto:
    """Trace one component of a float32 model, with products in fp32, fp16 or bf16.

    Returns the cleaned graph. With `weights`, its large weights are there and refer to the model's.
    The names of nodes that stay in float32 in every precision are added to `float32`.
    Shapes: samples as the component's inputs, at least 3 of them.
    """
    examples = {
        spec.name: torch.from_numpy(np.ascontiguousarray(samples[spec.name][:_EXAMPLES]))
        for spec in component.inputs
    }
    words = {spec.name: spec.shape for spec in component.inputs}
    served = _OutputModule(model, component.role, outputs, precision)
    modules = float32_modules(model) if float32 is not None else ()
    proto = trace_module(served, examples, outputs, words, weights, modules, float32)
    if precision in HALF_TYPES:
        fold_casts(proto, weights)
    if precision == "bf16":
        # Neither the library nor ONNX Runtime's CPU kernels can fold bfloat16 constants.
        _set_opset(proto, opset_of(precision))
        return tidy(proto)
    return tidy(fold_constants(proto, weights))


def trace_module(
    module: nn.Module,
    examples: dict[str, torch.Tensor],
    outputs: Sequence[str],
    axes: Mapping[str, Sequence[int | str]] | None = None,
    weights: Weights | None = None,
    modules: Collection[str] = (),
    inside: set[str] | None = None,
) -> onnx.ModelProto:
    """Trace any module whose inputs have the batch as their first axis; return the cleaned graph.

    Axes that are named in `axes` (by input) are dynamic too. `weights` as in `trace_component`,
    `modules` and `inside` as in `clean`.

    Each custom op becomes one node, and the file contains its function body. A runtime that has
    the kernel uses it; any other runtime computes the body.
    Shapes: examples [b ...] with the same b, neither 0 nor 1.
    """
    words = {name: (axes or {}).get(name, ("b",)) for name in examples}
    dims = {
        word: torch.export.Dim(word, min=1)
        for shape in words.values()
        for word in shape
        if isinstance(word, str)
    }
    with _quiet(), _read_once(), _own_rules(), exact_folding(), torch.no_grad():
        program = torch.onnx.export(
            module.eval(),
            tuple(examples.values()),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(examples),
            output_names=[OUTPUT_PREFIX + name for name in outputs],
            dynamic_shapes=_dynamic(module, words, dims),
            custom_translation_table=translations(),
            verbose=False,
        )
    assert program is not None
    if weights is not None:
        set_apart(program.model, weights)
    proto = clean(program.model_proto, "model", modules, inside)
    attach_bodies(proto)
    assert proto.ir_version == IR_VERSION, proto.ir_version
    return proto


def _set_opset(proto: onnx.ModelProto, opset: int) -> None:
    """Raise the opset: every operator used means the same there, with more types allowed."""
    next(opset for opset in proto.opset_import if opset.domain == "").version = opset
    del proto.functions[:]
    attach_bodies(proto)


def _dynamic(
    module: nn.Module, words: Mapping[str, Sequence[int | str]], dims: Mapping[str, Any]
) -> tuple[Any, ...]:
    shapes = tuple(
        {i: dims[word] for i, word in enumerate(shape) if isinstance(word, str)}
        for shape in words.values()
    )
    # torch expects the shapes of a starred argument as one tuple.
    return (shapes,) if isinstance(module, _OutputModule) else shapes


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's messages about torchvision, which is unused, and deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _read_once() -> Iterator[None]:
    """Keep the exporter's table of ONNX functions: reading them again takes about a second."""
    registry = _registration.ONNXRegistry
    before = vars(registry)["from_torchlib"]

    def own_table(_: type, **asked: int) -> _registration.ONNXRegistry:
        own = copy(_TABLE(**asked))
        # The caller adds the custom ops, none of which is in the table already.
        own.functions = dict(own.functions)
        return own

    registry.from_torchlib = classmethod(own_table)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        registry.from_torchlib = before  # type: ignore[method-assign]


@contextmanager
def _own_rules() -> Iterator[None]:
    """Let the exporter rewrite with copies of its rules, without those for `x + 0` and `x * 1`.

    A rule keeps the last graph that it saw, and with it the weights: copies go away. Those two
    treat a constant within 1e-8 of 0 as 0 (and within 1e-5 of 1 as 1). This would drop an epsilon
    of 1e-8, which matters in a quotient of small numbers.
    """
    rules = rewriter._DEFAULT_REWRITE_RULES
    left_out = {id(rule) for rule in _no_op.rules}
    rewriter._DEFAULT_REWRITE_RULES = tuple(
        _copied(rule) for rule in rules if id(rule) not in left_out
    )
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules


def _copied(rule: Any) -> Any:
    """Copy a rule and what it matches with, which is the part that keeps the graph."""
    own = copy(rule)
    own._matcher = copy(rule._matcher)
    return own
