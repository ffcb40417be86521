# SPDX-License-Identifier: Apache-2.0
"""Resolutions as budgets: which sides fit, what is kept, and how images are made for them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_families import CONFIGS

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.variant import choose_budgets
from saccade.models.families import build, config_class
from saccade.models.image_decoding import fit
from saccade.models.preprocessing import Preprocessing
from saccade.models.resolution import TokenGrid, examples, resampled, resized
from saccade.models.sot.config import PRESETS as SOT
from saccade.models.sot.config import SoTConfig
from saccade.models.sparo.config import PRESETS as SPARO

# Windows of 4 in grids of 16 and 8, or of 8 and 4, as in training.
SWIN = SoTConfig(
    height_px=64, width_px=64, trunk="swin", patch_px=4, dim=8, stage_layers=(2, 1), window=4,
    stage_heads=(1, 2), pooling="gap", fusion="visual",
)  # fmt: skip
NAC = {"height_px": 16, "width_px": 32, "patch_px": 4, "modules": 8, "readout_modules": 2}


def tiny(family: str, **changes: Any) -> Any:
    """Build a model with random weights in float64."""
    fields = config_class(family)(**CONFIGS.get(family, NAC) | changes).to_dict()
    return build(family, fields).double().eval()


def images_for(config: Any, count: int = 2) -> torch.Tensor:
    rng = np.random.default_rng(0)
    shape = (count, config.height_px, config.width_px, config.channels)
    return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))


def test_a_side_says_what_is_kept() -> None:
    budget = SOT["deit-tiny-sot"].budget("r160")
    assert (budget.label, budget.kept, budget.total) == ("r160", 160, 224)
    assert budget.share == (160 / 224) ** 2  # of the pixels
    assert budget.part == SOT["deit-tiny-sot"].budgets()[0]
    fast = SOT["deit-tiny-sot"].budget("r160fast")
    assert fast.label == "r160fast" and fast.share == pytest.approx((160 / 224) ** 2 * 2 / 3)
    slots = SPARO["vit-b-16-sparo"].budget("r160b0500")
    assert slots.part is not None and (slots.part.kept, slots.part.total) == (32, 64)
    assert SPARO["vit-b-16"].budget("r160").part == SPARO["vit-b-16"].budget("1")


@pytest.mark.parametrize(
    ("config", "text", "words"),
    [
        (SOT["vit-b16"], "r150", r"224 x 224 px.*patches must fill.*r144, r160\.$"),
        (SOT["vit-b16"], "r256", r"nearest: r224\.$"),
        (SOT["vit-b16"], "r8", r"nearest: r16\.$"),
        (SOT["vit-b16"], "r160r128", r"this model has exact\. .*--budget r224,r160\.$"),
        (SOT["resnet-50"], "r150", r"r128, r160\.$"),
        (SOT["swin-tiny"], "r160", r"windows must tile.*nearest: r224\.$"),
        (SWIN, "r48", r"windows must tile.*r32, r64\.$"),  # a stage of 6 tokens
        (SWIN, "r16", r"windows must tile.*nearest: r32\.$"),  # windows of 2 in its last stage
        (replace(SOT["vit-b16"], height_px=384, width_px=256), "r176", r"r144, r192\.$"),
        (SPARO["vit-b-16"], "0.5", r"no slots to leave out.*--budget r224,r160\.$"),
        (replace(SOT["sot-digits"], input="tokens"), "r4", "reads none"),
        (config_class("vqa")(), "r24", "layers for one size"),
        (config_class("captioner")(), "r24", "layers for one size"),
        (config_class("slot-attention")(), "r24", "layers for one size"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(config: Any, text: str, words: str) -> None:
    with pytest.raises(SaccadeError, match=words):
        config.budget(text)


def test_an_example_fits() -> None:
    assert examples(SOT["vit-b16"]) == "r224,r160" and examples(SOT["vit-b32"]) == "r224,r160"
    assert examples(SOT["swin-tiny"]) == "" == examples(config_class("vqa")())


def test_two_names_of_one_variant_are_refused() -> None:
    config = SOT["deit-tiny-sot"]
    both = choose_budgets(config, ("r128", "exact", "r160class", "r160"))
    assert [budget.label for budget in both] == ["exact", "r160", "r128", "r160class"]
    for pair in (("exact", "r224"), ("r160", "r160exact"), ("r160", "r160")):
        with pytest.raises(SaccadeError, match=r"would be the same|both be named"):
            choose_budgets(config, pair)


@pytest.mark.parametrize(
    ("family", "changes", "side_px", "then"),
    [
        ("sot", {"registers": 1}, 8, ""),
        ("sot", {"position": "sinusoid"}, 8, "class"),
        ("sot", SWIN.to_dict(), 32, ""),
        ("sparo", {"height_px": 32, "width_px": 24}, 32, "b0500"),
        ("sparo", {"height_px": 32, "width_px": 16}, 16, "b0500"),
        ("nac", {}, 8, "b0500"),
        ("nac", {"tokenizer": "conv"}, 8, ""),
    ],
)
def test_the_smaller_model_folds_to_the_same_function(
    family: str, changes: dict[str, Any], side_px: int, then: str
) -> None:
    model = tiny(family, **changes)
    smaller = model.at(model.budget(f"r{side_px}{then}"))
    kept = model.at(model.budget(then)) if then else model
    width_px = side_px * model.config.width_px // model.config.height_px
    assert smaller.config == replace(kept.config, height_px=side_px, width_px=width_px)
    assert type(smaller) is type(model) and not smaller.training
    inputs = images_for(smaller.config)
    with torch.no_grad():
        ours = smaller.components()[0].run(image=inputs)
        folded = smaller.fold().components()[0].run(image=inputs)
    for name, value in ours.items():
        torch.testing.assert_close(folded[name], value, rtol=0, atol=1e-10)
    whole, own = model.state_dict(), resized(model, side_px).state_dict()
    changed = [name for name in own if not torch.equal(own[name], whole[name])]
    interpolated = side_px < model.config.height_px and not model.config.token_grid.windows
    assert [name.rpartition(".")[2] for name in changed] == ["position"] * interpolated


def test_positions_of_class_tokens_stay_and_others_are_interpolated() -> None:
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(6.0), indexing="ij")
    table = torch.cat((torch.full((2, 2), 99.0), torch.stack((rows, columns), -1).flatten(0, 1)))
    made = resampled(table.double(), TokenGrid(8, 6), TokenGrid(4, 3))
    assert made[:2].tolist() == table[:2].tolist()
    inside = made[2:].reshape(4, 3, 2)[1:3, 1]  # a cubic is exact away from the borders
    assert inside.tolist() == [[2.5, 2.5], [4.5, 2.5]]
    filtered = resampled(table.double(), TokenGrid(8, 6), TokenGrid(4, 3, antialias=True))
    assert not torch.equal(filtered, made)
    assert SOT["vit-b16"].token_grid == TokenGrid(14, 14)
    registered = replace(SOT["vit-b16"], registers=4).token_grid
    assert registered is not None and registered.antialias


def test_the_view_stays_and_pixels_become_fewer() -> None:
    given = Preprocessing(224, 224, 3, (0.5,) * 3, (0.5,) * 3, resize_px=(256, 256))
    smaller = given.at_height(160)
    assert (smaller.height_px, smaller.width_px, smaller.resize_px) == (160, 160, (183, 183))
    assert smaller.trained_px == (224, 224) == smaller.at_height(96).trained_px
    assert given.at_height(224) is given and "trained_px" not in given.to_dict()
    assert Preprocessing.from_dict(smaller.to_dict()) == smaller
    wide = Preprocessing(192, 96, 1, (0.5,), (0.5,), resize_mode="squash", resize_px=(200, 101))
    assert wide.at_height(96).resize_px == (100, 51)  # 50.5: halves are rounded up
    # A photograph that is not square shows the same part of itself.
    ramp = np.linspace(0, 255, 640).astype(np.uint8)
    photograph = Image.fromarray(np.broadcast_to(ramp, (480, 640)).copy()).convert("RGB")
    large, small = (fit(photograph, one.wanted()).astype(float) for one in (given, smaller))
    for column in (0, -1):
        assert abs(large[:, column].mean() - small[:, column].mean()) < 2
