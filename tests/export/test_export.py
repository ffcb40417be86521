# SPDX-License-Identifier: Apache-2.0
"""Export: what is in the folder, what is in a file, and what is refused before any work."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from external_data import with_data_files
from family_folders import family_folder
from places import TESTS
from quick_gate import FEW_SAMPLES
from tiny import tiny_nac
from tiny_families import CONFIGS

from saccade.core.errors import GateFailed, MissingPackage, SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest, write_manifest
from saccade.exporter.export import export
from saccade.exporter.export_options import ExportOptions
from saccade.exporter.graph.cost import cost_of
from saccade.exporter.runtimes.runners import onnx_session
from saccade.models.checkpoint import load
from saccade.models.families import build
from saccade.models.interface import component_named

NAMES = ["nac-b1000-fp32", "nac-b0500-fp32", "nac-b0250-fp32", "nac-b0125-fp32"]


def test_a_path_may_be_text() -> None:
    options = ExportOptions(out="somewhere", slots="slots.json")  # type: ignore[arg-type]
    assert (options.out, options.slots) == (Path("somewhere"), Path("slots.json"))
    assert ExportOptions(out=Path("somewhere")).slots is None


def test_folder(tiny_folder: Path, tiny_checkpoint: Path) -> None:
    files = {f"{name}{suffix}" for name in NAMES for suffix in (".onnx", ".manifest.json")}
    assert {path.name for path in tiny_folder.iterdir()} == {*files, "nac.safetensors"}
    assert (tiny_folder / "nac.safetensors").read_bytes() == tiny_checkpoint.read_bytes()
    manifests = ArtefactFolder(tiny_folder).manifests
    checkpoint = load(tiny_checkpoint)
    assert [manifest.variant.name for manifest in manifests] == NAMES
    assert [manifest.variant.kept for manifest in manifests] == [16, 8, 4, 2]
    for manifest in manifests:
        assert manifest.parent.sha256 == checkpoint.sha256
        assert (manifest.labels, manifest.preprocessing) == (
            checkpoint.labels,
            checkpoint.preprocessing,
        )
        assert manifest.parity.passed and manifest.parity.real_inputs >= 256
        assert manifest.parity.overridden == ()


@pytest.mark.parametrize("name", NAMES)
def test_file_is_clean(name: str, tiny_folder: Path) -> None:
    data = (tiny_folder / f"{name}.onnx").read_bytes()
    proto = onnx.load_from_string(data)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version == 10
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 20)]
    graph = proto.graph
    described = [
        (
            value.name,
            [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim],
        )
        for value in (*graph.input, *graph.output)
    ]
    assert described == [
        ("image", ["b", 8, 8, 1]),
        ("logits", ["b", 10]),
        ("probabilities", ["b", 10]),
        ("embedding", ["b", 32]),
    ]
    assert {node.op_type for node in graph.node if "image" in node.input} == {"Cast"}
    for each in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        assert not each.doc_string and not each.metadata_props
    assert not graph.value_info and not proto.functions
    assert all(re.fullmatch(r"[a-z-]+/[A-Za-z0-9]+_\d+", node.name) for node in graph.node)
    for trace in (str(Path.home()), str(Path.cwd()), sys.prefix, "site-packages", ".py", "torch"):
        assert trace.encode() not in data
    contents = [(tensor.data_type, *tensor.dims, tensor.raw_data) for tensor in graph.initializer]
    assert len(contents) == len(set(contents))


def test_the_gate_uses_the_users_images(tmp_path: Path) -> None:
    checkpoint = tiny_nac(tmp_path / "tiny.safetensors", propagator_layers=1, modules=4)
    images = checkpoint.calibration["image"][:20] // 2
    np.savez(tmp_path / "mine.npz", images=images)
    options = ExportOptions(tmp_path / "out", budget=(1,), calibrate_on=str(tmp_path / "mine.npz"))
    (manifest,) = export(checkpoint.path, options, FEW_SAMPLES).manifests
    parent = ArtefactFolder(tmp_path / "out").parent
    assert parent.sha256 == manifest.parent.sha256 != checkpoint.sha256
    assert parent.card["recalibrated_from_sha256"] == checkpoint.sha256
    assert {row.tobytes() for row in parent.calibration["image"]} == {
        row.tobytes() for row in images
    }
    assert "labels" not in parent.calibration


@pytest.mark.parametrize("external", [False, True], ids=["one file", "with a data file"])
def test_a_part_that_no_budget_changes_is_traced_and_checked_once(
    external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Path(shutil.copytree(family_folder("slot-attention"), tmp_path / "stored"))
    ready = ArtefactFolder(with_data_files(stored) if external else stored)
    checked: list[tuple[str, str]] = []

    def made(folder: Path, variant: Any, component: Any, *_: Any) -> Iterator[Manifest]:
        role, setting = component.role, variant.budget.label
        checked.append((role, setting))
        for own in ready.manifests:
            if (own.variant.role, own.variant.setting) == (role, setting):
                for file in own.file.files:
                    shutil.copyfile(stored / file.name, folder / file.name)
                write_manifest(folder, own)
                yield own

    monkeypatch.setattr("saccade.exporter.export.export_component", made)
    options = ExportOptions(tmp_path / "out", name="slot-attention", budget=("t2", "t1"))
    export(ready.parent, options, FEW_SAMPLES)
    again = [("decode", "t1")] if external else []  # the name of the data file is in the file
    assert checked == [("", "t2"), ("decode", "t2"), ("", "t1"), *again]
    folder = ArtefactFolder(tmp_path / "out")
    decoders = {own.variant.setting: own for own in folder.manifests if own.variant.role}
    assert decoders == {own.variant.setting: own for own in ready.manifests if own.variant.role}
    for own in decoders.values():
        assert folder.file(own).read_bytes() == ready.file(own).read_bytes()


def test_a_part_that_no_budget_changes_is_the_same_function() -> None:
    """Such a part is only checked at the first budget."""
    import torch

    model = build("slot-attention", CONFIGS["slot-attention"]).eval()
    first, *others = [model.at(budget) for budget in model.budgets()]
    part = component_named(first, "decode")
    assert part.every_budget and not component_named(first, "").every_budget and others
    inputs = part.random(np.random.default_rng(0), 3)
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    for other in others:
        same = component_named(other, "decode").run(**given)
        for name, answer in part.run(**given).items():
            assert torch.equal(answer, same[name])


@pytest.mark.journey
def test_same_bytes_in_another_process(tmp_path: Path) -> None:
    """Of the family that is traced the fastest; test_fixed_order.py looks at a NAC's constants."""
    folder = family_folder("sot")
    code = (
        "import sys; from pathlib import Path; import saccade\n"
        "from quick_gate import FEW_SAMPLES\n"
        "options = saccade.ExportOptions(Path(sys.argv[2]), budget=('class',))\n"
        "saccade.export(sys.argv[1], options, FEW_SAMPLES)\n"
    )
    command = [sys.executable, "-c", code, str(folder / "sot.safetensors"), str(tmp_path / "again")]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # the exporter's own warnings are not the caller's
    name = "sot-class-fp32"
    places = (tmp_path / "again", folder)
    graphs = {(place / f"{name}.onnx").read_bytes() for place in places}
    assert len(graphs) == 1
    again, before = (json.loads((place / f"{name}.manifest.json").read_bytes()) for place in places)
    assert again["parity"].pop("seconds") > 0 < before["parity"].pop("seconds")
    assert again == before


def test_failing_gate_leaves_everything_as_it_was(
    tiny_checkpoint: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = onnx.load(tiny_folder / f"{NAMES[2]}.onnx")
    monkeypatch.setattr("saccade.exporter.graph.tracing.trace_component", lambda *arguments: wrong)
    out = tmp_path / "nac"
    with pytest.raises(GateFailed, match=r"nac-b0125-fp32: .* relative error is") as failed:
        export(tiny_checkpoint, ExportOptions(out, budget=(0.25, 0.125)), FEW_SAMPLES)
    assert failed.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "precious").write_text("kept")
    with pytest.raises(GateFailed):
        export(tiny_checkpoint, ExportOptions(out, budget=(0.125,), force=True), FEW_SAMPLES)
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["nac", "precious"]


@pytest.mark.journey  # tests of the NAC compare its parts, and trace one with two inputs
def test_conditional_on_its_image(tiny_nac: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = tiny_nac(tmp_path / "nac.safetensors", conditional=True, modules=8)
    options = ExportOptions(tmp_path / "out", budget=(0.5,))
    assert export(checkpoint, options, FEW_SAMPLES).report.passed


def test_an_override_and_a_name(tiny_checkpoint: Path, traced_before: None, tmp_path: Path) -> None:
    path = Path(shutil.copy(tiny_checkpoint, tmp_path / "My_NAC.safetensors"))
    out = tmp_path / "out"
    out.mkdir()
    options = ExportOptions(
        out, name="nac-c", budget=(0.5,), threshold={"score_points": 5}, force=True
    )
    exported = export(path, options, FEW_SAMPLES)
    (manifest,) = ArtefactFolder(out).manifests
    assert exported.manifests == (manifest,)
    assert manifest.variant.name == "nac-c-b0500-fp32"
    assert manifest.parity.overridden == ("score_points",)
    assert manifest.parity.thresholds["score_points"] == 5
    assert json.dumps(exported.to_dict()) and exported.report.passed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "budget zero": ({"budget": (0.0,)}, "budget 0 is out of range"),
    "budget not a number": ({"budget": (math.nan,)}, "--budget: .*found nan, expected a finite"),
    "budget twice": ({"budget": (0.5, 0.5)}, "Leave one out"),
    "no module": ({"budget": (1, 0.02)}, "keeps none of 16 modules"),
    "name": ({"name": "NAC_1"}, "--name"),
    "threshold unknown": ({"threshold": {"error": 1.0}}, "error', expected one of relative_error"),
    "threshold negative": ({"threshold": {"relative_error": -1.0}}, "at least 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    with pytest.raises(SaccadeError, match=message):
        export(tiny_checkpoint, ExportOptions(tmp_path / "out", **options))
    assert list(tmp_path.iterdir()) == []


def test_refuses_an_existing_folder_before_it_reads_anything(tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match="--force"):
        export(tmp_path / "absent.safetensors", ExportOptions(tmp_path))


def test_refuses_a_checkpoint_it_cannot_prove(
    tiny_nac: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    few = tiny_nac(tmp_path / "few.safetensors", images=7)
    with pytest.raises(SaccadeError, match="7 calibration samples, expected at least 8"):
        export(few, ExportOptions(out))
    with pytest.raises(SaccadeError, match=r"'Few 1' cannot name a model.*--name"):
        export(few.path.rename(tmp_path / "Few 1.safetensors"), ExportOptions(out))
    changed = tiny_nac(tmp_path / "nac.safetensors")
    tiny_nac(tmp_path / "nac.safetensors", seed=1)
    with pytest.raises(SaccadeError, match="when it was loaded"):
        export(changed, ExportOptions(out))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingPackage, match=r"pip install '\S+\[cpu\]'"):
        export(changed, ExportOptions(out))
    assert not out.exists() and not list(tmp_path.glob(".out*"))


def test_cost_by_part(tiny_folder: Path) -> None:
    """Counted by hand from the folded algebra: U modules, N tokens, width d, R read-outs."""
    d, ffn, n, r = 32, 48, 16, 2
    for manifest in ArtefactFolder(tiny_folder).manifests:
        u = manifest.variant.kept
        assert manifest.cost.multiply_adds.by_part == {
            "tokenizer": n * 4 * d,
            "read-in": 2 * u * n * d + 2 * u * d * d + 2 * u * d * ffn,
            "propagators": 4 * u * d * d + 2 * u * u * d + 2 * u * d * ffn,
            "read-out": 2 * r * u * d + 2 * r * d * d + 2 * r * d * ffn + r * d + r * d,
            "head": 10 * d,
        }


def test_cost_of_each_operator() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 20]>
    g (float[b, 3, 8, 8] x) => (float[b, 4] y)
    <float[5, 3, 3, 3] w = {}, float[5, 7] m = {}, int64[2] two = {0, 5}, float[7, 4] e = {}>
    {
      c = Conv <pads = [0, 0, 0, 0]> (x, w)
      p = GlobalMaxPool (c)
      q = Reshape (p, two)
      g1 = Gemm <transB = 0> (q, m)
      y = Einsum <equation = "bi,ij->bj"> (g1, e)
    }
    """
    rng = iter(range(1, 1000))
    proto = onnx.parser.parse_model(text.replace("{}", "{0}"))
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.ClearField("float_data")
            tensor.float_data.extend(float(next(rng)) for _ in range(math.prod(tensor.dims)))
    for node, part in zip(proto.graph.node, ("a", "a", "a", "b", "c"), strict=True):
        node.name = f"{part}/{node.op_type}"
    samples = {"x": np.zeros((2, 3, 8, 8), dtype=np.float32)}
    cost = cost_of(proto, parameters=1, samples=samples)
    assert cost.multiply_adds.by_part == {"a": 5 * 6 * 6 * 27, "b": 5 * 7, "c": 7 * 4}
    assert cost.multiply_adds.total == 5 * 6 * 6 * 27 + 35 + 28
    # Widest moment: the image and the convolution's output; the reshape adds nothing later.
    assert cost.peak_activation_bytes == 4 * (3 * 8 * 8 + 5 * 6 * 6)


def test_widened_int8_weights_are_no_activations() -> None:
    proto = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 20]>
    g (float[b, 2] x) => (float[b, 3] y)
    <int8[2, 3] w = {1, 2, 3, 4, 5, 6}, float s = {0.5}, int8 z = {0}>
    {
      q = QuantizeLinear (x, s, z)
      wide = DequantizeLinear (w, s, z)
      d = DequantizeLinear (q, s, z)
      y = MatMul (d, wide)
    }
    """)
    cost = cost_of(proto, parameters=1, samples={"x": np.zeros((1, 2), np.float32)})
    assert cost.peak_activation_bytes == 4 * (2 + 3)  # of the product: one factor, and the result


def test_session_takes_one_thread_and_does_not_spin(tiny_folder: Path, tmp_path: Path) -> None:
    options = onnx_session(tiny_folder / f"{NAMES[0]}.onnx").get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(SaccadeError, match=r"bad\.onnx: ONNX Runtime .* cannot load it"):
        onnx_session(tmp_path / "bad.onnx")


def test_an_epsilon_of_1e_8_stays_in_the_graph() -> None:
    import torch

    from saccade.exporter.graph.tracing import trace_module

    class Share(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x.sum(-1, keepdim=True) + 1e-8)

    tiny = np.full((3, 4), 1e-9, np.float32)
    proto = trace_module(Share(), {"x": torch.from_numpy(tiny)}, ("share",))
    (answers,) = onnx_session(proto.SerializeToString()).run(None, {"x": tiny})
    np.testing.assert_allclose(answers, 1e-9 / 1.4e-8, rtol=1e-5)


def test_the_exporters_table_is_read_once_and_kept_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from torch.onnx._internal.exporter import _registration

    from saccade.exporter.graph import tracing

    registry, read = _registration.ONNXRegistry, []
    known = registry.from_torchlib()
    monkeypatch.setattr(tracing, "_TABLE", cache(lambda **_: read.append(1) or known))
    before = {target: list(found) for target, found in known.functions.items()}
    for _ in range(2):
        tracing.trace_module(torch.nn.Identity(), {"x": torch.ones(3, 4)}, ("x",))
    assert read == [1] and known.functions == before
    assert registry.from_torchlib() is not known
