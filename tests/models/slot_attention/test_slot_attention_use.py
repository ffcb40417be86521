# SPDX-License-Identifier: Apache-2.0
"""Editing slots, the authors' files, and a short training run."""

from dataclasses import replace

import numpy as np
import pytest
from places import TESTS
from support.models.sizes import TINY

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Original
from saccade.models.slot_attention.edit import edited_state

GOLDEN = TESTS / "golden" / "slot_attention"
STATE = {
    "slots": np.arange(12, dtype=np.float32).reshape(1, 3, 4),
    "positions": np.array([[[0.0, 0.5], [-0.9, 0.0], [0.2, 0.2]]], np.float32),
    "scales": np.full((1, 3, 2), 0.4, np.float32),
}


def test_one_slot_is_edited_and_no_other():
    edited = edited_state(STATE, slot=2, move=(0.3, -0.1), scale=1.5)
    assert np.allclose(edited["positions"][0, 2], [0.5, 0.1])
    assert np.allclose(edited["scales"][0, 2], 0.6)
    for name, value in edited.items():
        assert np.array_equal(value[:, :2], STATE[name][:, :2]) and value.dtype == np.float32
    assert np.array_equal(edited["slots"], STATE["slots"])
    removed = edited_state(STATE, slot=0, remove=True)
    assert {value.shape[1] for value in removed.values()} == {2}
    assert np.array_equal(removed["slots"][0, 0], STATE["slots"][0, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot": 3}, "slot 3 does not exist: found 3 slots. Choose 0 to 2"),
        ({"slot": -1}, "slot -1 does not exist"),
        ({"slot": 1, "move": (-0.3, 0.0)}, "slot 1 is at -0.9,0 and would move to -1.2,0"),
        ({"slot": 2, "move": (0.0, 0.85)}, "slot 2 is at 0.2,0.2 and would move to 0.2,1.05"),
        ({"slot": 1, "move": (float("nan"), 0.0)}, "expected two finite numbers"),
        ({"slot": 1, "scale": 6.0}, "would get 2.4,2.4, expected from 0.001 to 2"),
        ({"slot": 1, "scale": 0.0}, "scale 0: expected a number above 0"),
    ],
)
def test_an_edit_that_cannot_be_is_refused(changes, message):
    with pytest.raises(SaccadeError, match=message):
        edited_state(STATE, **changes)


def test_a_slot_may_come_to_the_very_edge():
    edge = np.array([[[0.0, np.nextafter(np.float32(1), np.float32(2))]]], np.float32)
    state = {"slots": STATE["slots"][:, :1], "positions": edge}
    assert edited_state(state, slot=0, move=(1.0, 0.0))["positions"][0, 0, 0] == 1


def test_an_edit_needs_what_it_changes():
    bare = {"slots": STATE["slots"]}
    with pytest.raises(SaccadeError, match="have no positions, only slots"):
        edited_state(bare, slot=0, move=(0.1, 0.0))
    with pytest.raises(SaccadeError, match="have no scales"):
        edited_state(bare | {"positions": STATE["positions"]}, slot=0, scale=2.0)
    assert np.array_equal(edited_state(bare, slot=0)["slots"], STATE["slots"])
    with pytest.raises(SaccadeError, match="only slot"):
        edited_state({"slots": STATE["slots"][:, :1]}, slot=0, remove=True)


def official_of(config: dict | None, rename=str):
    import torch

    with np.load(GOLDEN / "model_tssa.npz") as data:
        tensors = {
            rename(key.removeprefix("params/")): torch.from_numpy(data[key])
            for key in data.files
            if key.startswith("params/")
        }
    return Original(path="authors.npz", tensors=tensors, config=config)


CONFIG = {
    "encoder_strides": [2, 2],
    "decoder_strides": [2, 2, 1],
    "decoder_transposed": [True, True, False],
}


def test_authors_file_is_read_whole():
    official = official_of(CONFIG)
    from saccade.models.families import build
    from saccade.models.official.sources.invariant_slot_attention import convert

    converted = convert(official)
    expected = build("slot-attention", converted.config.to_dict()).state_dict()
    actual = {name: value.shape for name, value in converted.weights.items()}
    assert actual == {name: value.shape for name, value in expected.items()}
    assert set(converted.names) == set(expected)
    used = {key for keys in converted.names.values() for key in keys.split(", ")}
    assert used == set(official.tensors)
    config = converted.config
    assert (config.attention, config.scales_factor, config.height_px) == ("ts-sa", 5.0, 16)
    assert (config.slots, config.slot_dim, config.qkv_dim, config.grid_mlp_dim) == (4, 16, 16, 20)
    assert any("rounds 3, " in note for note in converted.notes)


def test_authors_scopes_may_have_other_names():
    from_debug_paths = {
        "FrameEncoder_0": "encoder",
        "SlotAttentionTranslScaleEquiv_0": "corrector",
        "SiameseSpatialBroadcastDecoder_0": "decoder",
        "ParamStateInitRandomPositionsScales_0": "initializer",
    }

    def rename(key: str) -> str:
        scope, rest = key.split("/", 1)
        return f"{from_debug_paths[scope]}/{rest}"

    official = official_of(CONFIG, rename=rename)
    from saccade.models.official.sources.invariant_slot_attention import convert

    with pytest.raises(SaccadeError, match='--config with the key "attention"'):
        convert(official)
    named = official_of(CONFIG | {"attention": "ts-sa"}, rename=rename)
    assert convert(named).weights.keys() == convert(official_of(CONFIG)).weights.keys()


def test_what_a_file_cannot_tell_is_asked_for():
    official = official_of(None)
    from saccade.models.official.sources.invariant_slot_attention import convert

    with pytest.raises(SaccadeError, match="encoder_strides, decoder_strides, decoder_transposed"):
        convert(official)
    without = {key: value for key, value in official.tensors.items() if "alphas" not in key}
    with pytest.raises(SaccadeError, match=r"found 0 tensors named \.\.\.alphas/kernel"):
        convert(type(official)(path="authors.npz", tensors=without, config=CONFIG))


def test_a_short_run_learns_to_paint(tmp_path):
    from saccade.models.slot_attention.training import task
    from saccade.models.training.loop import fit
    from saccade.models.training.options import TrainOptions

    fields = TINY["slot-attention"] | {"side_px": 14, "positions": "left", "attention": "sa"}
    options = TrainOptions(out=tmp_path / "m.safetensors", set=fields, steps=12, batch=8)
    job = task(options)
    assert job.model.config.grid_embedding == "project_add", "a baseline sees places"
    before = job.validate()
    assert next(iter(before)) == "fg_ari" and "fg_ari_anywhere" in before
    job.recipe = replace(job.recipe, validate_every=12)
    fit(job, options)
    assert job.validate()["negative_mse"] > before["negative_mse"]
    saved = job.saved()
    assert saved["calibration"]["image"].shape == (256, 14, 14, 3)
    assert saved["calibration"]["masks"].shape == (256, 14, 14)
    with pytest.raises(SaccadeError, match="--set: a field is 'colour'"):
        task(TrainOptions(out=tmp_path / "m.safetensors", set={"colour": 1}))
    with pytest.raises(SaccadeError, match="side_px=twenty: expected a whole number"):
        task(TrainOptions(out=tmp_path / "m.safetensors", set={"side_px": "twenty"}))
    with pytest.raises(
        SaccadeError, match="only generated scenes have it, but the data is 'digits'"
    ):
        task(TrainOptions(out=tmp_path / "m.safetensors", data="digits", set={"side_px": 14}))
