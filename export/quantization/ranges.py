# SPDX-License-Identifier: Apache-2.0
"""Ranges of activations over calibration samples, collected batch by batch in bounded memory."""

import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from saccade.core.machine import cores
from saccade.exporter.runtimes.runners import batches, onnx_runner, onnx_session
from saccade.models.interface import Arrays

_BATCH = 4
_HISTOGRAM_SAMPLES = 16  # millions of numbers each, which NumPy counts one by one
_LOW, _HIGH = "/low", "/high"  # suffixes of the values added to a graph


@dataclass(frozen=True)
class Activation:
    """A tensor to be quantized, and where its channels are.

    Shapes: [... channels] of a matrix product; [b channels ...], with `spatial` more axes, of a
        convolution.
    """

    name: str
    channels: int
    spatial: int = 0  # axes after the channels


@dataclass(frozen=True)
class Extremes:
    """The smallest and largest value of each channel.

    Shapes: both [channels] float32.
    """

    low: np.ndarray
    high: np.ndarray

    @property
    def magnitude(self) -> np.ndarray:
        """The largest magnitude of each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def ends(self) -> tuple[float, float]:
        """The range of all channels together."""
        return float(self.low.min()), float(self.high.max())


def extremes_of(model: Path, activations: list[Activation], samples: Arrays) -> dict[str, Extremes]:
    """Run a model and return the extremes of activations; the graph itself reduces each batch.

    Shapes: samples as the graph's inputs, [n ...].
    """
    proto = onnx.load(model, load_external_data=False)
    graph = proto.graph
    del graph.output[:]
    for activation in activations:
        _reduce(graph, activation)
    path = model.with_name("extremes.onnx")  # beside the data file that both refer to
    path.write_bytes(proto.SerializeToString())
    run = onnx_runner(onnx_session(path, threads=cores()))
    seen: dict[str, np.ndarray] = {}
    for some in batches(samples, _BATCH):
        for name, value in run(some).items():
            merge = np.minimum if name.endswith(_LOW) else np.maximum
            seen[name] = merge(seen[name], value) if name in seen else value
    return {
        activation.name: Extremes(seen[activation.name + _LOW], seen[activation.name + _HIGH])
        for activation in activations
    }


def _reduce(graph: onnx.GraphProto, activation: Activation) -> None:
    axes = (0, *range(2, 2 + activation.spatial)) if activation.spatial else (0,)
    source, own = activation.name, f"{activation.name}/reduced"
    graph.initializer.append(numpy_helper.from_array(np.array(axes), f"{own}/axes"))
    if not activation.spatial:
        shape = np.array([-1, activation.channels])
        graph.initializer.append(numpy_helper.from_array(shape, f"{own}/shape"))
        graph.node.append(helper.make_node("Reshape", [source, f"{own}/shape"], [own]))
        source = own
    for operator, suffix in (("ReduceMin", _LOW), ("ReduceMax", _HIGH)):
        name = activation.name + suffix
        graph.node.append(helper.make_node(operator, [source, f"{own}/axes"], [name], keepdims=0))
        graph.output.append(onnx.ValueInfoProto(name=name))


def percentiles_of(
    model: Path, names: list[str], samples: Arrays, percentile: float
) -> dict[str, tuple[float, float]]:
    """Return the range of each tensor that contains `percentile` % of its values.

    ONNX Runtime's calibrator keeps a histogram per tensor, and the activations of one sample.
    """
    from onnxruntime.quantization.calibrate import PercentileCalibrater

    class Chosen(PercentileCalibrater):
        def select_tensors_to_calibrate(self, model: onnx.ModelProto) -> Any:
            return set(names), {name: onnx.ValueInfoProto(name=name) for name in names}

    path = model.with_name("histograms.onnx")
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # it prints its progress
        calibrator = Chosen(model, augmented_model_path=str(path), percentile=percentile)
        calibrator.model = onnx.load(model, load_external_data=False)
        calibrator.augment_graph()
        calibrator.create_inference_session()
        for some in batches(samples, 1, _HISTOGRAM_SAMPLES):
            calibrator.collect_data(_Reader(some))
        data = calibrator.compute_data()
    ends = {name: data[name].range_value for name in names}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


class _Reader:
    """One batch, in the form that ONNX Runtime's calibrators read."""

    def __init__(self, batch: Mapping[str, np.ndarray]) -> None:
        self.left = [batch]

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        return self.left.pop() if self.left else None
