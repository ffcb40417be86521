# SPDX-License-Identifier: Apache-2.0
"""Regularization of runs: options reach the batches, stay repeatable, and are refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.models.runs import interrupted
from support.models.sizes import TINY
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import load
from saccade.models.data.datasets import load_data
from saccade.models.data.samples import images as image_file
from saccade.models.entry import imported
from saccade.models.families import FAMILIES, entry_of
from saccade.models.layers.transformer import Block
from saccade.models.nac.model import NAC, NACConfig
from saccade.models.nac.training.sequences import SequenceTask
from saccade.models.slot_attention.training import SlotTask
from saccade.models.sot.model import SoT, SoTConfig
from saccade.models.sot.training import task as sot_task
from saccade.models.sparo.config import SparoConfig
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.training import SparoTask
from saccade.models.training import loop
from saccade.models.training.loop import adamw
from saccade.models.training.options import TrainOptions
from saccade.models.training.regularization import (
    ImageChanges,
    check_regularization,
    rate_factors,
    set_drop_path,
)
from saccade.models.training.task import Recipe, Task, with_pixels
from saccade.models.training.train import train

SIZES = TINY["sot"] | {"layers": 2}
SWIN = SoTConfig(
    trunk="swin", fusion="visual", pooling="gap", patch_px=1, height_px=8, width_px=8, dim=4,
    stage_layers=(1, 2), stage_heads=(1, 1), window=4,
)  # fmt: skip
EVERY: dict[str, Any] = {
    "augment": ("affine", "crop=0.3", "flip", "jitter", "randaugment", "erasing=0.5"),
    "mixup": 0.8,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "drop_path": 0.3,
    "layer_decay": 0.75,
    "weight_decay": 0.03,
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Images of two classes, none of them square."""
    folder, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).mkdir()
        for index in range(8):
            pixels = rng.integers(0, 256, (12 + index, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return str(folder)


def trained(data: str, out: Path, **others: Any) -> bytes:
    out.parent.mkdir(exist_ok=True)
    options = TrainOptions(out, data=data, set=SIZES, steps=4, batch=6, side_px=8)
    train("sot", replace(options, **others))
    return out.read_bytes()


def test_a_regularized_run_is_repeatable_and_resumes(
    tmp_path: Path, photographs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(photographs, tmp_path / "sot.safetensors", **EVERY)
    card = load(tmp_path / "sot.safetensors").card
    assert (
        " --weight-decay 0.03 --augment affine,crop=0.3,flip,jitter,randaugment,erasing=0.5 "
        "--mixup 0.8 --cutmix 1.0 --label-smoothing 0.1 --drop-path 0.3 --layer-decay 0.75 "
        "--side-px 8 "
    ) in card["command"]
    again = tmp_path / "again" / "sot.safetensors"
    with interrupted(2):
        trained(photographs, again, **EVERY)
    # The rest reads each image from its file, with another number of threads.
    monkeypatch.setattr(image_file, "KEPT_BYTES", 0)
    with image_file.ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(image_file, "_pool", lambda: pool)
        assert trained(photographs, again, resume=True, **EVERY) == whole
        with pytest.raises(SaccadeError, match="recipe differ"):
            path = tmp_path / "other" / "sot.safetensors"
            path.parent.mkdir()
            loop.write_state(path.with_name("sot.resume.pt"), {}, {"recipe": {}})
            trained(photographs, path, resume=True)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "weight_decay"])
def test_each_option_changes_the_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, the recipe has the field's default."""
    made = task_of(tmp_path, **{name: EVERY[name]})
    assert getattr(made.recipe, name) == EVERY[name]
    assert getattr(task_of(tmp_path).recipe, name) == getattr(Recipe(1, 1, 1.0), name)


def task_of(tmp_path: Path, **options: Any) -> Any:
    return sot_task(TrainOptions(tmp_path / "m.safetensors", data="digits", set=SIZES, **options))


def test_batches_and_losses_of_mixed_images(tmp_path: Path) -> None:
    made = task_of(tmp_path, mixup=0.8, label_smoothing=0.2)
    batch = with_pixels(made.batch(0, np.random.default_rng(1)))
    assert batch["labels"].shape == (64, 10)
    torch.testing.assert_close(batch["labels"].sum(1), torch.ones(64))
    assert ((batch["labels"] > 0).sum(1) == 2).sum() > 40
    logits = made.model(batch["image"])
    smooth = 0.8 * batch["labels"] + 0.2 / 10
    expected = -(smooth * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(made.loss(batch, 0), expected)
    plain = with_pixels(task_of(tmp_path).batch(0, np.random.default_rng(1)))
    assert plain["labels"].dtype == torch.int64


def test_by_default_the_family_changes_its_images_as_before(tmp_path: Path) -> None:
    made, rng = task_of(tmp_path), np.random.default_rng(4)
    found = with_pixels(made.batch(0, np.random.default_rng(4)))
    data = made.source.draw.__closure__
    assert data is not None
    changes = next(
        cell.cell_contents for cell in data if isinstance(cell.cell_contents, ImageChanges)
    )
    places = rng.integers(len(changes._images), size=64)
    expected = changes.usual(changes._images[places], rng)
    np.testing.assert_array_equal(found["image"].numpy(), expected)
    none = with_pixels(task_of(tmp_path, augment=("none",)).batch(0, np.random.default_rng(4)))
    np.testing.assert_array_equal(none["image"].numpy(), changes._images[places])


def test_every_image_of_a_batch_has_its_own_numbers() -> None:
    recipe = Recipe(1, 1, 1.0, augment=("crop", "jitter"))
    images = np.random.default_rng(0).integers(0, 256, (1, 9, 9, 3), dtype=np.uint8)
    images = np.repeat(images, 4, 0)
    found, _ = ImageChanges(recipe).drawn(images, np.random.default_rng(0))
    pixels = found.make(np.arange(4))
    assert len({one.tobytes() for one in pixels}) == 4
    np.testing.assert_array_equal(found.make(np.arange(2)), pixels[:2], "neither do their parts")


def test_crops_of_own_images_come_from_their_files(photographs: str) -> None:
    data = load_data(photographs, "train", side_px=8)
    black = np.zeros_like(data.images)
    for words, cut in ((("crop",), True), (("flip",), False)):
        recipe = Recipe(1, 1, 1.0, augment=words)
        changes = ImageChanges(recipe, images=black, originals=data.originals)
        found, labels = changes.chosen(np.arange(3), np.random.default_rng(0), data.labels[:3])
        assert found.make(found.rows).any() == cut
        np.testing.assert_array_equal(labels, data.labels[:3])
    assert data.originals is not None
    np.testing.assert_array_equal(np.asarray(data.originals), data.images)
    assert len(data.first(2).originals or ()) == 2


class Plain(Task):
    """A task of a model without blocks, trained on something other than images."""

    family, data, data_sha256 = "plain", "numbers", {}

    def __init__(self, **recipe: Any) -> None:
        self.recipe = Recipe(1, 1, 1.0, **recipe)
        self.model = NAC(NACConfig(modules=4, dim=8, propagator_layers=1))

    batch = loss = validate = calibration = None  # type: ignore[assignment]


Plain.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("name", ["augment", "mixup", "cutmix", "label_smoothing"])
def test_options_of_other_tasks_are_refused_by_name(name: str, tmp_path: Path) -> None:
    options = TrainOptions(tmp_path / "m.safetensors", **{name: EVERY[name]})
    flag = f"--{name.replace('_', '-')} .*expected training on .* but plain on numbers does not"
    with pytest.raises(SaccadeError, match=flag):
        check_regularization(Plain(), options)


def test_what_each_family_can_train_with(tmp_path: Path) -> None:
    classes = {"augment", "mixup", "cutmix", "label_smoothing"}
    assert set(task_of(tmp_path).regularized_by) == classes
    assert set(SparoTask.regularized_by) == set(SlotTask.regularized_by) == {"augment"}
    assert SequenceTask.regularized_by == ("label_smoothing",)
    for family in FAMILIES:
        imported(entry_of(family).training)
    with pytest.raises(SaccadeError, match="--augment is 'flop'"):
        task_of(tmp_path, augment=("flop",))
    options = TrainOptions(tmp_path / "m.safetensors")
    with pytest.raises(SaccadeError, match=r"--drop-path 0.1: .*--set drop_path or module_dropout"):
        check_regularization(Plain(drop_path=0.1), options)
    states = sot_states(tmp_path)
    made = sot_task(TrainOptions(tmp_path / "m.safetensors", data=states, set={"input": "tokens"}))
    assert made.regularized_by == ("label_smoothing",)
    made.recipe = replace(made.recipe, layer_decay=0.5)
    with pytest.raises(SaccadeError, match=r"--layer-decay 0.5: this sot has no trunk"):
        check_regularization(made, options)


def sot_states(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((40, 3, 8)).astype(np.float32)
    labels = np.arange(40) % 2
    np.savez(tmp_path / "t.npz", tokens=tokens, lengths=np.full(40, 3), labels=labels)
    return str(tmp_path / "t.npz")


WRONG = {
    "mixup": (-0.1, "at least 0"),
    "cutmix": (float("nan"), "a finite number"),
    "label_smoothing": (1.0, "at least 0 and below 1"),
    "drop_path": (1.0, "at least 0 and below 1"),
    "layer_decay": (0.0, "above 0 and at most 1"),
    "weight_decay": (-1.0, "at least 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_numbers_out_of_range(name: str, tmp_path: Path) -> None:
    value, expected = WRONG[name]
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(SaccadeError, match=f"{flag}: found {value}, expected {expected}"):
        TrainOptions(tmp_path / "m.safetensors", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [SoTConfig(**SIZES), SWIN], ids=["vit", "swin"])
def test_stochastic_depth_vanishes_in_evaluation_and_in_the_folded_model(config: SoTConfig) -> None:
    model = SoT(config)
    image = torch.rand(3, 8, 8, 1) * 255
    expected = model.eval()(image)
    names = list(model.state_dict())
    set_drop_path(model, 0.5)
    assert list(model.state_dict()) == names
    assert torch.equal(model(image), expected)
    torch.testing.assert_close(model.fold()(image), expected, atol=1e-5, rtol=1e-4)
    torch.manual_seed(1)
    model.train()
    assert any(not torch.equal(model(image), expected) for _ in range(4))


def test_the_share_of_dropped_branches_rises_with_depth() -> None:
    model = SoT(SoTConfig(**SIZES | {"layers": 3}))
    set_drop_path(model, 0.2)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    assert [block.stochastic_depth for block in blocks] == [0.0, 0.1, 0.2]
    circuit = trunk_nac("vit", 2)
    set_drop_path(circuit, 0.2)
    blocks = [module for module in circuit.modules() if isinstance(module, Block)]
    assert [block.stochastic_depth for block in blocks] == [0.0, 0.2]


def sparo() -> Sparo:
    sizes = {"image_width": 8, "image_heads": 1, "image_hidden": 8, "text_width": 8}
    texts = {"text_heads": 1, "text_hidden": 8}
    return Sparo(SparoConfig(**sizes, **texts, image_layers=3, text_layers=2, reduce_depth=0))


def trunk_nac(kind: str, sets: int) -> NAC:
    """A NAC that reads the patches of a trunk of two blocks."""
    shape = {"token_width": 8, "trunk_dim": 8, "trunk_layers": (2,), "trunk_heads": (1,)}
    if kind != "vit":
        shape |= {"trunk_dim": 4, "trunk_layers": (1, 1), "trunk_heads": (1, 1), "trunk_window": 4}
    image = {"height_px": 8, "width_px": 8, "patch_px": 4 if kind == "vit" else 1}
    sizes = {"trunk_mlp_dim": 8, "modules": 4, "dim": 8, "propagator_layers": 1}
    return NAC(NACConfig(tokenizer=kind, input_sets=sets, **image, **shape, **sizes))  # type: ignore[arg-type]


MODELS = {
    "vit": lambda: SoT(SoTConfig(**SIZES)),
    "swin": lambda: SoT(SWIN),
    "swinv2": lambda: SoT(replace(SWIN, trunk="swinv2")),
    "sparo": sparo,
    "nac": lambda: NAC(NACConfig(modules=4, dim=8, propagator_layers=2)),
    "nac with vit": lambda: trunk_nac("vit", 1),
    "nac on pairs with swinv2": lambda: trunk_nac("swinv2", 2),
}
LAYERS = {
    "vit": [
        ("trunk.embed", 3), ("trunk.class_tokens", 3), ("trunk.position", 3), ("trunk.blocks.0", 2),
        ("trunk.blocks.1", 1), ("trunk.norm", 0), ("head", 0),
    ],
    "swin": [
        ("trunk.embed", 4), ("trunk.embed_norm", 4), ("trunk.stages.0.0", 3),
        ("trunk.mergings.0", 3), ("trunk.stages.1.0", 2), ("trunk.stages.1.1", 1),
        ("trunk.norm", 0), ("head", 0),
    ],
    "sparo": [
        ("image.patches", 4), ("text.embedding", 4), ("image.blocks.0", 3), ("image.blocks.1", 2),
        ("text.blocks.0", 2), ("image.blocks.2", 1), ("text.blocks.1", 1),
        ("image.norm_input", 4), ("image_pool", 0), ("logit_scale", 0),
    ],
    "nac": [
        ("tokenizer", 4), ("read_in", 3), ("propagators.0", 2), ("propagators.1", 1),
        ("read_out_codes", 0), ("generator", 0), ("head", 0),
    ],
    "nac with vit": [
        ("tokenizer.trunk.embed", 5), ("tokenizer.trunk.position", 5),
        ("tokenizer.trunk.blocks.0", 4), ("tokenizer.trunk.blocks.1", 3),
        ("tokenizer.trunk.norm", 2), ("read_in", 2), ("propagators.0", 1), ("head", 0),
    ],
    "nac on pairs with swinv2": [
        ("tokenizer.each.trunk.embed", 5), ("tokenizer.each.trunk.stages.0.0", 4),
        ("tokenizer.each.trunk.mergings.0", 4), ("tokenizer.each.trunk.stages.1.0", 3),
        ("tokenizer.each.trunk.norm", 2), ("tokenizer.mark", 2), ("read_in", 2), ("head", 0),
    ],
}  # fmt: skip
LAYERS["swinv2"] = LAYERS["swin"]


@pytest.mark.parametrize("kind", MODELS)
def test_the_learning_rate_falls_by_layer(kind: str) -> None:
    model: Any = MODELS[kind]()
    names = [name for name, _ in model.named_parameters()]
    factors = rate_factors(model.parameter_layers(), names, 0.5)
    for part, depth in LAYERS[kind]:
        found = {factors[name] for name in names if f"{name}.".startswith(part)}
        assert found == {0.5**depth}, part
    assert set(rate_factors(model.parameter_layers(), names, 1.0).values()) == {1.0}


def test_layer_decay_keeps_what_does_not_decay_and_what_is_frozen() -> None:
    model = SoT(SoTConfig(**SIZES))
    model.trunk.get_submodule("blocks.0").requires_grad_(False)
    recipe = Recipe(10, 1, 1e-3, layer_decay=0.5, weight_decay=0.2, warm_up_steps=0)
    named = list(model.named_parameters())
    optimizer = adamw(recipe, named, layers=model.parameter_layers())
    name_of = {id(parameter): name for name, parameter in named}
    seen = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            seen[name_of[id(parameter)]] = group["factor"], group["weight_decay"]
    assert set(seen) == {name for name, parameter in named if parameter.requires_grad}
    assert seen["trunk.embed.project.weight"] == (0.125, 0.2)
    assert seen["trunk.position"] == (0.125, 0.0)
    assert seen["trunk.blocks.1.widen.weight"] == (0.5, 0.2)
    assert seen["trunk.blocks.1.norm_mlp.weight"] == (0.5, 0.0)
    assert seen["head.class_fc.weight"] == (1.0, 0.2)
    assert seen["head.class_fc.bias"] == (1.0, 0.0)


def test_a_step_moves_each_layer_by_its_own_rate(tmp_path: Path) -> None:
    moved = {}
    for decay in (1.0, 0.01):
        made = task_of(tmp_path, layer_decay=decay, batch=4, weight_decay=0.0)
        run = loop.Run(made, TrainOptions(tmp_path / "m.safetensors"))
        before = {name: value.clone() for name, value in made.model.named_parameters()}
        run.step()
        run.after_step(lambda *_, **__: None)
        moved[decay] = {
            name: (value - before[name]).abs().max().item()
            for name, value in made.model.named_parameters()
        }
        assert run.optimizer.param_groups[0]["lr"] == loop.rate_at(made.recipe, 0)
    for name, depth in (("head.class_fc.weight", 0), ("trunk.blocks.1.narrow.weight", 1)):
        assert moved[0.01][name] == pytest.approx(moved[1.0][name] * 0.01**depth, rel=0.05)


def test_digits_of_nac_keep_their_smoothed_labels(tmp_path: Path) -> None:
    options = TrainOptions(tmp_path / "m.safetensors", set={"modules": 4, "dim": 8}, batch=8)
    for given, expected in (({}, 0.1), ({"label_smoothing": 0.3}, 0.3), ({"cutmix": 1.0}, 0.1)):
        made = imported(entry_of("nac").training)(replace(options, **given))
        batch = with_pixels(made.batch(0, np.random.default_rng(0)))
        with torch.no_grad():
            made.model.eval()
            loss = made.loss(batch, 0) - made.with_graph_prior(torch.zeros(()))
            logits = made.model(batch["images"], modules=batch.get("modules"))
        crossed = F.cross_entropy(logits, batch["labels"], label_smoothing=expected)
        torch.testing.assert_close(loss, crossed, atol=1e-4, rtol=1e-4)
        assert (batch["labels"].dim() == 2) == ("cutmix" in given)
