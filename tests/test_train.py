# SPDX-License-Identifier: Apache-2.0
"""Training: repeatable, leaves a whole checkpoint or none, refuses what it cannot use."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.models import training_loop
from saccade.models.checkpoint import load
from saccade.models.data.datasets import load_data
from saccade.models.train import TrainOptions, score, train
from saccade.models.training_recipes import recipe_for
from saccade.plugins.errors import SaccadeError

SMALL = TrainOptions(out=Path(), epochs=2, modules=8, dim=16, propagator_layers=1, threads=1)


def test_learns_digits_and_says_how_well(tmp_path: Path) -> None:
    options = replace(SMALL, out=tmp_path / "a.safetensors", epochs=6, dim=32)
    checkpoint = load(train(options).path)
    assert checkpoint.card["validation"]["1"] > 0.3
    assert checkpoint.card["data"] == "digits"
    assert checkpoint.card["seed"] == 0
    assert checkpoint.card["command"] == (
        "saccade train nac --data digits --out a.safetensors --epochs 6 --modules 8 --dim 32 "
        "--propagator-layers 1 --seed 0 --threads 1"
    )
    assert str(tmp_path) not in str(checkpoint.card)
    assert checkpoint.calibration["image"].shape == (256, 8, 8, 1)
    training = {image.tobytes() for image in load_data("digits", "train").images}
    assert all(image.tobytes() in training for image in checkpoint.calibration["image"])
    model = checkpoint.build()
    again = score(model, load_data("digits", "validation"), (1.0, 0.25))
    assert again == {key: checkpoint.card["validation"][key] for key in ("1", "0.25")}
    assert torch.equal(model.module_order.sort().values, torch.arange(8))


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    def bytes_of(name: str, seed: int) -> bytes:
        (tmp_path / name).mkdir()
        options = replace(SMALL, out=tmp_path / name / "nac.safetensors", seed=seed)
        before = torch.random.get_rng_state()
        train(options)
        assert torch.equal(before, torch.random.get_rng_state())
        return options.out.read_bytes()

    first = bytes_of("first", 1)
    assert bytes_of("second", 1) == first
    assert bytes_of("third", 2) != first


def test_digits_sum_trains_with_its_auxiliary_heads_and_leaves_them_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(recipe_for("digits-sum", 24, 24), steps=3, batch=8, validate_images=100)
    monkeypatch.setattr("saccade.models.training_recipes.DIGITS_SUM", short)
    options = replace(SMALL, out=tmp_path / "sum.safetensors", data="digits-sum", epochs=1)
    checkpoint = train(options)
    assert not [key for key in checkpoint.weights if "heads" in key or "auxiliary" in key]
    assert checkpoint.build()(torch.zeros(2, 24, 24, 1)).shape == (2, 10)
    assert "0.0625" in checkpoint.card["validation"]  # one of eight modules
    assert "0.03125" not in checkpoint.card["validation"]  # none


def test_the_users_own_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 3
    images = rng.integers(0, 60, (120, 12, 12, 3), dtype=np.uint8)
    images[..., 0] += (labels * 90).astype(np.uint8)[:, None, None]
    names = np.array(["low", "middle", "high"])
    np.savez(tmp_path / "mine.npz", images=images, labels=labels, class_names=names)
    options = replace(SMALL, data=str(tmp_path / "mine.npz"), out=tmp_path / "m.safetensors")
    checkpoint = train(replace(options, epochs=12))
    assert checkpoint.labels == ("low", "middle", "high")
    assert checkpoint.preprocessing.height_px == 12
    assert checkpoint.preprocessing.channels == 3
    assert checkpoint.card["data"] == "mine.npz"
    assert checkpoint.card["validation"]["1"] > 0.6


def test_without_module_dropout_every_step_runs_all_modules(tmp_path: Path) -> None:
    options = replace(SMALL, out=tmp_path / "a.safetensors", epochs=1, module_dropout=False)
    checkpoint = train(options)
    assert checkpoint.config["module_dropout"] == 1.0
    assert "--no-module-dropout" in checkpoint.card["command"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_when_training_stops(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> float:
        raise error

    monkeypatch.setattr(training_loop.Trainer, "step", stop)
    threads = torch.get_num_threads()
    with pytest.raises(error):
        train(replace(SMALL, out=tmp_path / "a.safetensors"))
    assert not list(tmp_path.iterdir())
    assert torch.get_num_threads() == threads


REFUSED = {
    "no epochs": ({"epochs": 0}, "--epochs is 0"),
    "no modules": ({"modules": 0}, "modules is 0"),
    "too many modules": ({"modules": 4097}, "at most 4096"),
    "no threads": ({"threads": 0}, "--threads is 0"),
    "no learning rate": ({"learning_rate": float("nan")}, "--learning-rate is nan"),
    "dim that heads do not divide": ({"dim": 30}, "heads is 4"),
    "unknown data": ({"data": "mnist"}, "mnist"),
    "another ending": ({"out": Path("a.pt")}, "ends in .safetensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, reason = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SaccadeError, match=reason):
        train(replace(replace(SMALL, out=Path("a.safetensors")), **changes))
    assert not list(tmp_path.iterdir())


def test_an_output_that_exists_is_refused_before_work(tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    out.write_text("mine")
    with pytest.raises(SaccadeError, match="--force"):
        train(replace(SMALL, out=out))
    with pytest.raises(SaccadeError, match="cannot be written"):
        train(replace(SMALL, out=out / "b.safetensors"))
    assert out.read_text() == "mine"


def test_sizes_that_no_patch_divides_are_refused() -> None:
    assert recipe_for("mine", 28, 28).config["patch_px"] == 4
    assert recipe_for("mine", 32, 64).config["patch_px"] == 8
    with pytest.raises(SaccadeError, match="31x37"):
        recipe_for("mine", 31, 37)
