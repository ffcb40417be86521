# SPDX-License-Identifier: Apache-2.0
"""What an exporter computes at run time though it is constant: folded before anyone builds."""

import onnx

from saccade.errors import require


def fold_constants(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same function without nodes of constant inputs, and without branches nobody reads.

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
    graph.fold_constants().cleanup().toposort()
    folded = surgeon.export_onnx(graph)
    for held in (proto.graph.node, proto.graph.initializer, proto.graph.value_info):
        del held[:]
    proto.graph.node.extend(folded.graph.node)
    proto.graph.initializer.extend(folded.graph.initializer)
    return proto
