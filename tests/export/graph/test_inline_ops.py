# SPDX-License-Identifier: Apache-2.0
"""`export --inline-ops`: no custom op, no function, the same answers, and the manifest says so."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from family_folders import exported, family_folder
from folder_store import stored
from one_node import one_node_model
from ops_cases import CASES

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import FileEntry, read_manifest
from saccade.exporter.gate.manifest_checks import contradictions
from saccade.exporter.gate.metrics import WHOLE, relative_error, tensor_limit
from saccade.exporter.gate.reference import Reference
from saccade.exporter.graph.half_graph import widened_session
from saccade.exporter.graph.precision import inlined
from saccade.models.checkpoint import load
from saccade.plugins.onnx_model import all_nodes
from saccade.plugins.ops import OPS
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.model_config import parse_config
from saccade.serving.repository.options import RepositoryOptions


@pytest.fixture(scope="module")
def folder() -> Path:
    """A tiny SoT: its body of svPN holds a loop and a matrix product."""

    def make(place: Path) -> None:
        exported("sot", place, ("fp32", "fp16"), budget=("exact",), inline_ops=True)

    return stored("inlined", make) / "folder"


def plain(model: bytes) -> onnxruntime.InferenceSession:
    """A session without the library of kernels."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(model, options)


def test_the_files_are_standard_onnx_and_their_manifests_say_so(folder: Path) -> None:
    manifests = ArtefactFolder(folder).manifests
    assert len(manifests) == 2
    for manifest in manifests:
        proto = onnx.load(folder / manifest.file.name)
        assert manifest.custom_ops == ()
        assert manifest.inlined_ops == ("SvPN",)
        assert not proto.functions
        assert {opset.domain for opset in proto.opset_import} == {""}
        nodes = list(all_nodes(proto.graph))
        assert {node.domain for node in nodes} == {""}
        assert len({node.name for node in nodes}) == len(nodes)
        assert not any(node.doc_string or node.metadata_props for node in nodes)


def test_they_answer_as_the_files_with_functions(folder: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    whole = family_folder("sot") / "sot-exact-fp32.onnx"
    expected = plain(whole.read_bytes()).run(None, {"image": image})
    actual = plain((folder / whole.name).read_bytes()).run(None, {"image": image})
    half = (folder / "sot-exact-fp16.onnx").read_bytes()
    path = folder / "sot-exact-fp16.onnx"
    wide = widened_session(path, FileEntry(path.name, sha256_of(path), len(half)))
    for session, precision in ((plain(half), "fp16"), (wide, "fp32")):
        for one, other in zip(session.run(None, {"image": image}), expected, strict=True):
            assert relative_error(one, other, WHOLE) <= tensor_limit(precision)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=1e-6)


def test_verify_sees_a_manifest_that_says_otherwise(folder: Path) -> None:
    reference = Reference(load(folder / "sot.safetensors"))
    with_functions = family_folder("sot")
    for manifest in ArtefactFolder(folder).manifests:
        budget = reference.budget(manifest.variant)
        asked = reference.checkpoint, reference.runtime_metadata(budget), budget
        assert contradictions(folder / manifest.file.name, manifest, *asked) == ()
        if manifest.variant.name == "sot-exact-fp32":
            other = with_functions / manifest.file.name
            assert any(
                "custom ops in the manifest: found ()" in contradiction
                for contradiction in contradictions(other, manifest, *asked)
            )


def test_a_repository_takes_them_without_a_library(folder: Path, tmp_path: Path) -> None:
    deploy(folder, RepositoryOptions(tmp_path / "repository"))
    text = (tmp_path / "repository" / "sot-exact-fp32" / "config.pbtxt").read_text()
    assert not parse_config(text).model_operations.op_library_filename


def test_a_manifest_names_its_inlined_ops(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "sot-exact-fp32.manifest.json").read_text())
    assert content.pop("inlined_ops") == ["SvPN"]
    without = tmp_path / "sot-exact-fp32.manifest.json"
    without.write_text(json.dumps(content))
    with pytest.raises(SaccadeError, match="inlined_ops"):
        read_manifest(without)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_op_is_written_out(name: str, dtype: str) -> None:
    """The attributes of the node are in the constants of the body."""
    compared = 0
    for case in CASES[name].values():
        if not case.attributes and name not in ("Sparsemax",):
            continue
        proto = one_node_model(OPS[name], dtype, case.attributes)
        flat = inlined(proto)
        assert not flat.functions and "saccade" not in str(flat.opset_import)
        feeds = dict(zip((port.name for port in OPS[name].inputs), case.arrays(dtype), strict=True))
        answers = (plain(model.SerializeToString()).run(None, feeds) for model in (proto, flat))
        for one, other in zip(*answers, strict=True):
            np.testing.assert_array_equal(one, other)
        compared += 1
        if compared == 3:
            return
