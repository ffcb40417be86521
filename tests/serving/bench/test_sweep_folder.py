# SPDX-License-Identifier: Apache-2.0
"""A sweep's folder after a process was killed in it: begun anew, gone on with, or refused."""

import pytest

from saccade.core.errors import SaccadeError
from saccade.serving.bench.sweep import state
from saccade.serving.bench.sweep.state import open_repository

IDENTITY = {"checkpoint": "a"}


def test_killed_at_its_first_step_it_is_begun_again(tmp_path):
    for name in (".lock", ".sweep.json.saccade-abcd1234"):
        (tmp_path / name).write_bytes(b"")
    with open_repository(tmp_path, IDENTITY, force=False):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "sweep.json"]


def test_a_folder_with_hidden_files_of_others_is_no_sweep(tmp_path):
    (tmp_path / ".git").mkdir()
    with pytest.raises(SaccadeError, match="is not a sweep"):
        with open_repository(tmp_path, IDENTITY, force=False):
            pass
    assert (tmp_path / ".git").exists()


def test_half_of_an_emptied_sweep_is_none(tmp_path, monkeypatch):
    with open_repository(tmp_path, IDENTITY, force=False):
        pass
    for name in ("points/a/export", "points/b/export", "a-first"):
        (tmp_path / name).mkdir(parents=True)

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(state, "_remove", killed)
        with open_repository(tmp_path, IDENTITY, force=True):
            pass
    with pytest.raises(SaccadeError, match="--force"):
        with open_repository(tmp_path, IDENTITY, force=False):
            pass
    with open_repository(tmp_path, IDENTITY, force=True):
        assert not (tmp_path / "points").exists()


def test_halves_are_removed_at_the_end_and_by_the_next_however_deep_they_lie(tmp_path):
    places = ("artefacts/.x.partial", "points/a/export/.x.partial", "points/b/.export.half/x")
    halves = [tmp_path / name for name in places]
    for within in (True, False):
        with open_repository(tmp_path, IDENTITY, force=False):
            assert not any(half.exists() for half in halves)
            if within:
                write_all(halves)
        assert not any(half.exists() for half in halves)
        write_all(halves)


def write_all(halves):
    for half in halves:
        half.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(b"half")
