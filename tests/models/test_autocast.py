# SPDX-License-Identifier: Apache-2.0
"""Training in bfloat16 on a CPU: near float32, and in float32 where eight bits are too few."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.nac.kernel import signature_distance, skmdpa
from saccade.models.nac.layers import masked_softmax
from saccade.models.nac.model import NAC, NACConfig
from saccade.models.nac.training import task
from saccade.models.training.loop import Run
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import with_pixels
from saccade.models.training.train import command_line

MODEL = {"modules": 12, "dim": 32, "signature_dim": 4, "module_dropout": 1.0}
STEPS = 12


def losses(folder: Path, precision: Any) -> np.ndarray:
    """Of the first steps, the weights and kernels drawn alike."""
    out = folder / f"{precision}.safetensors"
    options = TrainOptions(
        out, data="digits-sum", set=MODEL, steps=STEPS, batch=8, precision=precision
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run = Run(task(options), options)
        for _ in range(STEPS):
            run.step()
    assert {parameter.dtype for parameter in run.task.model.parameters()} == {torch.float32}
    return np.array(run.losses)


def test_a_run_in_bfloat16_stays_near_one_in_float32(tmp_path: Path) -> None:
    wide, half = losses(tmp_path, "fp32"), losses(tmp_path, "bf16")
    assert np.isfinite(half).all()
    assert not np.array_equal(wide, half)
    np.testing.assert_allclose(half, wide, rtol=0.02)
    assert np.array_equal(losses(tmp_path, None), wide)


def test_what_needs_float32_has_it_under_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    near = torch.nn.functional.normalize(torch.randn(9, 16, generator=generator), dim=-1)
    near[1:] = near[:1] + 0.01 * near[1:]  # distances of 1e-4, where bfloat16 knows 0 and 4e-3
    scores, values = torch.randn(2, 9, 5, generator=generator), near.expand(2, -1, -1)
    model = NAC(NACConfig(modules=9))
    expected = [
        signature_distance(near, near),
        masked_softmax(scores, None),
        model.graph_loss(),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        actual = [
            signature_distance(near, near),
            masked_softmax(scores, None),
            model.graph_loss(),
        ]
        assert masked_softmax(scores.bfloat16(), None).dtype == torch.float32
        assert skmdpa(values, values, values, None).dtype == torch.bfloat16  # a product
    for wanted, seen in zip(expected, actual, strict=True):
        assert seen.dtype == torch.float32
        assert torch.equal(wanted, seen)


def test_softmax_and_losses_are_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, set[torch.dtype]] = {}

    def recorded(name: str, function: Any) -> Any:
        def call(x: Tensor, *rest: Any, **named: Any) -> Tensor:
            kinds.setdefault(name, set()).add(x.dtype)
            result: Tensor = function(x, *rest, **named)
            return result

        return call

    for place, name in ((torch, "softmax"), (F, "cross_entropy"), (F, "mse_loss")):
        monkeypatch.setattr(place, name, recorded(name, getattr(place, name)))
    given = MODEL | {"connectivity": "dense"}  # without a kernel nothing else widens the scores
    trained = task(TrainOptions(tmp_path / "a.safetensors", data="digits-sum", set=given))
    with torch.autocast("cpu", torch.bfloat16):
        trained.loss(with_pixels(trained.batch(0, np.random.default_rng(0))), 0)
    assert kinds == {key: {torch.float32} for key in ("softmax", "cross_entropy", "mse_loss")}


def test_the_command_says_the_precision(tmp_path: Path) -> None:
    options = TrainOptions(tmp_path / "a.safetensors", precision="bf16")
    assert "--precision bf16" in command_line("nac", options, "digits")
    assert "precision" not in command_line("nac", TrainOptions(options.out), "digits")


def test_digits_sum_without_auxiliary_heads(tmp_path: Path) -> None:
    given = {"data": "digits-sum", "set": MODEL | {"counts_weight": 0}}
    without = task(TrainOptions(tmp_path / "a.safetensors", **given))
    assert without.auxiliary is None  # type: ignore[attr-defined]
    batch = with_pixels(without.batch(0, np.random.default_rng(0)))
    assert "counts" in batch  # new canvases all the same
    assert torch.isfinite(without.loss(batch, 0))


@pytest.mark.parametrize(
    ("data", "weight", "reason"),
    [("digits", 1.0, "only digits-sum"), ("digits-sum", "much", "expected a number")],
)
def test_a_weight_of_the_auxiliary_losses_is_refused(
    data: str, weight: Any, reason: str, tmp_path: Path
) -> None:
    given = MODEL | {"counts_weight": weight}
    with pytest.raises(SaccadeError, match=reason):
        task(TrainOptions(tmp_path / "a.safetensors", data=data, set=given))
