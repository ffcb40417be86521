# SPDX-License-Identifier: Apache-2.0
"""Training from a checkpoint: its weights, a new head, frozen parts, and what does not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import labelled_sets
import pytest
import torch
from support.models.runs import interrupted
from support.models.sizes import TINY

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.nac.training.listops import ListOpsTask
from saccade.models.resolution import TokenGrid, resampled
from saccade.models.sot.training import task
from saccade.models.training import loop
from saccade.models.training.options import TrainOptions
from saccade.models.training.start import freeze, load_start, started
from saccade.models.training.train import train

HEAD = {"head.class_fc.weight", "head.class_fc.bias", "head.word_fc.weight", "head.word_fc.bias"}
Sets = dict[str, str]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    """Digits of two and of three classes."""
    folder = tmp_path_factory.mktemp("digits")
    made = {}
    for classes in (2, 3):
        (folder / str(classes)).mkdir()
        samples = labelled_sets.digits(8, classes)
        made[str(classes)] = labelled_sets.class_folders(folder / str(classes), samples)
    return made


@pytest.fixture(scope="module")
def parent(sets: Sets, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("parent") / "parent.safetensors"
    options = TrainOptions(out, data=sets["3"], set=TINY["sot"], steps=3, batch=8, side_px=8)
    return train("sot", options)


@pytest.fixture
def options(sets: Sets, parent: Checkpoint, tmp_path: Path) -> TrainOptions:
    return TrainOptions(
        tmp_path / "child.safetensors", data=sets["2"], init=parent.path, steps=3, batch=8
    )


def changed(parent: Checkpoint, child: Checkpoint) -> set[str]:
    return {
        name
        for name, value in child.weights.items()
        if not torch.equal(value, parent.weights[name])
    }


def test_a_frozen_trunk_keeps_every_bit_under_a_new_head(
    parent: Checkpoint, options: TrainOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    child = load(train("sot", replace(options, freeze=("trunk",), recipe="shipped")).path)
    moved = changed(parent, child)
    assert moved > HEAD
    assert not {name for name in moved if name.startswith("trunk.")}
    assert "new head: 2 classes instead of 3 (head.class_fc.weight, " in capsys.readouterr().err
    assert child.preprocessing == parent.preprocessing
    assert child.labels == ("0", "1")
    assert child.card["init"] == {"name": "parent", "sha256": parent.sha256}
    assert child.card["frozen"] == ["trunk"]
    assert set(child.card["new_head"]) == HEAD
    assert " --init parent --freeze trunk " in child.card["command"]


def test_the_same_classes_keep_their_head(
    parent: Checkpoint, options: TrainOptions, sets: Sets
) -> None:
    same = started("sot", replace(options, data=sets["3"], seed=7))
    made = task(same)
    load_start(made, same)
    assert not [
        name
        for name, value in made.model.state_dict().items()
        if not torch.equal(value, parent.weights[name])
    ]
    renamed = task(same)
    renamed.labels = ("x", "y", "z")
    load_start(renamed, same)
    assert set(renamed.card["new_head"]) == HEAD


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no start": ({"init": None, "freeze": ("trunk",)}, "--freeze trunk: found no --init"),
    "no such part": ({"freeze": ("trnk",)}, "--freeze trnk: .*Parts of this model: .*trunk"),
    "not a whole name": ({"freeze": ("trun",)}, "--freeze trun: found no parameter"),
    "everything": ({"freeze": ("trunk", "head.pool")}, "nothing remains to train"),
    "new": ({"freeze": ("head",)}, "--freeze head: head.* is new"),
    "shape": (
        {"set": {"dim": 16}},
        r"head.pool.project.weight: found floats \[4, 8\], expected floats \[4, 16\]",
    ),
    "lacking": ({"set": {"layers": 2}}, r"trunk.blocks.1.*: found no such tensor, expected floats"),
    "images": ({"set": {"mean": [0.1]}}, "--set mean: the checkpoint of --init determines"),
    "side": ({"side_px": 9}, r"patch_px is 2, expected a divisor of height_px \(9\)"),
    "other images": ({"data": "shapes"}, r"channels|height_px"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, options: TrainOptions, sets: Sets) -> None:
    changes, message = REFUSED[case]
    if case == "everything":  # with the classes of the checkpoint, no head is new
        changes = changes | {"data": sets["3"], "freeze": ("trunk", "head")}
    with pytest.raises(SaccadeError, match=message):
        train("sot", replace(options, **changes))
    assert not list(options.out.parent.iterdir())


def test_training_continues_on_larger_images(
    options: TrainOptions, parent: Checkpoint, sets: Sets
) -> None:
    """As the usual fine-tuning of a ViT: only positions change, as `--budget r16` samples them."""
    larger = replace(options, data=sets["3"], side_px=16, freeze=("trunk",))
    child = train("sot", larger)
    assert child.preprocessing is not None and parent.preprocessing is not None
    assert (child.config["height_px"], child.preprocessing.height_px) == (16, 16)
    assert child.preprocessing.trained_px == ()
    grids = [TokenGrid(side // 2, side // 2) for side in (8, 16)]
    expected = resampled(parent.weights["trunk.position"], *grids)
    assert torch.equal(child.weights["trunk.position"], expected)
    others = (
        name for name in parent.weights if name.startswith("trunk.") and name != "trunk.position"
    )
    assert all(torch.equal(child.weights[name], parent.weights[name]) for name in others)
    assert child.build()(torch.zeros(1, 16, 16, 1)).shape == (1, 3)


def test_the_usual_side_changes_a_larger_checkpoint(
    options: TrainOptions, parent: Checkpoint
) -> None:
    """Who passes --side-px 32 wants 32, though it is what new models take."""
    assert parent.preprocessing is not None and parent.preprocessing.height_px == 8
    assert started("sot", options).start.preprocessing == parent.preprocessing
    at_32 = started("sot", replace(options, side_px=32)).start
    assert at_32 is not None and at_32.preprocessing.height_px == 32


def test_a_model_of_one_size_does_not_change_it(tmp_path: Path) -> None:
    shipped = Path("shipped:slots-tetrominoes")
    options = TrainOptions(tmp_path / "s.safetensors", init=shipped, side_px=40)
    with pytest.raises(SaccadeError, match="--side-px is 40, but the checkpoint of --init takes"):
        started("slot-attention", options)


def test_another_family_is_refused(options: TrainOptions) -> None:
    with pytest.raises(SaccadeError, match="found family sot, expected nac"):
        train("nac", options)


def test_resumes_the_run_of_the_same_start_only(
    options: TrainOptions, parent: Checkpoint, tmp_path: Path
) -> None:
    given = replace(options, freeze=("trunk",))
    whole = train("sot", given).weights
    other = replace(given, out=tmp_path / "other.safetensors")
    with interrupted(2):
        train("sot", other)
    again = tmp_path / "start.safetensors"
    again.write_bytes(options.out.read_bytes())
    for changes in ({"init": again}, {"freeze": ()}):
        differing = replace(other, resume=True, **changes)
        with pytest.raises(SaccadeError, match=f"--{next(iter(changes))}.* differ"):
            train("sot", differing)
    resumed = train("sot", replace(other, resume=True)).weights
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_frozen_norms_keep_their_statistics() -> None:
    model = torch.nn.ModuleDict(
        {"a": torch.nn.BatchNorm1d(2), "b": torch.nn.BatchNorm1d(2), "ab": torch.nn.Linear(2, 2)}
    )
    freeze(model, ["a"])
    loop.train_mode(model)
    assert [model[name].training for name in ("a", "b", "ab")] == [False, True, True]
    assert model["ab"].weight.requires_grad


def test_data_that_an_export_would_refuse_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"modules": 4, "dim": 8, "propagator_layers": 1, "local_layers": 0}
    options = TrainOptions(tmp_path / "a.safetensors", data="listops", set=small)
    whole = ListOpsTask.calibration

    def without_lengths(task: ListOpsTask) -> dict[str, Any]:
        return {name: array for name, array in whole(task).items() if name != "length"}

    monkeypatch.setattr(ListOpsTask, "calibration", without_lengths)
    with pytest.raises(SaccadeError, match="takes length, but the data 'listops' has only char"):
        train("nac", options)
    assert not list(tmp_path.iterdir())
