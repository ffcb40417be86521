# SPDX-License-Identifier: Apache-2.0
"""int8: recipes in order, ranges, smoothing, islands, and what the manifest says of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from quick_gate import FEW_SAMPLES

from saccade.core.errors import GateFailed, SaccadeError
from saccade.exporter.artefact.manifest import FileEntry, Parity, TriedRecipe, read_manifest
from saccade.exporter.export import ExportOptions, export
from saccade.exporter.gate import gate
from saccade.exporter.gate.reference import Reference
from saccade.exporter.quantization import quantize
from saccade.exporter.quantization.quantize import (
    candidates,
    first_that_passes,
    quantized,
    quantized_ranges,
    speed_over,
    worst_layers,
)
from saccade.exporter.quantization.recipes import RECIPES, QuantizationRecipe, recipes_for
from saccade.exporter.quantization.source import (
    QuantizationSource,
    extremes_of,
    percentiles_of,
    smoothed,
    source_of,
)
from saccade.exporter.runtimes.runners import onnx_runner, onnx_session
from saccade.exporter.runtimes.runtime import BuildOptions
from saccade.exporter.runtimes.tensorrt.build import build

WIDTH, OUTLIER = 32, 3


def two_norms() -> onnx.ModelProto:
    """A norm that two matrices read, with an outlier channel, and one whose output is also added.

    The first matrix is a Gemm, as the exporter writes a linear layer.
    """
    rng = np.random.default_rng(0)
    scale = np.ones(WIDTH, np.float32)
    scale[OUTLIER] = 60
    weights = {
        "scale": scale,
        "bias": rng.normal(size=WIDTH),
        "ones": np.ones(WIDTH),
        "a": rng.normal(size=(WIDTH, WIDTH)) / 6,
        "b": rng.normal(size=(WIDTH, WIDTH)) / 6,
        "c": rng.normal(size=(WIDTH, WIDTH)) / 6,
    }
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["n"], "norm"),
        helper.make_node("Gemm", ["n", "a", "bias"], ["p"], "first"),
        helper.make_node("MatMul", ["n", "b"], ["q"], "second"),
        helper.make_node("Add", ["p", "q"], ["s"], "sum"),
        helper.make_node("LayerNormalization", ["s", "ones", "bias"], ["m"], "shared"),
        helper.make_node("MatMul", ["m", "c"], ["r"], "third"),
        helper.make_node("Add", ["r", "m"], ["y"], "skip"),
    ]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", WIDTH])
        for name in ("x", "y")
    ]
    held = [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


SAMPLES = {"x": np.random.default_rng(1).normal(size=(41, WIDTH)).astype(np.float32)}


@pytest.fixture
def source(tmp_path: Path) -> QuantizationSource:
    return source_of(two_norms(), {}, (), tmp_path)


def convolved() -> onnx.ModelProto:
    """Two convolutions with the same filters, one filter of zeros among them, and a matrix."""
    rng = np.random.default_rng(2)
    filters = rng.normal(size=(4, 4, 3, 3))
    filters[1] = 0
    weights = {"filters": filters, "bias": rng.normal(size=4), "head": rng.normal(size=(6, 5))}
    nodes = [
        helper.make_node("Conv", ["x", "filters", "bias"], ["a"], "one", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["a", "filters"], ["b"], "two", pads=[1, 1, 1, 1]),
        helper.make_node("MatMul", ["b", "head"], ["y"], "three"),
    ]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4, 6, width])
        for name, width in (("x", 6), ("y", 5))
    ]
    held = [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("bits", [8, 7])
@pytest.mark.parametrize("made", [two_norms, convolved])
def test_weights_are_those_of_onnx_runtimes_quantizer(
    made: Callable[[], onnx.ModelProto], bits: int, tmp_path: Path
) -> None:
    """It would quantize them channel by channel in Python, with all of them in memory."""
    from onnxruntime.quantization import QDQQuantizer, QuantType
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData

    source = source_of(made(), {}, (), tmp_path)
    ranges = {layer.input.name: (-2.0, 3.0) for layer in source.layers}
    found = quantized(source, ranges, QuantizationRecipe("plain", weight_bits=bits))
    proto = onnx.shape_inference.infer_shapes(onnx.load(source.path))
    given = {name: (np.float32(low), np.float32(high)) for name, (low, high) in ranges.items()}
    theirs = QDQQuantizer(
        proto,
        per_channel=True,
        reduce_range=bits == 7,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=TensorsData(CalibrationMethod.MinMax, given),
        nodes_to_quantize=[layer.node for layer in source.layers],
        nodes_to_exclude=[],
        op_types_to_quantize=["MatMul", "Conv"],
        extra_options={
            "WeightSymmetric": True,
            "QuantizeBias": False,
            "OpTypesToExcludeOutputQuantization": ["MatMul", "Conv"],
        },
    ).quantize_model()
    for layer in source.layers:
        own, expected = _weight(found, layer.node), _weight(theirs, layer.node)
        assert own[0] == expected[0] == layer.channels
        for array, right in zip(own[1:], expected[1:], strict=True):
            assert array.dtype == right.dtype and np.array_equal(array, right)
    stored = {tensor.name for tensor in found.graph.initializer}
    assert not stored & {layer.weight for layer in source.layers}


def _weight(proto: onnx.ModelProto, layer: str) -> list[Any]:
    """Return the axis of the scales of a layer's weight, its integers, scales and zero points."""
    makers = {name: node for node in proto.graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    (node,) = (node for node in proto.graph.node if node.name == layer)
    wide = makers[node.input[1]]
    (axis,) = (attribute.i for attribute in wide.attribute if attribute.name == "axis")
    return [axis, *(numpy_helper.to_array(tensors[name]) for name in wide.input)]


def answer(model: Path | onnx.ModelProto) -> np.ndarray:
    given = model if isinstance(model, Path) else model.SerializeToString()
    return onnx_runner(onnx_session(given))(SAMPLES)["y"]


def test_weights_stay_in_the_data_file(source: QuantizationSource) -> None:
    assert [layer.node for layer in source.layers] == ["first", "second", "third"]
    assert source.path.stat().st_size < 4 * WIDTH**2
    np.testing.assert_allclose(answer(source.path), answer(two_norms()), atol=1e-5)
    with pytest.raises(SaccadeError, match="no layer that can be computed in int8"):
        source_of(two_norms(), {}, ("first", "second", "third"), source.path.parent)


def test_extremes_are_those_of_all_batches(source: QuantizationSource) -> None:
    seen = extremes_of(source.path, source.inputs, SAMPLES)
    proto = two_norms()
    proto.graph.output.append(onnx.ValueInfoProto(name="n"))
    values = onnx_runner(onnx_session(proto.SerializeToString()))(SAMPLES)["n"]
    np.testing.assert_allclose(seen["n"].low, values.min(0), rtol=1e-5)
    np.testing.assert_allclose(seen["n"].high, values.max(0), rtol=1e-5)
    assert seen["n"].ends == (seen["n"].low.min(), seen["n"].high.max())


def test_a_percentile_leaves_rare_outliers_out(source: QuantizationSource) -> None:
    whole = extremes_of(source.path, source.inputs, SAMPLES)["n"].ends
    ((low, high),) = percentiles_of(source.path, ["n"], SAMPLES, 90).values()
    assert whole[0] < 0.2 * whole[0] < low < 0 < high < 0.2 * whole[1] < whole[1]


def test_smoothing_moves_outliers_and_keeps_the_function(source: QuantizationSource) -> None:
    before = extremes_of(source.path, source.inputs, SAMPLES)
    smooth, promised = smoothed(source, before)
    np.testing.assert_allclose(answer(smooth.path), answer(source.path), rtol=1e-3, atol=1e-3)
    after = extremes_of(smooth.path, smooth.inputs, SAMPLES)
    for name in ("n", "m"):
        np.testing.assert_allclose(after[name].high, promised[name].high, rtol=1e-3)
    rest = np.delete(before["n"].magnitude, OUTLIER).max()
    assert before["n"].magnitude[OUTLIER] > 15 * rest
    rest = np.delete(after["n"].magnitude, OUTLIER).max()
    assert after["n"].magnitude[OUTLIER] < 6 * rest
    # Something else reads the second norm, so it must not change.
    np.testing.assert_array_equal(promised["m"].high, before["m"].high)


def test_each_recipe_is_closer_to_the_model_than_chance(source: QuantizationSource) -> None:
    float32 = answer(source.path)
    errors, bits = {}, {}
    recipes = (*RECIPES["cpu"], *RECIPES["gpu"], *recipes_for("cpu", ()))
    for recipe, proto in candidates(source, recipes, SAMPLES):
        values = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
        zeros = {
            int(values[node.input[2]])
            for node in proto.graph.node
            if node.op_type == "QuantizeLinear"
        }
        assert (zeros == {0}) is not recipe.unsigned
        integers = [value for value in values.values() if value.dtype == np.int8 and value.ndim > 1]
        bits[recipe.name] = max(int(np.abs(value.astype(int)).max()) for value in integers)
        assert len(integers) == (3 if not recipe.float_share else 2), recipe
        errors[recipe.name] = np.linalg.norm(answer(proto) - float32) / np.linalg.norm(float32)
        limit = max(quantized_ranges(proto).values())
        assert 1 < limit < 1000
    assert bits["unsigned"] == 127 and bits["unsigned-7bit"] == 64
    assert max(errors[name] for name in errors if "percentile" not in name) < 0.1
    assert errors["smooth"] < 0.7 * errors["unsigned"]
    assert errors["symmetric-smooth"] < 0.7 * errors["symmetric"]


def test_the_layer_with_the_largest_error_stays_float(source: QuantizationSource) -> None:
    ends = {
        name: each.ends for name, each in extremes_of(source.path, source.inputs, SAMPLES).items()
    }
    for node, name in (("third", "m"), ("first", "n")):
        low, high = ends[name]
        wrong = {**ends, name: (100 * low, 100 * high)}  # a scale that is much too coarse
        made = quantized(source, wrong, RECIPES["cpu"][0])
        worst = worst_layers(source, made, 0.1, SAMPLES)
        assert worst <= {"third"} if node == "third" else worst <= {"first", "second"}
        assert len(worst) == 1
    assert [layer.node for layer in source.without({"first"}).layers] == ["second", "third"]


@pytest.mark.parametrize("sets", [("AVX2",), ("AVX2", "AVX-512"), ()])
def test_weights_have_seven_bits_where_sums_saturate(sets: tuple[str, ...]) -> None:
    assert {recipe.weight_bits for recipe in recipes_for("cpu", sets)} == {7}
    assert {recipe.weight_bits for recipe in recipes_for("cpu", (*sets, "AVX-VNNI"))} == {8}
    assert {recipe.weight_bits for recipe in recipes_for("gpu", sets)} == {8}


def parity(cosine: float) -> Parity:
    limits = {"one_minus_cosine": 1e-2}
    figures = {"one_minus_cosine": cosine}
    return Parity(cosine <= 1e-2, figures, limits, (), 16, 8, (1,), 0.1)


COSINES = {"a": 0.3, "b": 0.02, "c": 0.001, "d": 0.0001}


def tried_with(speeds: dict[str, float] | None, least: float = 1.2) -> Any:
    asked: list[str] = []

    def graphs() -> Iterator[tuple[str, str]]:
        for name in COSINES:
            asked.append(name)
            yield name, name

    speed = None if speeds is None else speeds.__getitem__
    try:
        done = first_that_passes(
            "it-b1000-int8", graphs(), lambda name: parity(COSINES[name]), speed, least
        )
    except GateFailed as error:
        return str(error), asked
    return done, asked


def test_the_first_recipe_that_passes_and_pays_is_kept() -> None:
    (graph, figures, tried, ratio), asked = tried_with(dict.fromkeys("abcd", 1.5))
    assert (graph, ratio, asked) == ("c", 1.5, ["a", "b", "c"]) and figures.passed
    assert tried[0].recipe == "a" and "cosine distance is 0.3, at most 0.01" in tried[0].outcome
    assert tried[2] == TriedRecipe("c", "kept")


def test_without_a_speed_to_measure_the_gate_decides() -> None:
    (graph, _, _, ratio), _ = tried_with(None)
    assert graph == "c" and ratio is None


def test_a_recipe_that_is_too_slow_ends_the_search() -> None:
    message, asked = tried_with({"a": 1.3, "b": 1.19, "c": 9.0, "d": 9.0})
    assert asked == ["a", "b"]
    assert "a: cosine distance is 0.3" in message
    assert "b: 1.19 times as fast as fp32 here, at least 1.2 is required" in message
    assert "nothing was written" in message and "--int8-speedup" in message
    assert tried_with({"a": 1.3, "b": 1.19, "c": 1.19, "d": 9.0}, 1.19)[0][0] == "c"


def test_a_recipe_without_a_graph_is_one_that_failed() -> None:
    graphs = iter([("a", SaccadeError("too many islands.")), ("b", "b")])
    _, _, tried, _ = first_that_passes("v", graphs, lambda _: parity(0), None, 1)
    assert tried == (TriedRecipe("a", "too many islands."), TriedRecipe("b", "kept"))


def test_every_reason_is_in_the_message() -> None:
    failed = {"a": parity(0.5), "b": parity(0.4)}
    reasons = r"a: .* is 0\.5, .*; b: .* is 0\.4, .*--threshold one_minus_cosine LIMIT"
    with pytest.raises(GateFailed, match=reasons):
        first_that_passes("v", iter([("a", "a"), ("b", "b")]), failed.__getitem__, None, 1)


@pytest.mark.parametrize("seconds, batch", [(0.06, 8), (0.1, 5), (3.0, 1)])
def test_a_speed_is_a_ratio_of_interleaved_runs(
    monkeypatch: pytest.MonkeyPatch, seconds: float, batch: int
) -> None:
    clock, calls = [0.0], []

    def run(name: str, seconds: float) -> Any:
        def call(some: Any) -> dict[str, np.ndarray]:
            calls.append((name, len(some["x"])))
            clock[0] += seconds * len(some["x"])
            return {}

        return call

    monkeypatch.setattr(quantize, "perf_counter", lambda: clock[0])
    slow, fast = run("slow", seconds), run("fast", seconds / 1.5)
    assert speed_over(slow, fast, SAMPLES) == pytest.approx(1.5)
    assert calls[-10:] == [("slow", batch), ("fast", batch)] * 5


def exported(checkpoint: Path, out: Path, ratio: float, **options: Any) -> Any:
    options = {"budget": ("1",), "precision": ("int8",), **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "speed_over", lambda *_: ratio)
        return export(checkpoint, ExportOptions(out, **options), FEW_SAMPLES)


def test_the_manifest_says_which_recipe_and_what_was_tried(
    tiny_checkpoint: Path, tmp_path: Path, traced_before: None
) -> None:
    done = exported(tiny_checkpoint, tmp_path / "out", 1.7, threshold={"one_minus_cosine": 0.5})
    (manifest,) = done.manifests
    assert read_manifest(next((tmp_path / "out").glob("*.json"))) == manifest
    entry = manifest.quantization
    assert entry is not None and entry.target == "cpu" and entry.speedup == 1.7
    assert entry.tried == (TriedRecipe(entry.recipe, "kept"),)
    assert entry.recipe.startswith("unsigned") and entry.samples == quantize.CALIBRATION_SAMPLES
    assert "onnxruntime" in entry.runtime and "core" in entry.device
    proto = onnx.load(tmp_path / "out" / manifest.file.name)
    types = {tensor.data_type for tensor in proto.graph.initializer}
    assert {onnx.TensorProto.UINT8, onnx.TensorProto.INT8} <= types
    with pytest.raises(SaccadeError, match=r"quantized for a cpu .*--int8-for gpu"):
        build(tmp_path / "out", BuildOptions(engine="tensorrt-rtx", out=tmp_path / "engines"))


@pytest.mark.parametrize("for_gpu", [False, True])
def test_a_file_for_a_gpu_is_checked_without_the_integers_of_this_cpu(
    for_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without VNNI, a CPU adds two products in 16 bits, which saturates."""
    opened: list[bool] = []
    monkeypatch.setattr(gate, "onnx_session", lambda *_, optimized, **__: opened.append(optimized))
    monkeypatch.setattr(gate, "onnx_runner", lambda _: None)
    entry: Any = SimpleNamespace(precision="int8")
    file = FileEntry("int8.onnx", "", 0)
    for opener in gate.candidates_of(Path(), file, (), dict, entry, (), for_gpu=for_gpu):
        opener()
    assert opened == [not for_gpu]


def test_further_samples_are_compared_with_the_float32_graph_that_was_quantized(
    tiny_checkpoint: Path, tmp_path: Path, traced_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch model beside it would take twice the time, and more memory than all else."""
    folded, made = Reference.folded, []

    def counted(reference: Reference, budget: Any) -> Any:
        made.append(budget)
        return folded(reference, budget)

    monkeypatch.setattr(Reference, "folded", counted)
    monkeypatch.setattr(quantize, "speed_over", lambda *_: 1.7)
    options = ExportOptions(
        tmp_path / "out",
        budget=("1",),
        precision=("int8",),
        threshold={"one_minus_cosine": 0.5},
        gate="quick",
    )
    (manifest,) = export(tiny_checkpoint, options).manifests
    assert manifest.parity.score is not None
    assert len(made) == 1  # the one that was traced


def test_int8_that_does_not_pay_is_not_written(
    tiny_checkpoint: Path, tmp_path: Path, traced_before: None
) -> None:
    with pytest.raises(GateFailed, match=r"0\.90 times as fast as fp32 here, at least 1\.2"):
        exported(tiny_checkpoint, tmp_path / "out", 0.9)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"int8_for": "tpu"}, {"int8_speedup": -1.0}])
def test_wrong_options(options: dict[str, Any], tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match="--int8-"):
        export(tiny_checkpoint, ExportOptions(tmp_path / "out", **options), FEW_SAMPLES)
