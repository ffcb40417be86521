# SPDX-License-Identifier: Apache-2.0
"""Try int8 recipes in order, until one passes the gate and is fast enough."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np
import onnx

from saccade.core.errors import GateFailed, SaccadeError
from saccade.core.machine import cores, return_memory
from saccade.exporter.artefact.manifest import Parity, TriedRecipe
from saccade.exporter.gate.report import VariantReport, loosened
from saccade.exporter.quantization.quantize import quantized, ranges_of, worst_layers
from saccade.exporter.quantization.ranges import extremes_of
from saccade.exporter.quantization.recipes import QuantizationRecipe
from saccade.exporter.quantization.source import QuantizationSource, smoothed
from saccade.exporter.runtimes.runners import Runner, onnx_runner, onnx_session
from saccade.models.interface import Arrays
from saccade.plugins.native.library import available_library

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
            f"--threshold {loosened(parity)} LIMIT."
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
