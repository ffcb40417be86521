# SPDX-License-Identifier: Apache-2.0
"""Run folders: everything that repeats a run, in one step, and interrupted runs."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.models.runs import few_images, interrupted

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.models.checkpoint import load
from saccade.models.training import loop
from saccade.models.training import train as train_module
from saccade.models.training.recipe_file import read_recipe
from saccade.models.training.train import TrainOptions, train

MODEL = {"modules": 2, "dim": 8, "propagator_layers": 1, "heads": 2, "ffn_dim": 8}
FILES = [
    "README.md", "config.json", "curves.png", "last.safetensors", "log.csv", "model.safetensors",
    "recipe.toml", "run.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", autouse=True)
def early_best() -> Iterator[None]:
    """Runs whose first validated step stays the best."""
    validate = loop.Run._validate

    def first(one: loop.Run) -> dict[str, float]:
        best = one.best_step, one.best_score, one.best_weights
        scores = validate(one)
        if best[0]:
            one.best_step, one.best_score, one.best_weights = best
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Run, "_validate", first)
        yield


def options_in(place: Path, data: str, **changes: Any) -> TrainOptions:
    given: dict[str, Any] = {
        "data": data, "shots": 2, "steps": 4, "batch": 4, "learning_rate": 0.1, "set": MODEL,
    }  # fmt: skip
    return TrainOptions(place, **(given | changes))


@pytest.fixture(scope="module")
def run(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which other tests only read."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train("nac", options_in(out, data, seed=3)).path == out / "model.safetensors"
    return out


def test_the_folder_repeats_the_run(run: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in run.iterdir()) == FILES
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]
    facts = json.loads((run / "run.json").read_bytes())
    assert (facts["seed"], facts["steps"], facts["family"]) == (3, 4, "nac")
    assert set(facts["data_sha256"]) == {"train", "validation"}
    assert {"torch", "numpy", "saccade", "python"} <= set(facts["versions"])
    assert "--shots 2" in facts["command"] and facts["recipe_values"]["weight_decay"] == 0.05
    assert facts["files"] == {n: sha256_of(run / n) for n in FILES if n != "run.json"}
    family, values = read_recipe(run / "recipe.toml")
    assert values["batch"] == 4 and values["learning_rate"] == 0.1
    again = train(str(family), TrainOptions(**{**values, "out": tmp_path / "again.safetensors"}))
    first = load(run)
    assert all(torch.equal(again.weights[key], first.weights[key]) for key in first.weights)
    card = (run / "README.md").read_text()
    assert "# run\n" in card and "--recipe-file run/recipe.toml --out run-again" in card


def test_the_last_checkpoint_has_the_last_weights(run: Path) -> None:
    best, last = load(run), load(run / "last.safetensors")
    assert last.card["weights_of_step"] == 4 and "weights_of_step" not in best.card
    rows = (run / "log.csv").read_text().splitlines()
    assert rows[-1].startswith("4,") and len(rows) == 5
    assert best.card["best_step"] == 1
    assert any(not torch.equal(best.weights[key], last.weights[key]) for key in best.weights)


def test_the_curves_are_drawn(run: Path) -> None:
    with Image.open(run / "curves.png") as image:
        assert image.size == (960, 768)
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    for color in ("#0b6e99", "#c2571a", "#8a8f98"):
        wanted = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)])
        assert (abs(pixels - wanted).max(1) < 12).sum() > 50, color
    rows = [{"step": 1, "loss": 1.0, "learning_rate": 0.1, "seconds": 1.0, "top-1": 0.5}]
    assert train_module.curves_png(rows, 1, "of $one_row").startswith(b"\x89PNG")


def test_an_interrupted_run_leaves_its_state_and_is_resumed(
    run: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_in(tmp_path / "run", data, seed=3)
    with interrupted(2):
        train("nac", options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.resume.csv", "run.resume.pt"]
    monkeypatch.setattr(train_module, "curves_png", lambda *_: b"")  # drawn for `run`
    train("nac", replace(options, resume=True))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    for name in ("model.safetensors", "last.safetensors"):
        assert (options.out / name).read_bytes() == (run / name).read_bytes()


def test_a_folder_is_replaced_as_a_whole_and_never_with_its_inputs(
    run: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SaccadeError, match="exists already"):
        train("nac", options_in(run, data))
    with pytest.raises(SaccadeError, match="would remove the input"):
        train("nac", options_in(run, data, init=run / "model.safetensors", force=True))
    with pytest.raises(SaccadeError, match=r"ends in \.safetensors, or one without an ending"):
        train("nac", options_in(tmp_path / "run.pt", data))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "old").touch()
    full = OSError(28, "no space left")

    def fail(*_: object) -> bytes:
        raise full

    monkeypatch.setattr(train_module, "curves_png", fail)
    with pytest.raises(SaccadeError, match="disk is full"):
        train("nac", options_in(tmp_path / "run", data, steps=1, force=True))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SaccadeError, match=r"\S+\[bench\]"):
        train("nac", options_in(tmp_path / "other", data))
