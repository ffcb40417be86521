# SPDX-License-Identifier: Apache-2.0
"""The store of exported folders: made once, never half, made again when it was changed."""

import fcntl
from pathlib import Path

import folder_store
import pytest


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ask a store of its own, as a new process would; counts how often the maker ran."""
    monkeypatch.setattr(folder_store, "STORE", tmp_path / "store")
    calls = []

    def make(place: Path) -> None:
        calls.append(place)
        (place / "sub").mkdir()
        (place / "sub" / "file").write_text("made")

    def ask(maker=make) -> Path:
        monkeypatch.setattr(folder_store, "_CHECKED", set())
        folder_store._of_these_sources.cache_clear()
        return folder_store.stored("thing", maker)

    yield ask, calls
    folder_store._of_these_sources.cache_clear()


def test_it_is_made_once_and_again_where_it_was_changed(made):
    ask, calls = made
    folder = ask()
    assert ask() == folder and len(calls) == 1
    for spoil in (
        lambda: (folder / "sub" / "file").write_text("changed"),
        lambda: (folder / "more").write_text(""),
        lambda: (folder / "sub" / "file").unlink(),
    ):
        count = len(calls)
        spoil()
        assert ask() == folder and len(calls) == count + 1
        assert [path.name for path in folder.rglob("*")] == ["sub", "file"]


def test_what_fails_leaves_nothing_that_is_taken_for_whole(made):
    ask, calls = made

    def broken(place: Path) -> None:
        (place / "half").write_text("")
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        ask(broken)
    folder = ask()
    assert len(calls) == 1
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_other_sources_have_another_folder_and_few_of_them_stay(made, monkeypatch):
    ask, calls = made
    folders = []
    for number in range(6):
        monkeypatch.setattr(folder_store, "source_hash", lambda number=number: f"{number}" * 20)
        if number == 1:
            held = (folders[0].parent / "in-use").open("a")  # a process that still runs
            fcntl.flock(held, fcntl.LOCK_SH)
        folder_store._HELD.clear()
        folders.append(ask())
    held.close()
    assert len(calls) == 6
    assert [path.exists() for path in folders] == [True, False, True, True, True, True]


def test_a_graph_is_traced_once_for_the_same_model_and_request(made, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
    from traced_graphs import traced_once

    from saccade.exporter.graph import tracing
    from saccade.models.interface import Component, TensorSpec

    traced = []
    monkeypatch.setattr(folder_store, "_CHECKED", set())
    monkeypatch.setattr(
        tracing, "trace_component", lambda *asked: traced.append(asked) or onnx.ModelProto()
    )
    model = torch.nn.Linear(3, 2)
    component = Component("", (TensorSpec("x", "b 3", "float32"),), ("y",), run=lambda x: x)
    samples = {"x": torch.zeros(3, 3).numpy()}
    with traced_once():
        for changed in (
            lambda: None,
            lambda: model.weight.data.add_(1),
            lambda: model.register_buffer("more", torch.ones(1), persistent=False),
            lambda: setattr(model, "config", "another"),
        ):
            changed()
            for _ in range(2):
                tracing.trace_component(model, component, samples, ("y",))
        tracing.trace_component(model, component, samples, ("y", "z"))
        tracing.trace_component(model, component, samples, ("y",), "fp16")
    assert len(traced) == 4 + 2
