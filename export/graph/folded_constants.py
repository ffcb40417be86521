# SPDX-License-Identifier: Apache-2.0
"""What an exporter computes at run time though it is constant: folded before anyone builds.

Who folds computes in float32, and rounds sums and functions as the CPU at hand likes it. So only
what moves numbers, or rounds each once, is folded here. The rest is folded in the model, in float64
and in one order (`models.fixed_order`); what was forgotten there stays a node, which every runtime
computes when it loads the file, and the bytes stay the same on every CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx

from saccade.errors import require

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
    kinds = (each.dtype for each in node.inputs)
    floats = any(kind is None or np.dtype(kind).kind not in "biu" for kind in kinds)
    return node.op not in EXACT and floats
