# SPDX-License-Identifier: Apache-2.0
"""Half-made files and folders: what runs that were killed leave goes, what is in work stays."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from saccade.core import files, leftovers
from saccade.core.errors import SaccadeError
from saccade.core.files import (
    DOWNLOADED,
    new_folder,
    refuse_existing,
    write_atomically,
    write_together,
)
from saccade.core.leftovers import Partial, only_writer, remove_leftovers, temporary_folder

_KILLED = """
import os, signal, sys
from pathlib import Path
from saccade.core.files import new_folder
from saccade.core.leftovers import Partial, only_writer, temporary_folder
place = Path(sys.argv[1])
with Partial(place / "a.bin") as file, new_folder(place / "folder") as folder:
    with only_writer(place / "a.bin"), temporary_folder("test") as other:
        (folder / "half").write_bytes(b"half")
        (other / "half").write_bytes(b"half")
        print(len(list(place.iterdir())), flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Another process in the middle of its work in `tmp_path`."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "4\n"  # three half-made things, and the folder `tmp`
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def hidden(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.name.startswith((".", "saccade-")))


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_makes_is_not(other, tmp_path):
    before = hidden(tmp_path)
    assert len(before) == 4
    write_atomically(tmp_path / "b.bin", b"whole")
    with new_folder(tmp_path / "whole"), temporary_folder("test"):
        pass
    assert hidden(tmp_path) == before
    with pytest.raises(SaccadeError, match="another saccade process is writing it"):
        with only_writer(tmp_path / "a.bin", wait_s=0):
            pass
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.wait() == -signal.SIGKILL
    write_atomically(tmp_path / "b.bin", b"whole")
    with only_writer(tmp_path / "a.bin"), temporary_folder("test"):
        pass
    assert hidden(tmp_path) == []
    assert (tmp_path / "b.bin").read_bytes() == b"whole"


def test_hidden_files_of_others_stay(tmp_path):
    kept = [tmp_path / name for name in (".a.bin.x1y2z3a4", ".saccade-lock", "a.saccade-12345678")]
    for path in kept:
        path.write_bytes(b"")
    remove_leftovers(tmp_path / "a.bin")
    assert sorted(tmp_path.iterdir()) == sorted(kept)


@pytest.mark.parametrize("system", ["exchanges", "cannot exchange"])
def test_a_folder_is_replaced_in_one_step_or_comes_back(tmp_path, monkeypatch, system):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_bytes(b"")
    if system == "cannot exchange":

        def refuse(source, target, flags):
            raise OSError(errno.EINVAL, "no such flag")

        monkeypatch.setattr(files, "_renameat2", refuse)

    seen = []
    rename = Path.rename

    def watched(path, target):
        result = rename(path, target)
        seen.append(out.exists())
        return result

    monkeypatch.setattr(Path, "rename", watched)
    with new_folder(out, force=True) as folder:
        (folder / "new").write_bytes(b"")
    assert [path.name for path in out.iterdir()] == ["new"]
    assert hidden(tmp_path) == []
    assert all(seen) if system == "exchanges" else not all(seen)


def test_an_older_folder_that_was_set_aside_comes_back_with_the_next_run(tmp_path):
    aside = tmp_path / ".out.saccade-old"
    aside.mkdir()
    (aside / "old").write_bytes(b"older result")
    write_atomically(tmp_path / "else", b"")
    assert (tmp_path / "out" / "old").read_bytes() == b"older result"
    aside.mkdir()
    write_atomically(tmp_path / "else", b"")
    assert not aside.exists()  # for another one stands in its place


@pytest.mark.parametrize("content", [(), ("theirs",)])
def test_the_slower_of_two_is_refused(tmp_path, content):
    out = tmp_path / "out"
    with pytest.raises(SaccadeError, match="exists already"):
        with new_folder(out) as folder:
            (folder / "ours").write_bytes(b"")
            out.mkdir()
            for name in content:
                (out / name).write_bytes(b"")
    assert [path.name for path in out.iterdir()] == list(content)
    (tmp_path / "file").write_bytes(b"theirs")
    with pytest.raises(SaccadeError, match="exists already"):
        write_atomically(tmp_path / "file", b"ours", replace=False)
    assert (tmp_path / "file").read_bytes() == b"theirs"


def test_of_files_that_belong_together_none_appears_where_one_cannot(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", _full_at(2))
    with pytest.raises(SaccadeError, match="the disk is full"):
        write_together({tmp_path / "log": b"1", tmp_path / "result": b"2"})
    assert list(tmp_path.iterdir()) == []


def _full_at(number):
    calls = []

    def fsync(handle):
        calls.append(handle)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fsync


def test_no_room_in_a_folder_names_the_folder_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", _full_at(1))
    with pytest.raises(SaccadeError, match=r"out: cannot be written: the disk is full ") as raised:
        with new_folder(tmp_path / "out") as folder:
            write_atomically(folder / "file", b"1")
    assert ".saccade-" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_that_turns_up_locked_is_made_again(tmp_path, monkeypatch):
    opened = leftovers._opened

    def taken(path):
        monkeypatch.setattr(leftovers, "_opened", opened)
        remove_leftovers(path.with_name("a.bin"))  # as another run would, before the lock
        return opened(path)

    monkeypatch.setattr(leftovers, "_opened", taken)
    with Partial(tmp_path / "a.bin") as partial:
        assert partial.exists()


def test_a_temporary_place_is_found_without_writing_into_it(tmp_path, monkeypatch):
    """Python's own search leaves a file of a random name, where it is killed in it."""
    written = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", lambda *_: written.append(1))
    with temporary_folder("test") as place:
        assert place.parent == tmp_path
    assert not written
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with temporary_folder("test") as place:
        assert place.parent in (Path("/tmp"), Path("/var/tmp"), Path("/usr/tmp"))


@pytest.mark.parametrize("name", [".git", "preprocessor_config.json", "open_clip_config.json"])
def test_force_replaces_no_folder_of_somebody_else(tmp_path, name):
    """A typed --out may name the folder from which a checkpoint was converted."""
    place = tmp_path / "vit-base"
    place.mkdir()
    (place / name).touch()
    with pytest.raises(SaccadeError, match=f"contains {name}.*--force does not replace"):
        refuse_existing(place, force=True)
    (place / DOWNLOADED).touch()
    refuse_existing(place, force=True)  # it can be fetched again
