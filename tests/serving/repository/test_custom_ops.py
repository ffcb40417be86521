# SPDX-License-Identifier: Apache-2.0
"""Custom ops of a repository: by kernels unless nobody can build them, and it is always said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[cpu]'")

import tiny_artefacts as tiny
from support.serving.frontiers import frontier_entry, point
from support.serving.repositories import config_of, routes_of
from tiny_artefacts import FULL, HALF

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import read_frontier
from saccade.exporter.artefact.manifest import write_manifest
from saccade.exporter.gate.gate import runners_of
from saccade.exporter.runtimes.runners import onnx_session
from saccade.plugins.native import library as native
from saccade.serving.bench.figures import ops_text
from saccade.serving.commands.cli import run
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.options import RepositoryOptions

LIBRARY = "libsaccade_onnxruntime.so"


@pytest.fixture
def folder(folder):
    """Two variants, of which the full one's manifest names an op."""
    full, _ = ArtefactFolder(folder).manifests
    write_manifest(folder, replace(full, custom_ops=("Sparsemax",)))
    return folder


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A file in place of the library, which nobody has to compile."""
    path = tmp_path / "ops.so"
    path.write_bytes(b"kernels")
    monkeypatch.setattr(native, "onnxruntime_library", lambda: path)
    return path


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine on which the library is not built and cannot be."""

    def refuse() -> Path:
        raise SaccadeError("no C++ compiler is here. The function bodies run.")

    monkeypatch.setattr(native, "onnxruntime_library", refuse)
    native._say.cache_clear()


def named(repository):
    """The libraries that the configurations name, by model."""
    return {
        name: list(config_of(repository, name).model_operations.op_library_filename)
        for name in (FULL, HALF)
    }


def test_kernels_are_the_default_where_an_op_is_called(folder, library, out):
    deployment = deploy(folder, RepositoryOptions(out))
    # A bare name, that both servers find: one beside the model, the other by its loader.
    assert named(out) == {FULL: [LIBRARY], HALF: []}
    assert (out / FULL / "1" / LIBRARY).read_bytes() == b"kernels"
    assert deployment.ops == "kernels" and read_repository(out).ops == "kernels"
    assert json.loads((out / "saccade.json").read_text())["ops"] == "kernels"


def test_bodies_where_they_are_asked_for(folder, library, out):
    assert deploy(folder, RepositoryOptions(out, op_library=False)).ops == "bodies"
    assert named(out) == {FULL: [], HALF: []}
    assert read_repository(out).ops == "bodies"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_bodies_run_and_it_is_said_once(folder, tmp_path, capsys):
    for place in ("one", "two"):
        assert deploy(folder, RepositoryOptions(tmp_path / place)).ops == "bodies"
        assert named(tmp_path / place) == {FULL: [], HALF: []}
    assert capsys.readouterr().err.count("no C++ compiler is here") == 1


def test_nobody_builds_a_library_that_no_file_calls(tmp_path, monkeypatch, out):
    def refuse() -> Path:
        raise AssertionError("it was asked for")

    monkeypatch.setattr(native, "onnxruntime_library", refuse)
    folder = tiny.artefacts(tmp_path / "artefacts", checkpoint=False)
    assert deploy(folder, RepositoryOptions(out)).ops is None
    assert read_repository(out).ops is None


def test_a_description_of_an_older_release_says_nothing_and_is_read(folder, library, out):
    deploy(folder, RepositoryOptions(out))
    path = out / "saccade.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"ops": "kernel"}))
    with pytest.raises(SaccadeError, match="ops: found 'kernel', expected one of kernels, bodies"):
        read_repository(out)
    del content["ops"]
    path.write_text(json.dumps(content))
    assert read_repository(out).ops is None


def entry(folder, name, ops, speed):
    """Figures of a variant, its ops run so."""
    digest = tiny.sha256_of(folder / f"{name}.onnx")
    return frontier_entry(name, digest, inside=point(speed), device="one", ops=ops)


def test_kernels_are_not_routed_by_figures_of_bodies(folder, library, tmp_path, capsys):
    ArtefactFolder(folder).merge(
        [entry(folder, FULL, "bodies", 9.0), entry(folder, HALF, None, 90.0)]
    )
    deployment = deploy(folder, RepositoryOptions(tmp_path / "kernels"))
    assert deployment.unmeasured == (FULL,)
    assert "custom ops run by bodies, but the repository runs them by kernels" in (
        capsys.readouterr().err
    )
    assert deploy(folder, RepositoryOptions(tmp_path / "bodies", op_library=False)).unmeasured == ()
    assert not capsys.readouterr().err
    # Both stand in the file, and what ran is part of which entry it is.
    ArtefactFolder(folder).merge([entry(folder, FULL, "kernels", 99.0)])
    entries = read_frontier(folder / "frontier.json").entries
    assert {(e.variant, e.ops) for e in entries} == {
        (FULL, "bodies"), (FULL, "kernels"), (HALF, None)
    }  # fmt: skip
    assert deploy(folder, RepositoryOptions(tmp_path / "again")).unmeasured == ()
    assert not capsys.readouterr().err
    for place, speed in (("again", 99.0), ("bodies", 9.0)):
        assert routes_of(tmp_path / place)["variants"][0]["inferences_per_second"] == speed
    with pytest.raises(SaccadeError, match="ops: found 'both'"):
        entry(folder, FULL, "both", 1.0)


def test_the_gate_asks_the_kernels_that_can_be_built(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(native, "onnxruntime_library", lambda: asked.append(1) or 1 / 0)
    assert len(runners_of(onnx_session, ())) == 1 and not asked
    with pytest.raises(ZeroDivisionError):
        runners_of(onnx_session, ("Sparsemax",))


def test_a_report_says_which_ran():
    assert ops_text({"variants": [{"ops": "kernels"}, {"ops": None}]}) == "custom ops by kernels"
    assert ops_text({"variants": [{"ops": None}, {}]}) == ""


def test_who_asks_for_kernels_gets_no_bodies(folder, no_compiler, out, capsys):
    assert run(["repository", str(folder), "--out", str(out), "--op-library"]) == 2
    assert "--op-library: ONNX Runtime has no kernels" in capsys.readouterr().err
    assert not out.exists()
    assert run(["repository", str(folder), "--out", str(out)]) == 0
    assert "Custom ops are run by bodies." in capsys.readouterr().out


def test_scripts_may_still_ask_for_the_default(folder, library, tmp_path, capsys, out):
    command = ["repository", str(folder), "--out", str(tmp_path / "repository")]
    assert run([*command, "--op-library", "--no-op-library"]) == 2
    assert "expected at most one" in capsys.readouterr().err
    assert run([*command, "--op-library"]) == 0
    assert "Custom ops are run by kernels." in capsys.readouterr().out
    assert run([*command, "--force", "--no-op-library"]) == 0
    assert "Custom ops are run by bodies." in capsys.readouterr().out
