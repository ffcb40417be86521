# SPDX-License-Identifier: Apache-2.0
"""Training: repeatable, leaves a whole checkpoint or none, refuses what it cannot use."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade.core.errors import SaccadeError
from saccade.core.leftovers import only_writer
from saccade.models.checkpoint import load
from saccade.models.data.datasets import load_data
from saccade.models.families import entries
from saccade.models.nac.training import recipes as nac_recipes
from saccade.models.nac.training.circuit_task import score
from saccade.models.nac.training.recipes import recipe_for
from saccade.models.training import loop
from saccade.models.training.options import overrides_words, parse_overrides
from saccade.models.training.train import TrainOptions, train

MODEL = {"modules": 8, "dim": 16, "propagator_layers": 1}
SMALL = TrainOptions(out=Path(), steps=32, set=MODEL, threads=1)


def test_learns_digits_and_says_how_well(tmp_path: Path) -> None:
    wider = MODEL | {"dim": 32}
    options = replace(SMALL, out=tmp_path / "a.safetensors", steps=96, set=wider)
    checkpoint = load(train("nac", options).path)
    assert checkpoint.card["validation"]["1"] > 0.3
    assert checkpoint.card["data"] == "digits"
    assert checkpoint.card["seed"] == 0
    assert checkpoint.card["steps"] == 96
    assert checkpoint.card["command"] == (
        "saccade train nac --data digits --out a.safetensors --set modules=8 dim=32 "
        "propagator_layers=1 --steps 96 --seed 0 --threads 1"
    )
    assert str(tmp_path) not in str(checkpoint.card)
    assert checkpoint.calibration["image"].shape == (256, 8, 8, 1)
    training = {image.tobytes() for image in load_data("digits", "train").images}
    assert all(image.tobytes() in training for image in checkpoint.calibration["image"])
    model = checkpoint.build()
    held_out = load_data("digits", "validation")
    again = score(model, [held_out.images], held_out.labels, (1.0, 0.25), at_once=50)
    assert again == {key: checkpoint.card["validation"][key] for key in ("1", "0.25")}
    assert torch.equal(model.module_order.sort().values, torch.arange(8))
    with options.log_path.open() as file:
        rows = list(csv.DictReader(file))
    assert {"step", "loss", "learning_rate", "seconds", "mean", "1"} <= set(rows[0])
    assert [row["step"] for row in rows] == [str(step + 1) for step in range(96)]
    validated = {int(row["step"]): float(row["mean"]) for row in rows if row["mean"]}
    assert list(validated) == [16, 32, 48, 64, 80, 96]  # once an epoch
    assert validated[checkpoint.card["best_step"]] == max(validated.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.safetensors"]


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    def bytes_of(name: str, seed: int) -> bytes:
        (tmp_path / name).mkdir()
        options = replace(SMALL, out=tmp_path / name / "nac.safetensors", seed=seed, steps=4)
        before = torch.random.get_rng_state()
        train("nac", options)
        assert torch.equal(before, torch.random.get_rng_state())
        return options.out.read_bytes()

    first = bytes_of("first", 1)
    assert bytes_of("second", 1) == first
    assert bytes_of("third", 2) != first


def test_digits_sum_trains_with_its_auxiliary_heads_and_leaves_them_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = nac_recipes.DIGITS_SUM
    short = replace(whole, batch=8, extra=whole.extra | {"validate_count": 100})
    monkeypatch.setattr(nac_recipes, "DIGITS_SUM", short)
    options = replace(SMALL, out=tmp_path / "sum.safetensors", data="digits-sum", steps=3)
    checkpoint = train("nac", options)
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
    checkpoint = train("nac", replace(options, steps=24))
    assert checkpoint.labels == ("low", "middle", "high")
    assert checkpoint.preprocessing is not None
    assert checkpoint.preprocessing.height_px == 12
    assert checkpoint.preprocessing.channels == 3
    assert checkpoint.card["data"] == "mine.npz"
    assert checkpoint.card["validation"]["1"] > 0.6


def test_module_dropout_unless_set_otherwise(tmp_path: Path) -> None:
    options = replace(SMALL, out=tmp_path / "a.safetensors", steps=1)
    assert train("nac", options).config["module_dropout"] == 0.5  # four of eight
    without = replace(options, set=MODEL | {"module_dropout": 1}, force=True)
    checkpoint = train("nac", without)
    assert checkpoint.config["module_dropout"] == 1
    assert "module_dropout=1 " in checkpoint.card["command"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_when_training_stops(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise error

    monkeypatch.setattr(loop.Run, "step", stop)
    threads = torch.get_num_threads()
    with pytest.raises(error):
        train("nac", replace(SMALL, out=tmp_path / "a.safetensors"))
    assert not list(tmp_path.iterdir())
    assert torch.get_num_threads() == threads


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"steps": 0}, "--steps: found 0"),
    "no batch": ({"batch": 0}, "--batch: found 0"),
    "no modules": ({"set": {"modules": 0}}, "modules is 0"),
    "too many modules": ({"set": {"modules": 4097}}, "at most 4096"),
    "a field that is none": ({"set": {"modles": 8}}, "a field is 'modles'.*modules"),
    "a text for a number": ({"set": {"dim": "wide"}}, "dim is 'wide'"),
    "no threads": ({"threads": 0}, "--threads: found 0"),
    "no learning rate": ({"learning_rate": float("nan")}, "--learning-rate: found nan"),
    "dim that heads do not divide": ({"set": {"dim": 30}}, "heads is 4"),
    "unknown data": ({"data": "mnist"}, "mnist"),
    "another ending": ({"out": Path("a.pt")}, "ends in .safetensors"),
    "nothing to resume": ({"resume": True}, "no interrupted run"),
    "a loss that explodes": ({"learning_rate": 1e30}, "loss is (nan|inf).*--learning-rate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, reason = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SaccadeError, match=reason):
        train("nac", replace(replace(SMALL, out=Path("a.safetensors")), **changes))
    assert not list(tmp_path.iterdir())


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match=r"'resnet' is unknown.*captioner, nac"):
        train("resnet", replace(SMALL, out=tmp_path / "a.safetensors"))


def test_an_output_that_exists_is_refused_before_work(tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    out.write_text("mine")
    with pytest.raises(SaccadeError, match="--force"):
        train("nac", replace(SMALL, out=out))
    with pytest.raises(SaccadeError, match="cannot be written"):
        train("nac", replace(SMALL, out=out / "b.safetensors"))
    assert out.read_text() == "mine"
    (tmp_path / "b.csv").write_text("my table")
    with pytest.raises(SaccadeError, match=r"b\.csv: exists already"):
        train("nac", replace(SMALL, out=tmp_path / "b.safetensors"))
    assert (tmp_path / "b.csv").read_text() == "my table"


def test_sizes_that_no_patch_divides_are_refused() -> None:
    assert recipe_for("mine", 28, 28).config["patch_px"] == 4
    assert recipe_for("mine", 32, 64).config["patch_px"] == 8
    assert recipe_for("mine", 17, 17, patch_px=4).config["patch_px"] == 4
    with pytest.raises(SaccadeError, match="31x37"):
        recipe_for("mine", 31, 37)


def test_overrides_are_read_as_they_are_written() -> None:
    words = ["dim=64", "graph_prior=scale-free", "mean=[0.5,0.25]", "read_norm=false", 'a="1"']
    overrides = parse_overrides(words)
    assert overrides == {
        "dim": 64,
        "graph_prior": "scale-free",
        "mean": [0.5, 0.25],
        "read_norm": False,
        "a": "1",
    }
    assert overrides_words(overrides) == words
    with pytest.raises(SaccadeError, match="key=value"):
        parse_overrides(["dim"])
    with pytest.raises(SaccadeError, match="dim twice"):
        parse_overrides(["dim=1", "dim=2"])


def test_the_log_of_a_run_that_was_killed_at_its_end_is_not_in_the_way(tmp_path):
    out = tmp_path / "x.safetensors"
    log = out.with_suffix(".csv")
    log.write_text("step,loss,learning_rate,seconds\n")
    with pytest.raises(SaccadeError, match=r"x\.csv: exists already"):
        train("nac", TrainOptions(out, data="nothing"))
    # What was to become the checkpoint right after the log.
    (tmp_path / ".x.safetensors.saccade-abcd1234").write_bytes(b"whole")
    with pytest.raises(SaccadeError, match="nothing"):
        train("nac", TrainOptions(out, data="nothing"))
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_share_a_place(tmp_path):
    out = tmp_path / "x.safetensors"
    with only_writer(out), pytest.raises(SaccadeError, match="another saccade process"):
        train("nac", TrainOptions(out, data="nothing"))
    assert list(tmp_path.iterdir()) == []


def test_entries_declare_what_training_reads_from_set() -> None:
    """So that another name is refused before torch is imported."""
    from saccade.models.captioner import training as captioner
    from saccade.models.nac.training.recipes import SETTABLE
    from saccade.models.slot_attention.training import SOURCE_FIELDS
    from saccade.models.vqa import training as vqa

    read = {
        "nac": ("depth", "arguments", *SETTABLE),
        "slot-attention": SOURCE_FIELDS,
        "vqa": tuple(vqa.COUNTS),
        "captioner": tuple(captioner.COUNTS),
    }
    assert {name: entry.settings for name, entry in entries() if entry.settings} == read
