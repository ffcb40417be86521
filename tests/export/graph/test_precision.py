# SPDX-License-Identifier: Apache-2.0
"""Narrower precisions: what is rounded, what stays float32, and that a wrong type is refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from folder_store import stored
from onnx import helper, numpy_helper
from quick_gate import FEW_SAMPLES
from rtx_builds import needs_rtx
from traced_graphs import traced_once

from saccade.core.errors import GateFailed, SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import read_manifest, write_manifest
from saccade.exporter.export import ExportedModel, ExportOptions, export
from saccade.exporter.gate.gate import verify
from saccade.exporter.gate.metrics import (
    FLOORS,
    exceeded,
    figures_of,
    ill_conditioned_rows,
    thresholds_of,
)
from saccade.exporter.graph.half_graph import activation_ranges, check_ranges, fold_casts
from saccade.exporter.graph.layer_types import check_types, float32_layers, matrix_types
from saccade.exporter.graph.samples import random_inputs
from saccade.exporter.graph.tracing import trace_component
from saccade.exporter.runtimes.half_products import HalfProducts, half_products
from saccade.exporter.runtimes.runners import half_runner, onnx_runner, onnx_session, torch_runner
from saccade.exporter.runtimes.tensorrt.build import BuildOptions, build
from saccade.models.catalogue import preset_of
from saccade.models.families import build as build_family
from saccade.models.interface import Component, TensorSpec

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
COMPONENT = Component("", (), (), dict)
READ_OUTS = {"nac": "read-out", "vqa": "head"}


@pytest.fixture(scope="module")
def typed(tiny_checkpoint: Path) -> ExportedModel:
    def make(place: Path) -> None:
        options = ExportOptions(place / "nac", budget=("1",), precision=PRECISIONS, int8_for="gpu")
        with traced_once():
            export(tiny_checkpoint, options, FEW_SAMPLES)

    folder = stored("typed", make) / "nac"
    return ExportedModel(folder, tuple(ArtefactFolder(folder).manifests))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_rounded_product_is_that_of_the_type(precision: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((5, 40), (40, 3)))
    with HalfProducts(precision, accumulate=False):
        native = a @ b
    with HalfProducts(precision, accumulate=True):
        rounded = a @ b
    assert native.dtype == rounded.dtype == torch.float32
    spacing = torch.finfo(HalfProducts(precision, accumulate=True).dtype).eps
    assert not torch.equal(rounded, a @ b)
    assert ((native - rounded).abs() <= 2 * spacing * rounded.abs().max()).all()


class OneProduct(torch.nn.Linear):
    """A layer as a model with one component."""

    def components(self) -> tuple[Component, ...]:
        """x to y."""
        spec = TensorSpec("x", "b 40", "float32")
        return (Component("", (spec,), ("y",), run=lambda x: {"y": self(x)}),)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_runner_of_half_precision_rounds_products_to_its_type(precision: str) -> None:
    model = OneProduct(40, 3)
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), HalfProducts(precision, accumulate=True):
        expected = model(x).numpy()
    actual = half_runner(model, "", ("y",), precision)({"x": x.numpy()})["y"]
    np.testing.assert_array_equal(actual, expected)
    exact = torch_runner(model)({"x": x.numpy()})["y"]
    assert 0 < np.abs(actual - exact).max() < 0.1


def test_a_number_beyond_the_type_is_infinite() -> None:
    a, b = torch.full((1, 4), 200.0), torch.full((4, 1), 200.0)
    for accumulate in (False, True):
        with HalfProducts("fp16", accumulate=accumulate):
            assert torch.isinf(a @ b).all()
        with HalfProducts("bf16", accumulate=accumulate):
            assert torch.isfinite(a @ b).all()


def test_read_outs_and_everything_but_products_stay_float32() -> None:
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(6, 6), "head": torch.nn.Linear(6, 2)})
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)) / 3
    with half_products(model, "fp16", accumulate=True):
        body, head, soft = model["body"](x), model["head"](x), x.softmax(-1)
        residual = x.clone().addmm_(x[:, :3], x)
    assert not torch.equal(body, model["body"](x))
    assert torch.equal(head, model["head"](x)) and torch.equal(soft, x.softmax(-1))
    assert not torch.equal(residual, x.clone().addmm_(x[:, :3], x))
    with HalfProducts("fp16", accumulate=True):
        assert not torch.equal(head, model["head"](x))


def test_attention_in_one_call_is_two_rounded_products() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 8, generator=generator) for _ in range(3))
    bias = torch.randn(7, 7, generator=generator)
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = attend(q, k, v, attn_mask=bias)
    with HalfProducts("fp16", accumulate=True):
        attended = attend(q, k, v, attn_mask=bias)
        weights = ((q / 8**0.5) @ k.mT + bias).softmax(-1)
        by_hand = weights @ v
    assert 0 < (attended - exact).abs().max() < 1e-2
    torch.testing.assert_close(attended, by_hand, rtol=0, atol=2e-3)
    with HalfProducts("fp16", accumulate=True) as mode:
        mode.leave()  # as inside a read-out
        assert torch.equal(attend(q, k, v, attn_mask=bias), exact)


@pytest.mark.parametrize("family, size", [("nac", "tiny"), ("vqa", "vqa-tiny")])
def test_a_float32_graph_tells_what_a_narrower_one_keeps_in_float32(family: str, size: str) -> None:
    model: Any = build_family(family, preset_of(family, size).to_dict()).eval()
    folded = model.at(model.budgets()[0]).fold().float()
    (component,) = folded.components()
    inputs = random_inputs(component, np.random.default_rng(0), 3)
    names = set[str]()
    graphs = [
        trace_component(folded, component, inputs, component.outputs, precision, {}, found)
        for precision, found in (("fp32", names), ("fp16", None))
    ]
    kinds = matrix_types(graphs[0])
    assert {name for name in kinds if name in names} == set(float32_layers(graphs[1]))
    assert {name.partition("/")[0] for name in names} >= {READ_OUTS[family]}


def test_a_read_out_that_raises_does_not_leave_the_next_call_in_float32() -> None:
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(6, 6), "head": torch.nn.Linear(6, 2)})
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)) / 3
    products = half_products(model, "fp16", accumulate=True)
    exact = model["head"](x)
    with products:
        rounded = model["body"](x)
    with products, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model["head"](x[:, :5])
    with products:
        assert torch.equal(model["body"](x), rounded)
        assert torch.equal(model["head"](x), exact)
    assert not torch.equal(model["body"](x), rounded)


def test_a_folder_holds_every_precision(typed: ExportedModel) -> None:
    by_precision = {manifest.variant.precision: manifest for manifest in typed.manifests}
    assert sorted(by_precision) == sorted(PRECISIONS)
    sizes = {name: report.file.bytes for name, report in by_precision.items()}
    assert sizes["fp16"] == pytest.approx(sizes["bf16"], rel=0.02) and sizes["fp16"] < sizes["fp32"]
    assert sizes["int8"] < sizes["fp32"]
    for precision, manifest in by_precision.items():
        proto = onnx.load(typed.folder / manifest.file.name)
        types = matrix_types(proto)
        narrow = {name for name, kind in types.items() if kind == precision}
        assert set(types) == narrow | set(manifest.float32_layers)
        assert any(name.startswith("propagators/") for name in narrow)
        if precision != "fp32":
            assert "head/Gemm_0" in manifest.float32_layers
            assert manifest.activation_ranges and min(manifest.activation_ranges.values()) > 0
        wide = {onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8}
        ends = (*proto.graph.input, *proto.graph.output)
        assert {end.type.tensor_type.elem_type for end in ends} <= wide
    assert by_precision["bf16"].opset == 22 and by_precision["fp16"].opset == 20
    assert verify(typed.folder, FEW_SAMPLES).passed


def test_a_component_without_half_precision_has_no_ranges(typed: ExportedModel) -> None:
    image = np.zeros((1, 8, 8, 1), np.uint8)
    assert (
        activation_ranges(onnx.load(typed.folder / "nac-b1000-fp32.onnx"), {"image": image}) == {}
    )


def test_integers_are_symmetric_and_biases_are_not_quantised(typed: ExportedModel) -> None:
    proto = onnx.load(typed.folder / "nac-b1000-int8.onnx")
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    linear = [
        node for node in proto.graph.node if "quantizeLinear" in node.op_type.replace("Q", "q")
    ]
    assert linear
    for node in linear:
        zero = values[node.input[2]]
        assert zero.dtype == np.int8 and not zero.any()
    weights = [value for value in values.values() if value.dtype == np.int8 and value.ndim == 2]
    scales = [values[node.input[1]] for node in linear if values.get(node.input[0]) is not None]
    assert weights and all(scale.size > 1 for scale in scales)


@needs_rtx
@pytest.mark.journey
def test_tensorrt_builds_each_of_them(typed: ExportedModel, tmp_path: Path) -> None:
    folder = shutil.copytree(typed.folder, tmp_path / "nac")
    engines = build(folder, BuildOptions(engine="tensorrt-rtx", out=tmp_path / "engines"))
    exported = {manifest.variant: manifest for manifest in typed.manifests}
    assert {manifest.variant for manifest in engines.manifests} == set(exported)
    for engine in engines.manifests:
        kept = len(exported[engine.variant].float32_layers)
        assert engine.layer_types[engine.variant.precision] > 0
        assert engine.layer_types.get("fp32", 0) >= kept


def test_scales_of_the_same_graph_are_the_same_again(
    typed: ExportedModel, tmp_path: Path, traced_before: None
) -> None:
    checkpoint = typed.folder / "nac.safetensors"
    options = ExportOptions(
        tmp_path / "again", name="nac", budget=("1",), precision=("int8",), int8_for="gpu"
    )
    again = {
        manifest.variant.name: manifest.file.sha256
        for manifest in export(checkpoint, options, FEW_SAMPLES).manifests
    }
    first = {manifest.variant.name: manifest.file.sha256 for manifest in typed.manifests}
    assert again == {name: first[name] for name in again}


def test_a_mistyped_file_is_refused(typed: ExportedModel, tmp_path: Path) -> None:
    folder = shutil.copytree(typed.folder, tmp_path / "nac")
    for path in folder.glob("*.manifest.json"):
        if "fp16" not in path.name:
            path.unlink()
            (folder / path.name.replace(".manifest.json", ".onnx")).unlink()
    manifest = read_manifest(folder / "nac-b1000-fp16.manifest.json")
    file = folder / manifest.file.name
    shutil.copyfile(typed.folder / "nac-b1000-fp32.onnx", file)
    entry = replace(manifest.file, sha256=sha256_of(file), bytes=file.stat().st_size)
    write_manifest(folder, replace(manifest, file=entry))
    (row,) = verify(folder).variants
    assert not row.passed and "float32 layers" in " ".join(row.problems)


def test_a_graph_of_another_type_is_named() -> None:
    types = {"trunk/MatMul_0": "fp32", "trunk/MatMul_1": "fp16", "head/Gemm_0": "fp32"}
    cost = dict.fromkeys(types, 10)
    with pytest.raises(SaccadeError, match=r"trunk/MatMul_0 is fp32.*--precision fp16"):
        check_types("it-b1000-fp16", "fp16", types, cost, ["head/Gemm_0"])
    with pytest.raises(SaccadeError, match="only 10 of 30 multiply-adds are fp16"):
        check_types("it-b1000-fp16", "fp16", types, cost, ["head/Gemm_0", "trunk/MatMul_0"])
    check_types("it-b1000-fp16", "fp16", types, {**cost, "trunk/MatMul_1": 90}, sorted(types))
    with pytest.raises(SaccadeError, match="only 90 of 1,110 multiply-adds"):
        cost |= {"trunk/MatMul_1": 90, "lstm/LSTM_0": 1000}
        check_types("it-b1000-fp16", "fp16", types, cost, sorted(types))


def test_an_overflowing_model_is_not_exported(
    typed: ExportedModel, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = onnx.load(typed.folder / "nac-b1000-fp16.onnx")
    (gain,) = (each for each in proto.graph.initializer if each.name.endswith("0.ffn.widen.gain"))
    large = numpy_helper.from_array(1e5 * numpy_helper.to_array(gain), gain.name)
    gain.CopyFrom(large)
    monkeypatch.setattr("saccade.exporter.graph.tracing.trace_component", lambda *_: proto)
    options = ExportOptions(tmp_path / "out", budget=("1",), precision=("fp16",))
    with pytest.raises(
        GateFailed, match=r"tensor propagators/.* reaches .* 16,384.*--precision bf16"
    ):
        export(tiny_checkpoint, options, FEW_SAMPLES)
    assert not (tmp_path / "out").exists()
    with pytest.raises(GateFailed, match="nan"):
        check_ranges("it", {"a": 1.0, "b": float("nan")})


def test_a_weight_is_stored_in_its_type_or_refused() -> None:
    def graph(largest: float) -> Any:
        nodes = [
            helper.make_node("Cast", ["w"], ["w16"], to=onnx.TensorProto.FLOAT16),
            helper.make_node("Cast", ["x"], ["x16"], to=onnx.TensorProto.FLOAT16),
            helper.make_node("MatMul", ["x16", "w16"], ["y"], name="MatMul_0"),
        ]
        kinds = (("x", onnx.TensorProto.FLOAT), ("y", onnx.TensorProto.FLOAT16))
        x, y = (helper.make_tensor_value_info(name, kind, ["b", 2]) for name, kind in kinds)
        w = numpy_helper.from_array(np.full((2, 2), largest, np.float32), "w")
        graph = helper.make_graph(nodes, "g", [x], [y], [w])
        opset = [helper.make_opsetid("", 20)]
        return helper.make_model(graph, opset_imports=opset, ir_version=10)

    proto = graph(3.0)
    fold_casts(proto)
    assert [node.op_type for node in proto.graph.node] == ["Cast", "MatMul"]
    (weight,) = proto.graph.initializer
    assert weight.data_type == onnx.TensorProto.FLOAT16 and weight.name == "w16"
    assert matrix_types(proto) == {"MatMul_0": "fp16"}
    answer = onnx_runner(onnx_session(proto.SerializeToString()))({"x": np.ones((1, 2), "float32")})
    np.testing.assert_array_equal(answer["y"], [[6, 6]])
    with pytest.raises(SaccadeError, match="weight w: has 1e\\+05"):
        fold_casts(graph(1e5))


def test_a_row_is_as_ill_conditioned_in_half_precision_as_roundings_are_larger() -> None:
    expected = {"embedding": np.ones((20, 4))}
    actual = {"embedding": np.ones((20, 4))}
    actual["embedding"][3] += 0.2
    own = {"embedding": np.full(20, 1e-7)}
    limits = thresholds_of("fp16", {})
    asked = (limits, "fp16", FLOORS["fp16"])
    assert not ill_conditioned_rows([[actual]], expected, own, *asked)["embedding"].any()
    own["embedding"][3] = 1e-5
    rows = ill_conditioned_rows([[actual]], expected, own, *asked)
    assert rows["embedding"].tolist() == [number == 3 for number in range(20)]
    figures = figures_of(expected, [[actual]], {}, {}, COMPONENT, FLOORS["fp16"], rows)
    assert figures["relative_error"] == 0 and figures["sensitive_rows"] == 0.05
    assert exceeded({**figures, "sensitive_rows": 0.2}, {"sensitive_rows": 0.1})


@pytest.mark.parametrize("given", [(), ("fp8",), ("fp16", "fp16")])
def test_precisions_that_are_none(given: tuple[str, ...], tiny_checkpoint: Path, tmp_path: Path):
    with pytest.raises(SaccadeError, match="--precision"):
        export(tiny_checkpoint, ExportOptions(tmp_path / "out", precision=given))
    assert not (tmp_path / "out").exists()
