# SPDX-License-Identifier: Apache-2.0
"""The loop: an interrupted run goes on as if it had not been, rates, decay, averaged weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.runs import interrupted
from torch import nn

from saccade.core.errors import SaccadeError
from saccade.models.nac.config import NACConfig
from saccade.models.nac.training import circuit_task
from saccade.models.nac.training import recipes as nac_recipes
from saccade.models.nac.training.circuit_task import drawn_modules
from saccade.models.training.loop import ParameterAverage, adamw, rate_at
from saccade.models.training.task import Recipe
from saccade.models.training.train import TrainOptions, train

MODEL = {"modules": 12, "dim": 16, "signature_dim": 4, "graph_refresh_steps": 9}
MODEL |= {"propagator_layers": 1}


@pytest.fixture
def short_digits_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Auxiliary heads, a curriculum, averaged weights and epochs of four steps."""
    whole = nac_recipes.DIGITS_SUM
    extra = whole.extra | {"validate_count": 20, "epoch_steps": 4, "curriculum_epochs": 2}
    short = replace(whole, batch=4, validate_every=5, ema=0.9, extra=extra)
    monkeypatch.setattr(nac_recipes, "DIGITS_SUM", short)


@pytest.fixture(autouse=True)
def few_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score few images: a run's result on all of them takes longer than its steps."""
    score = circuit_task.score

    def few(model: Any, inputs: Any, labels: Any, *rest: Any, **named: Any) -> dict[str, float]:
        return score(model, [array[:20] for array in inputs], labels[:20], *rest, **named)

    monkeypatch.setattr(circuit_task, "score", few)


@pytest.mark.parametrize(("data", "precision"), [("digits", None), ("digits-sum", "bf16")])
def test_a_resumed_run_gives_the_bytes_of_an_uninterrupted_one(
    data: str, precision: Any, tmp_path: Path, short_digits_sum: None
) -> None:
    (tmp_path / "whole").mkdir()
    given = {"steps": 14, "learning_rate": 0.02, "precision": precision}
    options = TrainOptions(tmp_path / "nac.safetensors", data=data, set=MODEL, **given)
    whole = replace(options, out=tmp_path / "whole" / "nac.safetensors")
    train("nac", whole)
    # Once in the middle of an epoch, and again before the next ranking of the modules.
    again = replace(options, resume=True)
    for asked, steps in ((options, 5), (again, 12)):
        with interrupted(steps):
            train("nac", asked)
        assert options.state_path.exists() and not options.out.exists()
    train("nac", again)
    assert options.out.read_bytes() == whole.out.read_bytes()
    assert not options.state_path.exists()

    def without_seconds(path: Path) -> list[list[str]]:
        return [line.split(",")[:3] for line in path.read_text().splitlines()]

    assert without_seconds(options.log_path) == without_seconds(whole.log_path)


def test_a_kept_run_is_neither_overwritten_nor_continued_as_another(tmp_path: Path) -> None:
    options = TrainOptions(tmp_path / "nac.safetensors", set=MODEL, steps=8)
    with interrupted(3):
        train("nac", options)
    with pytest.raises(SaccadeError, match="--resume"):
        train("nac", options)
    other = replace(options, resume=True, seed=1, learning_rate=1e-4)
    with pytest.raises(SaccadeError, match=r"another run: --seed, configuration, recipe differ"):
        train("nac", other)
    options.state_path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(SaccadeError, match="damaged"):
        train("nac", replace(options, resume=True))
    train("nac", replace(options, force=True))
    assert not options.state_path.exists()


def test_rates_go_up_and_down() -> None:
    cosine = Recipe(steps=1000, batch=1, learning_rate=1.0, warm_up_steps=100)
    assert rate_at(cosine, 0) == pytest.approx(0.01)
    assert rate_at(cosine, 99) == pytest.approx(1.0)
    assert rate_at(cosine, 550) == pytest.approx(0.5)
    assert rate_at(cosine, 999) < 1e-4
    level = replace(cosine, schedule="trapezoid", decay_share=0.25)
    assert rate_at(level, 749) == 1.0
    assert rate_at(level, 875) == pytest.approx(0.5)
    assert rate_at(level, 999) == pytest.approx(0.004)


def test_vectors_and_named_weights_do_not_decay() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(2, 3), "position": nn.Linear(2, 3, bias=False)})
    recipe = Recipe(steps=1, batch=1, learning_rate=1.0, weight_decay=0.5)
    bound, free = adamw(recipe, list(model.named_parameters())).param_groups
    assert [id(parameter) for parameter in bound["params"]] == [id(model["linear"].weight)]
    assert (bound["weight_decay"], free["weight_decay"]) == (0.5, 0.0)
    assert len(free["params"]) == 2


def test_the_average_is_in_the_model_only_inside_the_block() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = ParameterAverage(model, decay=0.5)
    nn.init.ones_(model.weight)
    average.update()  # the first update counts 2/11 of what was
    with average.in_place():
        assert model.weight.item() == pytest.approx(9 / 11)
    assert model.weight.item() == 1.0


@pytest.mark.parametrize(("drawn", "middle"), [("uniform", 33), ("log-uniform", 12)])
def test_a_step_keeps_the_share_that_the_configuration_says(drawn: str, middle: int) -> None:
    config = NACConfig(modules=64, module_dropout=1 / 32, dropout_draw=drawn, dropout_ordered=0.5)
    rng, order = np.random.default_rng(0), torch.arange(64).flip(0)
    kept = [drawn_modules(config, rng, most=64, rank=lambda: order) for _ in range(400)]
    sizes = [len(each) for each in kept if each is not None]
    assert len(sizes) == 400
    assert (min(sizes), max(sizes)) == (2, 64)
    assert abs(np.median(sizes) - middle) < 4
    few = [drawn_modules(config, rng, most=16, rank=lambda: order) for _ in range(100)]
    assert max(len(each) for each in few if each is not None) == 16
    ordered = sum(torch.equal(each, order[: len(each)]) for each in kept if each is not None)
    assert 140 < ordered < 260
