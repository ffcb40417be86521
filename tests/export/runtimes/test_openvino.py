# SPDX-License-Identifier: Apache-2.0
"""OpenVINO runs the exported files of all families in fp32, bf16 and int8 as the gate checked them.

This compares answers. `tests/plugins/test_openvino.py` compares the bodies of the ops.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_artefacts as tiny
from family_folders import exported, family_folder
from folder_store import stored
from places import PACKAGE, package_files

from saccade.core.errors import MissingPackage, SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.graph import limits
from saccade.exporter.runtimes.openvino import runtime as graphs
from saccade.exporter.runtimes.openvino.runtime import OPENVINO
from saccade.exporter.runtimes.runtime import peers_of
from saccade.models.families import FAMILIES
from saccade.serving.repository.preflight.model_checks import differences
from saccade.serving.repository.stored_sample import samples


@pytest.fixture(scope="module")
def typed() -> ArtefactFolder:
    """Variants in fp32 and bf16: one with a custom op, one without."""
    folder = stored("sot-bf16", lambda place: exported("sot", place, ("fp32", "bf16")))
    return ArtefactFolder(folder / "folder")


def of(folder: ArtefactFolder, precision: str, setting: str = "class") -> Manifest:
    """The manifest of that precision; by default, of the variant without a custom op."""
    wanted = (precision, setting)
    return next(
        each
        for each in folder.manifests
        if (each.variant.precision, each.variant.setting) == wanted
    )


@pytest.fixture
def int8(tmp_path: Path) -> ArtefactFolder:
    """A model of two matrices, the first one in int8."""
    return ArtefactFolder(tiny.int8_artefacts(tmp_path / "int8"))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The properties with which OpenVINO compiled, in order."""
    openvino = graphs.openvino_module()
    kept, given = openvino.Core.compile_model, []

    def compile_model(self, graph, device, properties):
        given.append(properties)
        return kept(self, graph, device, properties)

    monkeypatch.setattr(openvino.Core, "compile_model", compile_model)
    return given


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "nac"])
def test_every_component_answers_as_in_onnxruntime(family: str) -> None:
    folder = ArtefactFolder(family_folder(family))
    expected = samples(folder)
    for manifest in folder.manifests:
        sample, run = expected[manifest.variant.name], OPENVINO.load(folder, manifest, None)
        assert sample.answers
        for count in (1, 3):  # any batch size
            rows = {name: np.repeat(array, count, axis=0) for name, array in sample.inputs.items()}
            answers = {name: array[-1:] for name, array in run(rows).items()}
            assert not [*differences(answers, sample.answers, manifest)], manifest.variant.name


def test_a_variant_is_computed_in_its_type(typed, int8, compiled) -> None:
    for folder in (typed, int8):
        expected = samples(folder)
        for manifest in folder.manifests:
            sample = expected[manifest.variant.name]
            assert sample.answers, "a bf16 file is also answered, in float32"
            answers = OPENVINO.load(folder, manifest, None, threads=2)(sample.inputs)
            assert not [*differences(answers, sample.answers, manifest)], manifest.variant.name
    hints = [properties["INFERENCE_PRECISION_HINT"] for properties in compiled]
    names = [each.variant.name for each in (*typed.manifests, *int8.manifests)]
    assert [name for name, hint in zip(names, hints, strict=True) if hint != "f32"] == [
        "sot-class-bf16"
    ]
    for properties in compiled:
        assert (properties["INFERENCE_NUM_THREADS"], properties["NUM_STREAMS"]) == (2, 1)
        assert properties["ENABLE_CPU_PINNING"] is False


def test_a_bf16_file_is_given_with_rounded_weights_in_float32(typed) -> None:
    manifest = of(typed, "bf16")
    path = typed.file(manifest)
    changed = onnx.load_from_string(graphs.changed_graph(path, manifest))
    half = onnx.TensorProto.BFLOAT16
    halves = {each.name for each in onnx.load(path).graph.initializer if each.data_type == half}
    wide = [each for each in changed.graph.initializer if each.name in halves]
    assert halves and len(wide) == len(halves)
    for tensor in wide:
        bits = onnx.numpy_helper.to_array(tensor).view(np.uint32)
        assert not (bits & 0xFFFF).any(), tensor.name
    assert [(prop.key, prop.value) for prop in changed.metadata_props] == [
        (graphs.SOURCE, manifest.file.sha256)
    ]


def test_the_body_of_an_op_keeps_its_types(typed) -> None:
    manifest = of(typed, "bf16", "exact")
    changed = onnx.load_from_string(graphs.changed_graph(typed.file(manifest), manifest))
    assert manifest.custom_ops and not graphs.computes_bf16(manifest)
    assert not changed.functions and {node.domain for node in changed.graph.node} <= {""}
    assert onnx.TensorProto.BFLOAT16 in {each.data_type for each in changed.graph.initializer}
    inlined = replace(manifest, custom_ops=(), inlined_ops=("SvPN",))
    assert not graphs.computes_bf16(inlined) and not graphs.is_changed(inlined)


def test_the_gate_also_runs_what_openvino_computes_differently(typed, int8, monkeypatch) -> None:
    assert "openvino" in peers_of(int8, int8.manifests[0])
    assert "openvino" not in peers_of(typed, of(typed, "fp32"))
    for here in (True, False):
        monkeypatch.setattr(graphs, "cpu_has_bf16", lambda here=here: here)
        assert ("openvino" in peers_of(typed, of(typed, "bf16"))) == here


def test_what_it_cannot_read_or_run_is_one_message(typed, tmp_path) -> None:
    manifest = of(typed, "fp32")
    broken = tmp_path / manifest.file.name
    broken.write_bytes(typed.file(manifest).read_bytes()[:-1000])
    with pytest.raises(SaccadeError, match=r"OpenVINO 20\d\d.* cannot load it ") as error:
        graphs.openvino_runner(broken, manifest)
    assert str(broken) in str(error.value)
    run = OPENVINO.load(typed, manifest, None)
    with pytest.raises(SaccadeError, match=r"OpenVINO failed on inputs \{'image': \(1, 9, 9, 3\)"):
        run({"image": np.zeros((1, 9, 9, 3), np.uint8)})


def test_a_changed_graph_beyond_one_file_is_refused(typed, monkeypatch) -> None:
    manifest = of(typed, "bf16")
    monkeypatch.setattr(limits, "FILE_BYTES", 2 * manifest.file.bytes - 1)
    with pytest.raises(SaccadeError, match=r"OpenVINO needs another form .*--runtime onnxruntime"):
        graphs.changed_graph(typed.file(manifest), manifest)


def test_without_the_package_the_extra_is_named(typed, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingPackage, match=r"\S+\[openvino\]"):
        OPENVINO.load(typed, of(typed, "fp32"), None)


def test_a_changed_file_is_not_opened(typed, tmp_path) -> None:
    copy = ArtefactFolder(shutil.copytree(typed.path, tmp_path / "copy"))
    manifest = of(copy, "fp32")
    with (copy.path / manifest.file.name).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(SaccadeError, match="was changed after its export"):
        OPENVINO.load(copy, manifest, None)


def test_the_runtime_is_a_folder_and_a_line() -> None:
    named = {
        path.relative_to(PACKAGE).parts[:3]
        for path in package_files()
        if re.search(r"runtimes\.openvino|openvino\.runtime", path.read_text())
    }
    assert named == {
        ("exporter", "runtimes", "runtime.py"),
        ("serving", "repository", "runtimes"),
    }  # fmt: skip
