# SPDX-License-Identifier: Apache-2.0
"""A torch model to an ONNX graph, by torch's own exporter."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import onnx
import onnxscript
import torch
from onnxscript import rewriter
from onnxscript.rewriter.rules.common import _no_op
from torch import nn

from saccade.errors import require
from saccade.exporter.graph.canonical import OUTPUT_PREFIX, clean, tidy
from saccade.exporter.graph.half_graph import fold_casts
from saccade.exporter.graph.layer_types import opset_of
from saccade.exporter.runtimes.half_products import HALF_TYPES, half_products
from saccade.models.interface import Arrays, Component, component_named
from saccade.plugins.contract import DOMAIN, DTYPES, VERSION, Op, Port
from saccade.plugins.onnx_model import IR_VERSION, OPSET, attach_bodies
from saccade.plugins.ops import OPS


def translations() -> dict[Any, Callable[..., Any]]:
    """A translation for each op: one torch operator, one node, the same arguments."""
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
        # torch passes attributes by position where the caller did.
        positional = dict(zip(op.attributes, arguments[count:], strict=False))
        values = op.checked_attributes({**positional, **given}, where=op.name)
        return node(*arguments[:count], **values)

    return translate


def _schema(op: Op) -> onnx.defs.OpSchema:
    """Registered nowhere; it only tells the exporter the node's shape."""
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


def fold_constants(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same function without exact nodes of constant inputs, and without branches nobody reads.

    Weights of half precision come out of the exporter with their Transpose behind them, shapes
    with their arithmetic. Function bodies are left alone: a runtime inlines them as they are.

    Raises: MissingPackage without onnx-graphsurgeon.
    """
    surgeon = require("onnx_graphsurgeon", extra="export")
    logger = surgeon.logger.G_LOGGER
    logger.severity = logger.ERROR  # its warnings tell of colours on a terminal
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


@contextmanager
def exact_folding() -> Iterator[None]:
    """The exporter's own folding does as `fold_constants` does: it evaluates exact nodes only."""
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


_EXAMPLES = 3  # samples: neither 0 nor 1, which torch would take for constants


class _Served(nn.Module):
    """Module that the file computes: a component's named outputs, in a fixed order."""

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
) -> onnx.ModelProto:
    """The cleaned graph of one component of a float32 model, its products in fp32, fp16 or bf16.

    Shapes: samples as the component's inputs, at least 3 of them.
    """
    examples = {
        spec.name: torch.from_numpy(np.ascontiguousarray(samples[spec.name][:_EXAMPLES]))
        for spec in component.inputs
    }
    words = {spec.name: spec.shape for spec in component.inputs}
    served = _Served(model, component.role, outputs, precision)
    proto = trace_module(served, examples, outputs, words)
    if precision in HALF_TYPES:
        fold_casts(proto)
    if precision == "bf16":
        # Neither the library nor ONNX Runtime's CPU kernels fold constants of bfloat16.
        _set_opset(proto, opset_of(precision))
        return tidy(proto)
    return tidy(fold_constants(proto))


def trace_module(
    module: nn.Module,
    examples: dict[str, torch.Tensor],
    outputs: Sequence[str],
    axes: Mapping[str, Sequence[int | str]] | None = None,
) -> onnx.ModelProto:
    """The cleaned graph of any module whose inputs share a batch as their first axis.

    Further axes that are words in `axes` (by input) are dynamic too.

    Each of saccade's ops becomes one node with its function body beside it: a runtime that has
    the kernel takes the kernel, another one computes the body.
    Shapes: examples [b ...] with one b that is neither 0 nor 1.
    """
    words = {name: (axes or {}).get(name, ("b",)) for name in examples}
    dims = {
        word: torch.export.Dim(word, min=1)
        for shape in words.values()
        for word in shape
        if isinstance(word, str)
    }
    with _quiet(), _tiny_constants_stay(), exact_folding(), torch.no_grad():
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
    proto = clean(program.model_proto, root="model")
    attach_bodies(proto)
    assert proto.ir_version == IR_VERSION, proto.ir_version
    return proto


def _set_opset(proto: onnx.ModelProto, opset: int) -> None:
    """Each operator used here means the same in the newer opset, which only allows more types."""
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
    # torch wants the shapes of a starred argument as one tuple.
    return (shapes,) if isinstance(module, _Served) else shapes


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's words on torchvision, which is not used, and its own deprecations."""
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
def _tiny_constants_stay() -> Iterator[None]:
    """Without the exporter's rules that leave out `x + 0` and `x * 1`.

    They take a constant within 1e-8 for 0 (within 1e-5 for 1), and so drop an epsilon of 1e-8 that
    keeps a quotient of small numbers what it is.
    """
    rules = rewriter._DEFAULT_REWRITE_RULES
    left_out = {id(rule) for rule in _no_op.rules}
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in rules if id(rule) not in left_out)
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules
