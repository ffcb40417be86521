# SPDX-License-Identifier: Apache-2.0
"""Quantize a graph to 8-bit integers around its layers with weights, with the first recipe."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from saccade.core.errors import GateFailed, SaccadeError
from saccade.core.machine import cores, return_memory
from saccade.exporter.artefact.manifest import Parity, TriedRecipe
from saccade.exporter.gate.report import VariantReport, as_step, loosened
from saccade.exporter.graph.canonical import tidy
from saccade.exporter.quantization.recipes import QuantizationRecipe
from saccade.exporter.quantization.source import (
    Layer,
    QuantizationSource,
    extremes_of,
    percentiles_of,
    smoothed,
)
from saccade.exporter.runtimes.runners import Runner, batches, onnx_runner, onnx_session
from saccade.models.interface import Arrays
from saccade.plugins.native.library import available_library

_TRIED_SAMPLES = 8  # for errors of layers, which differ by orders of magnitude


def quantized(
    source: QuantizationSource,
    ranges: Mapping[str, tuple[float, float]],
    recipe: QuantizationRecipe,
) -> onnx.ModelProto:
    """Add QuantizeLinear and DequantizeLinear around the layers of a model, with ONNX Runtime.

    Biases of matrix products are added in float32. Weights have a scale per output channel.
    """
    from onnxruntime.quantization import QDQQuantizer, QuantType
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData

    proto = onnx.shape_inference.infer_shapes(source.graph())
    # ONNX Runtime would keep all weights in float32, and loop over their channels in Python.
    weights = _taken_out(proto, source.layers)
    onnx.load_external_data_for_model(proto, str(source.path.parent))
    # The quantizer would write the model to a file to infer shapes in its own way.
    proto.metadata_props.add(key="onnx.infer", value="onnxruntime.quant")
    given = {name: (np.float32(low), np.float32(high)) for name, (low, high) in ranges.items()}
    with _quiet():
        quantizer = QDQQuantizer(
            proto,
            per_channel=False,  # as far as it knows, each weight is one number
            reduce_range=recipe.weight_bits == 7,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8 if recipe.unsigned else QuantType.QInt8,
            tensors_range=TensorsData(CalibrationMethod.MinMax, given),
            nodes_to_quantize=[layer.node for layer in source.layers],
            nodes_to_exclude=[],
            op_types_to_quantize=["MatMul", "Conv"],
            extra_options={
                "ActivationSymmetric": not recipe.unsigned,
                "WeightSymmetric": True,
                "QuantizeBias": False,
                "OpTypesToExcludeOutputQuantization": ["MatMul", "Conv"],
            },
        )
        made = quantizer.quantize_model()
        quantizer.model.topological_sort()
    _put_in(made.graph, source, weights, recipe.weight_bits)
    return tidy(made)


def _taken_out(proto: onnx.ModelProto, layers: tuple[Layer, ...]) -> dict[str, onnx.TensorProto]:
    """Replace the weights of layers by a single number, and return them."""
    names, weights = {layer.weight for layer in layers}, dict[str, onnx.TensorProto]()
    for tensor in proto.graph.initializer:
        if tensor.name in names:
            weights[tensor.name] = onnx.TensorProto.FromString(tensor.SerializeToString())
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(1, np.float32), tensor.name))
    return weights


def _put_in(
    graph: onnx.GraphProto,
    source: QuantizationSource,
    weights: Mapping[str, onnx.TensorProto],
    bits: int,
) -> None:
    """Quantize weights symmetrically, and give each to its DequantizeLinear with its scales."""
    makers = {name: node for node in graph.node for name in node.output}
    by_name = {node.name: node for node in graph.node}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    one_each = {layer.weight: layer for layer in source.layers}  # a weight may have several layers
    for layer in one_each.values():
        weight = source.weight(weights[layer.weight])
        values, scale = _in_integers(weight, layer.channels, bits)
        wide = makers[by_name[layer.node].input[1]]
        wide.attribute.append(helper.make_attribute("axis", layer.channels))
        arrays = values, scale, np.zeros(len(scale), np.int8)
        for name, array in zip(wide.input, arrays, strict=True):
            tensors[name].CopyFrom(numpy_helper.from_array(array, name))


def _in_integers(weight: np.ndarray, axis: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight in int8 and the scale of each channel, as ONNX Runtime computes them.

    Shapes: weight [...] with c channels on `axis` -> [...], [c].
    """
    rest = tuple(index for index in range(weight.ndim) if index != axis)
    largest = np.abs(weight).max(axis=rest).astype(np.float64)
    steps = 127 if bits == 8 else 64
    exact = largest / steps
    exact[exact < np.finfo(np.float32).tiny] = 1  # a channel of zeros
    scale = exact.astype(np.float32)
    values = np.round(weight / np.expand_dims(scale, rest))
    return np.clip(values, -128, 127).astype(np.int8), scale


def ranges_of(
    source: QuantizationSource,
    extremes: Mapping[str, tuple[float, float]],
    recipe: QuantizationRecipe,
    samples: Arrays,
) -> Mapping[str, tuple[float, float]]:
    """Return the range of each activation that a recipe represents."""
    if recipe.percentile == 100:
        return extremes
    return percentiles_of(source.path, list(extremes), samples, recipe.percentile)


def worst_layers(
    source: QuantizationSource, proto: onnx.ModelProto, share: float, samples: Arrays
) -> frozenset[str]:
    """Return the share of layers with the largest errors; the first ones, rounded up.

    Each quantized layer is given the float32 model's own activation. Its error is the power of the
    difference to the float32 output over the power of that output.
    """
    path = source.path.with_name("errors.onnx")
    probe = source.graph()
    _add_quantized(probe, proto, source.layers)
    path.write_bytes(probe.SerializeToString())
    run = onnx_runner(onnx_session(path, threads=cores()))
    powers: dict[str, float] = {}
    for some in batches(samples, 1, _TRIED_SAMPLES):
        for name, value in run(some).items():
            powers[name] = powers.get(name, 0.0) + float(value)
    tiny = float(np.finfo(np.float32).tiny)
    errors = {
        layer.node: powers[f"{layer.node}/error"] / max(powers[f"{layer.node}/power"], tiny)
        for layer in source.layers
    }
    count = int(np.ceil(share * len(errors)))
    return frozenset(sorted(errors, key=lambda name: -errors[name])[:count])


def _add_quantized(
    probe: onnx.ModelProto, proto: onnx.ModelProto, layers: tuple[Layer, ...]
) -> None:
    """Add each quantized layer beside its original, and make the powers the only outputs."""
    graph = probe.graph
    makers = {name: node for node in proto.graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    by_name = {node.name: node for node in proto.graph.node}
    known = {tensor.name for tensor in graph.initializer}
    made: set[str] = set()
    del graph.output[:]
    for layer in layers:
        node = onnx.NodeProto()
        node.CopyFrom(by_name[layer.node])
        pair = [makers[name] for name in node.input[:2]]  # DequantizeLinear of both factors
        chain = [makers.get(each.input[0]) for each in pair]
        for each in (*chain, *pair):
            if each is None or each.name in made:
                continue
            made.add(each.name)
            graph.node.append(each)
            held = [name for name in each.input if name in tensors and name not in known]
            graph.initializer.extend(tensors[name] for name in held)
            known.update(held)
        node.name, node.output[0] = f"{layer.node}/int8", f"{layer.node}/int8"
        difference = f"{layer.node}/difference"
        graph.node.append(node)
        graph.node.append(
            helper.make_node("Sub", [node.output[0], layer.output.name], [difference])
        )
        for value, suffix in ((difference, "error"), (layer.output.name, "power")):
            name = f"{layer.node}/{suffix}"
            graph.node.append(helper.make_node("ReduceSumSquare", [value], [name], keepdims=0))
            graph.output.append(onnx.ValueInfoProto(name=name))


def quantized_ranges(proto: onnx.ModelProto) -> dict[str, float]:
    """Return the largest magnitude that each quantized activation can represent, from its scale."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    largest = {}
    for node in proto.graph.node:
        if node.op_type == "QuantizeLinear":
            scale, zero = values[node.input[1]], values[node.input[2]]
            low, high = (-127, 127) if zero.dtype == np.int8 else (0, 255)
            reach = max(high - int(zero), int(zero) - low)
            largest[node.input[0]] = float(reach * scale)
    return largest


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the quantizer's advice to run a step that this graph does not need."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


CALIBRATION_SAMPLES = 64
_MOST_BATCH, _BATCH_S = 8, 0.5  # a batch of a slow model is smaller, down to one sample
_ROUNDS, _ROUND_S = 5, 0.05


Graph = TypeVar("Graph")


def candidates(
    plain: QuantizationSource, recipes: Collection[QuantizationRecipe], samples: Arrays
) -> Iterator[tuple[QuantizationRecipe, onnx.ModelProto]]:
    """Quantize a float32 model by one recipe after the other, each when it is asked for.

    Products of two computed matrices do not change.

    Shapes: samples as the graph's inputs, [n ...].
    """
    measured = extremes_of(plain.path, plain.inputs, samples)
    return_memory()
    smooth = None
    for recipe in recipes:
        source, extremes = plain, measured
        if recipe.smooth:
            smooth = smooth or smoothed(plain, measured)
            source, extremes = smooth
        ends = {name: each.ends for name, each in extremes.items()}
        yield recipe, _made(source, ends, recipe, samples)  # a name would keep it in memory


def _made(
    source: QuantizationSource,
    ends: Mapping[str, tuple[float, float]],
    recipe: QuantizationRecipe,
    samples: Arrays,
) -> onnx.ModelProto:
    ranges = ranges_of(source, ends, recipe, samples)
    made = quantized(source, ranges, recipe)
    if not recipe.float_share:
        return made
    worst = worst_layers(source, made, recipe.float_share, samples)
    return quantized(source.without(worst), ranges, recipe)


def first_that_passes(
    name: str,
    graphs: Iterator[tuple[str, Graph | SaccadeError]],
    gate: Callable[[Graph], Parity],
    speed: Callable[[Graph], float] | None,
    least: float,
) -> tuple[Graph, Parity, tuple[TriedRecipe, ...], float | None]:
    """Return the first graph that passes the gate and is at least `least` times as fast as fp32.

    Without `speed`, the speed is not measured. A recipe that is too slow ends the search, because
    those after it are not faster. An error in place of a graph is its reason to be missing.

    Returns: the graph, its figures, what was tried, and its speed over fp32.
    Raises: GateFailed, with the reason for each recipe, if there is none.
    """
    tried, limit = [], ""
    for recipe, graph in graphs:
        if isinstance(graph, SaccadeError):
            tried.append(TriedRecipe(recipe, str(graph)))
            continue
        ratio = speed(graph) if speed else None
        if ratio is not None and ratio < least:
            outcome = f"{ratio:.2f} times as fast as fp32 here, at least {least:g} is required"
            tried.append(TriedRecipe(recipe, outcome))
            limit = "To accept a slower file, lower --int8-speedup."
            break
        parity = gate(graph)
        if parity.passed:
            return graph, parity, (*tried, TriedRecipe(recipe, "kept")), ratio
        tried.append(TriedRecipe(recipe, "; ".join(VariantReport.of(name, parity).problems)))
        limit = (
            "If such a difference is acceptable, raise the limit with --threshold, for example "
            f"--threshold {loosened(parity)} LIMIT.{as_step('int8')}"
        )
    reasons = "; ".join(f"{each.recipe}: {each.outcome}" for each in tried)
    raise GateFailed(
        f"{name}: no int8 recipe is good enough, so nothing was written. {reasons}. Export another "
        f"--precision. {limit}"
    )


def served_runner(model: Path | bytes, custom_ops: Collection[str]) -> Runner:
    """Return a file as ONNX Runtime serves it alone: on all cores, with kernels if available."""
    library = available_library() if custom_ops else None
    return onnx_runner(onnx_session(model, threads=cores(), kernels=library))


def speed_over(slow: Runner, fast: Runner, samples: Arrays) -> float:
    """Return how many times as fast one runner is as another: the median of interleaved rounds.

    Shapes: samples as the runners' inputs, [n ...]; the first ones are run, in one batch.
    """

    def first(count: int) -> Arrays:
        return {name: array[:count] for name, array in samples.items()}

    _seconds(slow, first(1))  # warm-up
    batch = first(max(1, min(_MOST_BATCH, round(_BATCH_S / _seconds(slow, first(1))))))
    fast(batch)
    ratios = [_seconds(slow, batch) / _seconds(fast, batch) for _ in range(_ROUNDS)]
    return float(np.median(ratios))


def _seconds(run: Runner, batch: Arrays) -> float:
    """Seconds per run, of as many runs as it takes to measure a time."""
    runs, start = 0, perf_counter()
    while (elapsed := perf_counter() - start) < _ROUND_S or not runs:
        run(batch)
        runs += 1
    return elapsed / runs
