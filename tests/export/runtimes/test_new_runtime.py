# SPDX-License-Identifier: Apache-2.0
"""A runtime that saccade has never seen: one file, one line of the registry, and every verb."""

import json
import os
import re
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from fake_runtime import FOLDERS
from PIL import Image
from places import ROOT, TESTS, package_files
from quick_gate import FEW_SAMPLES
from tiny_artefacts import rehash

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import read_frontier
from saccade.exporter.gate import gate
from saccade.exporter.runtimes import runtime
from saccade.exporter.runtimes.runtime import BuildOptions, build
from saccade.serving.bench.bench import bench
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.commands.doctor import doctor
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.installation import requirements_of
from saccade.serving.repository.model_config import parse_config
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.verb import preflight

LINE = {"fake": "fake_runtime:FAKE"}
# What a child process of preflight does not inherit: its registry has the line, too.
_SITE = f"""
import sys
from importlib import import_module
sys.path.insert(0, {str(TESTS)!r})
for package, folder in {FOLDERS!r}.items():
    import_module(package).__path__.append(folder)
from saccade.exporter.runtimes import runtime
runtime.RUNTIMES.update({LINE!r})
"""


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folders, and the one line."""
    for package, folder in FOLDERS.items():
        monkeypatch.setattr(f"{package}.__path__", [*import_module(package).__path__, folder])
    for name, place in LINE.items():
        monkeypatch.setitem(runtime.RUNTIMES, name, place)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """Two variants, to be changed."""
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "nac"))
    for manifest in ArtefactFolder(copy).manifests[2:]:
        for path in copy.glob(f"{manifest.variant.name}.*"):
            path.unlink()
    return copy


def verified(folder: Path) -> bool:
    """By the gate, which has tests of its own: few samples do here."""
    return gate.verify(folder, FEW_SAMPLES).passed


@pytest.mark.usefixtures("_registered")
def test_it_is_built_verified_measured_deployed_and_preflighted(folder, tmp_path):
    full, half = (manifest.variant.name for manifest in ArtefactFolder(folder).manifests)
    out = tmp_path / "repository"
    with pytest.raises(SaccadeError, match="Build it with"):
        deploy(folder, RepositoryOptions(out, runtime="fake"))

    built = build(folder, BuildOptions(engine="fake"))
    assert [file["name"] for file in built.files()] == sorted([f"{full}.fake", f"{half}.fake"])
    assert verified(folder)
    place = folder / "engines" / "fake"
    right = (place / f"{half}.fake").read_bytes()
    shutil.copyfile(place / f"{full}.fake", place / f"{half}.fake")
    assert not verified(folder)
    (place / f"{half}.fake").write_bytes(right)

    images = np.random.default_rng(0).integers(0, 256, (400, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=images, labels=np.arange(400) % 10)
    options = BenchOptions(
        tmp_path / "report", str(tmp_path / "data.npz"), seconds=0.02, rounds=1, runtime="fake"
    )
    with pytest.raises(SaccadeError, match="--no-server"):
        bench(folder, options)
    object.__setattr__(options, "server", False)
    report = bench(folder, options)
    assert report.full["machine"]["runtime"] == "fake 1.0 CPU"
    entries = read_frontier(folder / "frontier.json").entries
    assert {(entry.variant, entry.runtime) for entry in entries} == {
        (full, "fake 1.0 CPU"), (half, "fake 1.0 CPU")
    }  # fmt: skip

    deployment = deploy(folder, RepositoryOptions(out, runtime="fake"))
    assert (deployment.runtime, deployment.unmeasured) == ("fake", ())
    config = parse_config((out / full / "config.pbtxt").read_text())
    assert (config.backend, config.default_model_filename) == ("fake", "model.fake")
    assert json.loads((out / "saccade.json").read_text())["runtime"] == "fake"
    assert requirements_of(out).arguments[0] == "--backend-config=fake,turn=round"
    # Figures of another runtime are not its own.
    assert deploy(folder, RepositoryOptions(tmp_path / "onnx")).unmeasured == (full, half)

    (tmp_path / "images").mkdir()
    Image.fromarray(images[0, :, :, 0]).save(tmp_path / "images" / "one.png")
    job = BulkOptions(str(tmp_path / "images"), str(tmp_path / "bulk"), runtime="fake", workers="1")
    assert bulk(folder, job).answers == 1

    checks = preflight(out)
    assert checks.passed, checks.failed
    assert ("answer", half, "passed") in {(e.check, e.model, e.verdict) for e in checks.findings}
    shutil.copyfile(out / full / "1" / "model.fake", out / half / "1" / "model.fake")
    rehash(out)
    failed = [(finding.check, finding.model) for finding in preflight(out).failed]
    assert failed == [("answer", half)]


@pytest.mark.usefixtures("_registered")
def test_its_refusals_and_its_needs(folder, tmp_path):
    with pytest.raises(SaccadeError, match="the fake has none"):
        RepositoryOptions(tmp_path / "out", runtime="fake", instances="gpu")
    assert "fake" in doctor().uses()
    with pytest.raises(SaccadeError, match=r"nothing to build\. Expected one of: .*fake"):
        build(folder, BuildOptions(engine="onnxruntime"))


def test_contributing_says_how_many_files():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(r"## Add a runtime: one file and one line\n(.+?)\n## ", text, re.DOTALL)
    assert section
    named = re.findall(r"`([\w/]+\.py)`", section[1])
    assert "tests/fake_runtime.py" in named
    for name in named:
        assert (ROOT / name).is_file(), name
    # The proof needs no other edit: nothing of saccade has heard of it.
    for path in package_files():
        assert "fake_runtime" not in path.read_text(), path
