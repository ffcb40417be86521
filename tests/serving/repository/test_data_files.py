# SPDX-License-Identifier: Apache-2.0
"""Variants with a data file: every command knows it, and what is wrong with it is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_artefacts
import tiny_families
from external_data import small_limits, with_data_files
from rtx_builds import needs_rtx
from tiny_artefacts import FULL, HALF, artefacts

from saccade.core.errors import SaccadeError
from saccade.core.files import copy_file, sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import SUFFIX
from saccade.exporter.gate.bisect import departure
from saccade.exporter.gate.gate import verify
from saccade.exporter.graph.samples import GateSizes
from saccade.exporter.runtimes.runners import onnx_session
from saccade.exporter.runtimes.tensorrt.build import BuildOptions, build
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.client.client import Client
from saccade.serving.commands.inspection import inspect
from saccade.serving.local.artefact import load_artefact
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.verb import preflight
from saccade.serving.server.server import ServeOptions, Server

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 1), dtype=np.uint8)
DATA = f"{FULL}.onnx.data"
FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return with_data_files(artefacts(tmp_path_factory.mktemp("data") / "folder", checkpoint=False))


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "folder"))


@pytest.fixture(scope="module")
def expected():
    """The answers of the same models in one file."""
    data = tiny_artefacts.onnx_model(0).SerializeToString()
    session = onnx_session(data)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"image": IMAGES}), strict=True))


def test_an_export_beyond_the_limit_passes_the_gate_and_verify(tmp_path):
    with small_limits(one_file_bytes=20_000):
        exported = tiny_families.exported("sot", tmp_path, ("fp32", "fp16"))
    manifests = ArtefactFolder(exported).manifests
    assert {manifest.variant.precision for manifest in manifests} == {"fp32", "fp16"}
    for manifest in manifests:
        assert manifest.file.data and manifest.file.data.bytes > manifest.file.bytes / 2
    report = verify(exported, GateSizes(4, 2, (1, 2)), progress=None)
    assert report.passed, report.to_text()


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def of_another_model(path: Path) -> None:
    shutil.copy(path.with_name(f"{HALF}.onnx.data"), path)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def without_its_manifest(path: Path) -> None:
    path.with_name(f"{FULL}{SUFFIX}").unlink()
    path.with_name(f"{FULL}.onnx").unlink()


WRONG: dict[Callable[[Path], None], str] = {
    changed: "The file was changed after its export. Write it again",
    cut: "The file was changed after its export. Write it again",
    of_another_model: "The file was changed after its export. Write it again",
    linked: f"{DATA}: is a link, expected the file itself",
    Path.unlink: f"{DATA}: missing, but its manifest exists",
    without_its_manifest: f"{DATA}: has no manifest. Remove it",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_wrong_data_file_is_refused_before_anything_opens_it(
    change, folder, tmp_path, monkeypatch
):
    change(folder / DATA)
    monkeypatch.setattr("saccade.exporter.graph.trial.Worker", None)
    with pytest.raises(SaccadeError) as refused:
        deploy(folder, RepositoryOptions(out=tmp_path / "out"))
    assert WRONG[change] in str(refused.value)
    with pytest.raises(SaccadeError) as refused:
        load_artefact(folder).infer({"image": IMAGES})
    assert WRONG[change] in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_data_file_is_hashed_again_only_if_it_may_have_changed(folder, monkeypatch):
    hashed: list[str] = []
    monkeypatch.setattr("saccade.exporter.artefact.folder._TICK_NS", 0)
    monkeypatch.setattr(
        "saccade.exporter.artefact.folder.sha256_of",
        lambda path: hashed.append(path.name) or sha256_of(path),
    )
    artefact = ArtefactFolder(folder)
    for _ in range(2):
        artefact.check_files()
    assert sorted(hashed) == sorted(
        f"{name}.onnx{suffix}" for name in (FULL, HALF) for suffix in ("", ".data")
    )
    changed(folder / DATA)
    with pytest.raises(SaccadeError, match="was changed after its export"):
        artefact.check_files()


def test_a_process_predicts_and_a_job_writes(folder, tmp_path, expected):
    with load_artefact(folder) as model:
        answers = model.infer({"image": IMAGES})
    np.testing.assert_array_equal(answers["embedding"], expected["embedding"])
    rows = tmp_path / "rows.npz"
    np.savez(rows, image=IMAGES)
    bulk(folder, BulkOptions(str(rows), str(tmp_path / "out"), top=3, workers="1"))
    assert (tmp_path / "out" / "answers").is_dir()


def test_bisect_and_inspect_read_it(folder):
    artefact = ArtefactFolder(folder)
    manifest = next(one for one in artefact.manifests if one.variant.name == FULL)
    found = departure(artefact, manifest, artefact.manifests, {"image": IMAGES})
    assert not found.departs and found.compared >= 4
    sizes = sum((folder / name).stat().st_size for name in (f"{FULL}.onnx", DATA))
    assert inspect(folder / f"{FULL}{SUFFIX}").facts["bytes"] == sizes


def test_a_repository_has_it_under_its_own_name_and_a_server_answers(
    folder, tmp_path, expected, needs_server
):
    repository = tmp_path / "repository"
    deploy(folder, RepositoryOptions(out=repository))
    copy = repository / FULL / "1" / DATA
    assert sha256_of(copy) == sha256_of(folder / DATA)
    assert copy.stat().st_ino != (folder / DATA).stat().st_ino  # a change there stays there
    report = preflight(repository)
    assert not report.failed, report.to_text()
    with Server(repository, ServeOptions(**FREE_PORTS)) as server:
        with Client(server.url, server.model) as client:
            answers = client.infer({"image": IMAGES})
    np.testing.assert_allclose(answers["embedding"], expected["embedding"], rtol=1e-6)
    changed(copy)
    failed = {(finding.check, finding.model): finding for finding in preflight(repository).failed}
    (message,) = failed["model", FULL].reasons
    assert message.startswith(f"{DATA} has the SHA-256 ")
    with pytest.raises(SaccadeError, match="was changed after it was written"):
        Server(repository, ServeOptions(**FREE_PORTS)).__enter__()


def test_a_full_disk_is_seen_before_a_copy(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    monkeypatch.setattr("saccade.core.files._clone", lambda *_: False)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(3 * 2**20)
    with pytest.raises(OSError, match="the models need 3 MiB more, but only 1 MiB are free"):
        copy_file(tmp_path / "large", tmp_path / "copy")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(SaccadeError, match="the disk is full") as refused:
        deploy(folder, RepositoryOptions(out=tmp_path / "out"))
    assert "more, but only 0 bytes are free" in str(refused.value)
    assert not (tmp_path / "out").exists()


@needs_rtx
def test_an_engine_is_built_from_both_files(folder, tmp_path):
    options = BuildOptions(engine="tensorrt-rtx", variant=(FULL,), out=tmp_path / "data")
    (engine,) = build(folder, options).manifests
    whole = artefacts(tmp_path / "whole", checkpoint=False)
    options = BuildOptions(engine="tensorrt-rtx", variant=(FULL,), out=tmp_path / "one")
    (same,) = build(whole, options).manifests
    assert engine.layer_types == same.layer_types == {"fp32": 2}
