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
from saccade.exporter.artefact.manifest import Manifest, write_manifest
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.gate.gate import verify
from saccade.exporter.graph.limits import check_graph, parse_graph
from saccade.exporter.graph.model_file import write_model
from saccade.exporter.graph.trial import tried
from saccade.exporter.runtimes.tensorrt.build import BuildOptions, build
from saccade.plugins.ops import OPS
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

SMALL = Limits(memory_bytes=2 * 2**30, cpu_s=2)


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
    with pytest.raises(SaccadeError, match="the exported graph: has loops"):
        write_model(hostile_graphs.looping(), {}, tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


def test_constants_are_found_where_they_stand() -> None:
    # The number of turns of an inner loop is a name of the graph around it, unless it is hidden.
    check_graph(hostile_graphs.looping(100, 2), "two loops")
    with pytest.raises(SaccadeError, match="loops that run"):
        check_graph(hostile_graphs.looping(4_000, 2), "two loops")
    hidden = hostile_graphs.looping(4_000, 2)
    (outer,) = (node for node in hidden.graph.node if node.op_type == "Loop")
    outer.attribute[0].g.input[0].name = "trips"
    check_graph(hidden, "a loop whose turns are what the one around it counts")


def put(folder: Path, name: str, model: onnx.ModelProto) -> Manifest:
    """Give a variant another file, and a manifest that fits it."""
    (manifest,) = (
        manifest for manifest in ArtefactFolder(folder).manifests if manifest.variant.name == name
    )
    data = hostile_graphs.write(folder / manifest.file.name, model)
    digest = hashlib.sha256(data).hexdigest()
    changed = replace(manifest, file=replace(manifest.file, sha256=digest, bytes=len(data)))
    write_manifest(folder, changed)
    return changed


def test_worker_ends_for_what_cannot_be_counted_and_the_next_file_is_tried(tmp_path: Path) -> None:
    folder = artefacts(tmp_path / "folder", checkpoint=False)
    first, second = (manifest.variant.name for manifest in ArtefactFolder(folder).manifests)
    manifests = [
        put(folder, first, hostile_graphs.read_trips()),
        put(folder, second, hostile_graphs.filled()),
    ]
    third = onnx_model(seed=7).SerializeToString()
    (folder / "third.onnx").write_bytes(third)
    entry = replace(manifests[0].file, name="third.onnx", sha256=hashlib.sha256(third).hexdigest())
    wrong = tried(ArtefactFolder(folder), [*manifests, replace(manifests[0], file=entry)], SMALL)
    assert set(wrong) == {manifest.file.name for manifest in manifests}
    assert "more than 2 s of CPU time" in wrong[f"{first}.onnx"]
    assert "more memory" in wrong[f"{second}.onnx"]


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
}


@pytest.mark.parametrize("verb", VERBS)
def test_verb_refuses_and_writes_nothing(verb: str, tmp_path: Path) -> None:
    if verb == "build":
        pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    folder = artefacts(tmp_path / "folder", checkpoint=False)
    put(folder, ArtefactFolder(folder).manifests[0].variant.name, hostile_graphs.doubling())
    with pytest.raises(SaccadeError, match="268435461 nodes with its functions"):
        VERBS[verb](folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gate_reports_the_file_and_measures_the_others(tiny_folder: Path, tmp_path: Path) -> None:
    folder = copytree(tiny_folder, tmp_path / "folder")
    manifests = ArtefactFolder(folder).manifests
    for manifest in manifests[2:]:
        (folder / manifest.file.name).unlink()
        (folder / f"{manifest.variant.name}.manifest.json").unlink()
    put(folder, manifests[0].variant.name, hostile_graphs.doubling())
    report = verify(folder)
    hostile, honest = report.variants
    assert "268435461 nodes" in hostile.problems[0] and honest.passed
