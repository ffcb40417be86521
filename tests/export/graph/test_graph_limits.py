# SPDX-License-Identifier: Apache-2.0
"""A hostile ONNX file ends no command: it is refused with a reason, before and while it is opened.

Without the limits `repository` did not end for a file of 3 KB, and not by SIGTERM either: the
loader runs in a library that listens to nobody.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import hostile_graphs
import onnx
import pytest
from one_node import one_node_model
from tiny_artefacts import artefacts, onnx_model

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN
from saccade.core.worker import Limits
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import FileEntry, Manifest, write_manifest
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.gate.gate import verify
from saccade.exporter.graph.limits import check_graph, parse_graph
from saccade.exporter.graph.model_file import write_model
from saccade.exporter.graph.trial import tried
from saccade.exporter.runtimes.tensorrt.build import BuildOptions, build
from saccade.plugins.ops import OPS
from saccade.serving.local.artefact import load_artefact
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

SMALL = Limits(memory_bytes=2 * 2**30, cpu_s=6)  # a start with onnx takes 2 s


@pytest.mark.parametrize("name", hostile_graphs.HOSTILE)
def test_graph_beyond_a_limit_is_refused_in_words(name: str) -> None:
    make, said = hostile_graphs.HOSTILE[name]
    with pytest.raises(SaccadeError) as caught:
        parse_graph(make().SerializeToString(), "model.onnx")
    message = str(caught.value)
    assert message.startswith("model.onnx: ") and said in message
    assert AGAIN in message and len(message) < 400 and message.isprintable()


@pytest.mark.parametrize("op", OPS)
def test_ops_with_their_bodies_are_within_the_limits(op: str) -> None:
    check_graph(one_node_model(OPS[op]), op)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff" * 64, b'{"json": 1}'])
def test_what_is_no_graph_is_refused_or_empty(data: bytes) -> None:
    try:
        assert not parse_graph(data, "model.onnx").graph.node
    except SaccadeError as error:
        assert "not a complete ONNX model" in str(error)


def test_what_no_command_would_read_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match="the exported graph: has a name of"):
        write_model(hostile_graphs.long_name(), {}, tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


def put(folder: Path, name: str, model: onnx.ModelProto, ops: tuple[str, ...] = ()) -> Manifest:
    """Give a variant another file, and a manifest that fits it."""
    (manifest,) = (
        manifest for manifest in ArtefactFolder(folder).manifests if manifest.variant.name == name
    )
    changed = replace(written(folder, manifest, manifest.file.name, model), custom_ops=ops)
    write_manifest(folder, changed)
    return changed


def written(folder: Path, manifest: Manifest, name: str, model: onnx.ModelProto) -> Manifest:
    data = hostile_graphs.write(folder / name, model)
    digest = hashlib.sha256(data).hexdigest()
    return replace(manifest, file=FileEntry(name, digest, len(data)))


def test_worker_ends_for_what_costs_too_much_and_the_next_file_is_tried(tmp_path: Path) -> None:
    folder = artefacts(tmp_path / "folder", checkpoint=False)
    manifest = ArtefactFolder(folder).manifests[0]
    models = [*(make() for make, _ in hostile_graphs.COSTLY.values()), onnx_model(seed=7)]
    manifests = [written(folder, manifest, f"{i}.onnx", model) for i, model in enumerate(models)]
    wrong = tried(ArtefactFolder(folder), manifests, SMALL)
    assert len(wrong) == len(models) - 1
    for number, (_, said) in enumerate(hostile_graphs.COSTLY.values()):
        assert said in wrong[f"{number}.onnx"]


def test_without_onnx_files_are_loaded_in_the_worker_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnx.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = artefacts(tmp_path / "folder", checkpoint=False)
    honest, other = ArtefactFolder(folder).manifests
    hostile = put(folder, other.variant.name, hostile_graphs.doubling())
    wrong = tried(ArtefactFolder(folder), [honest, hostile], SMALL)
    assert set(wrong) == {hostile.file.name} and "CPU time" in wrong[hostile.file.name]


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "repository": lambda folder, out: deploy(folder, RepositoryOptions(out)),
    "build": lambda folder, out: build(folder, BuildOptions(engine="tensorrt-rtx", out=out)),
    "evaluate, bench and sweep": lambda folder, out: evaluate(folder, EvaluateOptions()),
    "predict, openvino": lambda folder, out: load_artefact(folder, runtime="openvino"),
}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.exporter.graph.trial.limits_for", lambda file_bytes: SMALL)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("verb", VERBS)
def test_verb_refuses_and_writes_nothing(verb: str, tmp_path: Path) -> None:
    if verb == "build":
        pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    folder = artefacts(tmp_path / "folder", checkpoint=False)
    name = ArtefactFolder(folder).manifests[0].variant.name
    # OpenVINO reads a file with custom ops in another form, which saccade makes from it.
    put(folder, name, hostile_graphs.doubling(), ops=(next(iter(OPS)),))
    with pytest.raises(SaccadeError, match="more than 6 s of CPU time"):
        VERBS[verb](folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("small_limits")
def test_gate_reports_the_file_and_measures_the_others(tiny_folder: Path, tmp_path: Path) -> None:
    folder = copytree(tiny_folder, tmp_path / "folder")
    manifests = ArtefactFolder(folder).manifests
    for manifest in manifests[2:]:
        (folder / manifest.file.name).unlink()
        (folder / f"{manifest.variant.name}.manifest.json").unlink()
    put(folder, manifests[0].variant.name, hostile_graphs.doubling())
    report = verify(folder)
    hostile, honest = report.variants
    assert "more than 6 s of CPU time" in hostile.problems[0] and honest.passed
