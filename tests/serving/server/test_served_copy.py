# SPDX-License-Identifier: Apache-2.0
"""Served files are those that were hashed: no link is followed, and the server has its own copy."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny
from tiny_artefacts import FULL, MODEL, examine

from saccade.core.errors import SaccadeError
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.installation import Installation, Requirements
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.repository import Target
from saccade.serving.server import run_folder
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.log import ServerLog
from saccade.serving.server.process import ServerProcess, writable
from saccade.serving.server.run_folder import RunFolder, copy_repository

CODE = f"{MODEL}/1/model.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A good repository; copy it to change it."""
    place = tmp_path_factory.mktemp("served")
    deploy(tiny.artefacts(place / "artefacts"), RepositoryOptions(place / "repository"))
    return place / "repository"


@pytest.fixture
def repository(written, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "repository"))


def linked_folder(repository):
    """A package that the router would import instead of the real one."""
    evil = repository.parent / "evil" / "numpy"
    evil.mkdir(parents=True)
    (evil / "__init__.py").write_text("print('hello')")
    (repository / MODEL / "1" / "numpy").symlink_to(evil)


def linked_file(repository):
    path = repository / FULL / "labels.txt"
    path.rename(repository.parent / "labels.txt")
    path.symlink_to(repository.parent / "labels.txt")


def linked_inside(repository):
    path = repository / FULL / "labels.txt"
    path.unlink()
    path.symlink_to(Path("..") / MODEL / "labels.txt")


def dangling(repository):
    (repository / MODEL / "1" / "later.py").symlink_to(repository.parent / "nothing")


def pipe(repository):
    os.mkfifo(repository / MODEL / "1" / "pipe")


def linked_model(repository):
    (repository / FULL).rename(repository.parent / FULL)
    (repository / FULL).symlink_to(repository.parent / FULL)


def foreign_model(repository):
    """A folder that nobody listed: the server loads every folder that it finds."""
    shutil.copytree(repository / MODEL, repository.parent / "foreign")
    (repository / "foreign").symlink_to(repository.parent / "foreign")


LINKS = {
    "a model beside": (foreign_model, "is a link to .*/foreign"),
    "a folder": (linked_folder, "is a link to .*evil/numpy"),
    "a file": (linked_file, "is a link to .*labels.txt"),
    "a file inside": (linked_inside, "is a link to ../tiny/labels.txt"),
    "dangling": (dangling, "is a link to .*nothing"),
    "a model": (linked_model, f"is a link to .*{FULL}"),
    "a pipe": (pipe, "is neither a file nor a folder"),
}


@pytest.mark.parametrize("case", LINKS)
def test_a_link_is_refused_by_every_reader(repository, tmp_path, case):
    spoil, words = LINKS[case]
    spoil(repository)
    with pytest.raises(SaccadeError, match=words):
        read_repository(repository)
    with pytest.raises(SaccadeError, match=words):
        copy_repository(repository, tmp_path / "models")
    assert not [path for path in tmp_path.iterdir() if "models" in path.name]
    (files,) = (
        finding
        for finding in examine(repository, Target(bundled=False))
        if finding.check == "files"
    )
    assert files.verdict == "failed"
    assert any("link" in reason or "neither" in reason for reason in files.reasons), files.reasons


def test_a_repository_behind_a_link_is_one(repository, tmp_path):
    (tmp_path / "current").symlink_to(repository)
    read_repository(tmp_path / "current")
    copy_repository(tmp_path / "current", tmp_path / "models")
    assert (tmp_path / "models" / CODE).read_bytes() == (repository / CODE).read_bytes()


def test_what_is_served_is_a_copy_that_the_repository_cannot_change(repository, tmp_path):
    models, before = tmp_path / "models", (repository / CODE).read_bytes()
    copy_repository(repository, models)
    copied = {path.relative_to(models).as_posix() for path in models.rglob("*") if path.is_file()}
    assert copied == {
        path.relative_to(repository).as_posix()
        for path in repository.rglob("*")
        if path.is_file() and path.parent != repository
    }
    own = (models / CODE).lstat()
    assert own.st_nlink == 1 and own.st_ino != (repository / CODE).stat().st_ino
    with (repository / CODE).open("r+b") as file:  # in place, as a hard link would be changed
        file.write(b"import os")
    assert (models / CODE).read_bytes() == before
    copy_repository(repository, models)  # a server that is started again
    assert (models / CODE).read_bytes() == before


def test_a_restarted_server_runs_what_was_checked(repository, tmp_path, monkeypatch):
    """The process of a server as the supervisor starts it twice over one folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
    (tmp_path / "backends" / "onnxruntime" / "libtriton_onnxruntime.so").touch()
    idle = Path(shutil.which("true"))
    fake = Installation(idle, tmp_path / "backends", idle, (), bundled=False)
    before = (repository / CODE).read_bytes()
    with RunFolder() as folder:
        for _ in range(2):
            arguments = fake, repository, ServeOptions(), folder, ServerLog(None), Requirements()
            process = ServerProcess(*arguments, "copy-of-a-start")
            link = next(folder.path.glob(f"models*/{CODE}"))
            assert link.resolve() == process.copy / CODE and link.read_bytes() == before
            # A model is loaded again on a full disk, too: nothing is written for it.
            sign = link.parents[1] / "loaded-again"
            before_ns = sign.stat().st_mtime_ns
            process.load_again(sign.parent.name)
            assert sign.stat().st_mtime_ns > before_ns and sign.stat().st_size == 0
            process.stop(at_once=True)
            (repository / CODE).write_bytes(b"import os")


def test_a_file_that_changes_after_it_was_looked_at_is_not_served(
    repository, tmp_path, monkeypatch
):
    listed = run_folder.regular_files

    def then_change(folder):
        entries = listed(folder)
        (repository / CODE).write_bytes(b"import os")
        return entries

    monkeypatch.setattr(run_folder, "regular_files", then_change)
    with pytest.raises(SaccadeError, match=r"model\.py: was changed"):
        copy_repository(repository, tmp_path / "models")

    def then_link(folder):
        entries = listed(folder)
        (repository / CODE).unlink()
        (repository / CODE).symlink_to(sys.executable)
        return entries

    monkeypatch.setattr(run_folder, "regular_files", then_link)
    with pytest.raises(SaccadeError, match=r"model\.py: cannot be read"):
        copy_repository(repository, tmp_path / "models")
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


def test_no_room_for_the_copy_says_how_much_is_missing(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(SaccadeError, match=r"need .* more, but only 100 bytes are free.*TMPDIR"):
        with writable(tmp_path, "TMPDIR"):
            copy_repository(repository, tmp_path / "models")
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


@pytest.mark.parametrize("whole", [True, False])
def test_shared_blocks_need_no_room_and_are_held_to_the_hash(
    repository, tmp_path, monkeypatch, whole
):
    def clone(target, request, source):  # as a file system does that can
        assert request == 0x40049409
        data = os.pread(source, os.fstat(source).st_size, 0)
        os.write(target, data if whole else data[:-1] + b"?")

    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr("fcntl.ioctl", clone)
    if whole:
        copy_repository(repository, tmp_path / "models")
        assert (tmp_path / "models" / CODE).read_bytes() == (repository / CODE).read_bytes()
    else:
        with pytest.raises(SaccadeError, match="was changed"):
            copy_repository(repository, tmp_path / "models")
