# SPDX-License-Identifier: Apache-2.0
"""Finding and building the library: once, whole, and only from a place that is the user's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.core.errors import SaccadeError
from saccade.plugins.native import library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is built on Linux")

# Stands in for a compiler: notes that it ran and leaves a file where one is asked for.
COMPILER = """#!/bin/sh
echo run >> {log}
sleep 0.05
while [ "$1" != "-o" ]; do shift; done
echo made > "$2"
"""
BROKEN = """#!/bin/sh
echo no vectors >&2
exit 3
"""


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a stand-in compiler; the file has a line for each time it ran."""
    log = tmp_path / "runs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(script(tmp_path / "compiler", COMPILER.format(log=log))))
    monkeypatch.setattr(library, "PACKAGED", tmp_path / "packaged")
    return log


def count(log: Path) -> int:
    return len(log.read_text().splitlines())


def steps() -> int:
    return len(library.units(os.uname().machine)) + 1


def test_is_built_on_first_use_and_found_afterwards(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert library.built_library() is None
    path = library.onnxruntime_library()
    assert "building libsaccade_onnxruntime (once" in capsys.readouterr().err
    assert library.built_library() == library.onnxruntime_library() == path
    assert count(runs) == steps()
    assert capsys.readouterr().err == ""
    assert [folder.stat().st_mode & 0o777 for folder in (path.parent, path.parent.parent)] == [
        0o700,
        0o700,
    ]
    left = {each.name for each in path.parent.iterdir()}
    assert left == {library.NAME, library.RECORD, ".lock"}


def test_two_processes_build_once(runs: Path, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from saccade.plugins.native import library;"
        "library.PACKAGED = pathlib.Path(sys.argv[1]); print(library.onnxruntime_library())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "packaged")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {each.communicate(timeout=500)[0].strip() for each in both}
    assert said == {str(library.built_library())}
    assert count(runs) == steps()


def test_what_the_compiler_says_is_passed_on(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"{script(tmp_path / 'broken', BROKEN)} -q")
    with pytest.raises(
        SaccadeError, match=r"exited with 3.\n.*broken -q -std=c\+\+17.*\nno vectors"
    ):
        library.onnxruntime_library()
    assert library.built_library() is None
    assert [path.name for path in library.cached_folder().iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("asked", "words"), [("", "neither c++, g++ nor clang++"), ("c++-none -O", "CXX is 'c++-none")]
)
def test_no_compiler(runs: Path, monkeypatch: pytest.MonkeyPatch, asked: str, words: str) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", asked)
    with pytest.raises(SaccadeError) as refused:
        library.onnxruntime_library()
    assert words in str(refused.value)
    assert "Models run without the library too" in str(refused.value)


def test_another_system_is_told(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert library.built_library() is None
    with pytest.raises(SaccadeError, match="this system is darwin, expected linux"):
        library.onnxruntime_library()


@pytest.mark.parametrize("damage", ["made", "longer than it was"])
def test_a_damaged_file_is_not_loaded_but_replaced(runs: Path, damage: str) -> None:
    path = library.onnxruntime_library()
    whole = path.read_text()
    path.write_text(damage)
    assert library.built_library() is None
    assert library.onnxruntime_library().read_text() == whole
    assert count(runs) == 2 * steps()


@pytest.mark.parametrize("place", ["folder", "above", "file"])
def test_what_others_may_write_is_refused(runs: Path, place: str) -> None:
    path = library.onnxruntime_library()
    at = {"folder": path.parent, "above": path.parent.parent, "file": path}[place]
    at.chmod(0o777)
    with pytest.raises(SaccadeError, match=r"other users can write to it \(mode 777\)"):
        library.onnxruntime_library()
    with pytest.warns(RuntimeWarning, match="other users can write to it"):
        assert library.built_library() is None


def test_what_someone_else_owns_is_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.onnxruntime_library()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SaccadeError, match=f"its owner is user {os.getuid()}, not"):
        library.onnxruntime_library()
    with pytest.warns(RuntimeWarning, match="its owner is user"):
        assert library.built_library() is None


def test_a_link_is_refused(runs: Path, tmp_path: Path) -> None:
    folder = library.onnxruntime_library().parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SaccadeError, match="it is a link"):
        library.onnxruntime_library()


def test_a_packaged_library_comes_first(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.main(tmp_path / "packaged")
    built = count(runs)
    library.main(tmp_path / "packaged")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert library.built_library() == library.onnxruntime_library()
    assert library.onnxruntime_library().parent == tmp_path / "packaged"
    assert count(runs) == built
    # One of other sources is left alone.
    monkeypatch.setattr(library, "source_hash", lambda: "f" * 64)
    assert library.built_library() is None


def test_every_source_counts() -> None:
    names = {source.name for source in library.sources()}
    assert {"kernels.cpp", "kernel.hpp", "interface.cpp", "saccade_ops.h"} <= names
    assert {source.parent.name for source in library.sources()} >= {
        "native",
        "sparsemax",
        "svpn",
        "svpn_fast",
        "tvmax",
    }


def test_other_cpus_get_the_portable_kernels_only() -> None:
    kernels = [unit for unit in library.units("aarch64") if unit.source == "kernels.cpp"]
    assert [kernel.flags for kernel in kernels] == [("-DSACCADE_TARGET=baseline",)]
