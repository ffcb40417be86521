# SPDX-License-Identifier: Apache-2.0
"""A checkpoint comes back as it was written, and every other file is refused with a reason."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.checkpoint import Checkpoint, load, save
from saccade.models.nac.model import NAC, NACConfig
from saccade.models.preprocessing import Preprocessing

CONFIG = NACConfig(modules=4, readout_modules=2, dim=8, code_dim=4, heads=2, ffn_dim=8, seed=3)


def written(path: Path, **changes: object) -> Checkpoint:
    rng = np.random.default_rng(0)
    content: dict = {
        "family": "nac",
        "config": CONFIG.to_dict(),
        "weights": NAC(CONFIG).state_dict(),
        "preprocessing": Preprocessing(8, 8, 1, (0.5,), (0.5,)),
        "labels": tuple("0123456789"),
        "calibration": {
            "image": rng.integers(0, 256, (256, 8, 8, 1), dtype=np.uint8),
            "labels": rng.integers(0, 10, 256),
        },
        "card": {"data": "digits"},
    }
    return save(path, **(content | changes))


def test_comes_back_whole_and_builds_the_same_model(tmp_path: Path) -> None:
    saved = written(tmp_path / "a.safetensors")
    loaded = load(tmp_path / "a.safetensors")
    assert loaded.sha256 == saved.sha256
    assert loaded.labels == tuple("0123456789")
    assert loaded.card == {"data": "digits"}
    assert loaded.calibration["image"].shape == (256, 8, 8, 1)
    model = loaded.build()
    assert not model.training
    images = torch.from_numpy(loaded.calibration["image"][:3])
    assert torch.equal(model(images), NAC(CONFIG).eval()(images))
    assert loaded.build(torch.float64)(images).dtype == torch.float64


def test_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    written(tmp_path / "a.safetensors")
    written(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_large_weights_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = written(tmp_path / "a.safetensors")
    stored = {name: value.data_ptr() for name, value in checkpoint.weights.items()}

    def shared(dtype: torch.dtype) -> set[bool]:
        state = checkpoint.build(dtype).state_dict()
        return {stored[name] == value.data_ptr() for name, value in state.items() if value.dim()}

    assert shared(torch.float32) == {False}
    monkeypatch.setattr("saccade.models.families.SHARED_BYTES", 0)
    assert shared(torch.float32) == {True}


def test_what_was_written_does_not_change_with_the_model(tmp_path: Path) -> None:
    model = NAC(CONFIG)
    checkpoint = written(tmp_path / "a.safetensors", weights=model.state_dict())
    before = {name: value.clone() for name, value in checkpoint.weights.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    written(tmp_path / "a.safetensors", weights=model.state_dict())
    assert all(torch.equal(checkpoint.weights[name], value) for name, value in before.items())


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written(path)
    with pytest.raises(SaccadeError, match="changed while it was read"):
        load(path, check=lambda _: written(path, card={"data": "digits-sum"}) and None)
    assert load(path).card == {"data": "digits-sum"}


def test_finite_weights_may_have_a_sum_that_is_not(tmp_path: Path) -> None:
    weights = NAC(CONFIG).state_dict()
    weights["head.weight"].fill_(3e38)
    written(tmp_path / "a.safetensors", weights=weights)
    weights["head.weight"][0, 0] = torch.nan
    with pytest.raises(SaccadeError, match=r"head\.weight contains NaN"):
        written(tmp_path / "b.safetensors", weights=weights)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        path.with_name(".tmp123").touch()  # as safetensors does
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(SaccadeError, match=r"a\.safetensors: .*the disk is full"):
        written(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


MISFITS = {
    "unknown family": ({"family": "vit"}, "family 'vit' is unknown"),
    "config out of range": ({"config": CONFIG.to_dict() | {"modules": 0}}, "modules is 0"),
    "unknown config key": ({"config": CONFIG.to_dict() | {"wings": 2}}, "wings"),
    "other shapes": ({"config": CONFIG.to_dict() | {"dim": 16}}, r"found \(.*expected \("),
    "missing keys": ({"weights": {"head.bias": torch.zeros(10)}}, "Missing .* keys"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_said(case: str, tmp_path: Path) -> None:
    changes, reason = MISFITS[case]
    with pytest.raises(SaccadeError, match=f"(?s){reason}"):
        written(tmp_path / "a.safetensors", **changes).build()


def test_calibration_of_another_shape_is_refused(tmp_path: Path) -> None:
    images = np.zeros((4, 9, 9, 1), dtype=np.uint8)
    labels = np.zeros(4, dtype=np.int64)
    with pytest.raises(ShapeError, match="calibration images"):
        written(tmp_path / "a.safetensors", calibration={"image": images, "labels": labels})
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_from_before_resize_modes_squashes() -> None:
    from importlib import resources

    for path in sorted(Path(str(resources.files("saccade.models.shipped"))).glob("*.safetensors")):
        with path.open("rb") as file:
            head = file.read(int.from_bytes(file.read(8), "little"))
        written = json.loads(json.loads(head)["__metadata__"]["saccade"])["preprocessing"]
        if written is None or "resize_mode" in written:
            continue
        preprocessing = Preprocessing.from_dict(written)
        assert (preprocessing.resize_mode, preprocessing.interpolation) == (
            "squash",
            written["resize"],
        )
        assert (preprocessing.conversion, preprocessing.alpha, preprocessing.min_side_px) == (
            "before",
            "white",
            1,
        )
    old = {"resize": "lanczos", **dict.fromkeys(("height_px", "width_px"), 8)}
    caps = {"max_image_mib": 1, "max_megapixels": 2, "max_side_px": 3, "max_images": 4}
    squashing = Preprocessing.from_dict(old | caps | {"channels": 1, "mean": [0.0], "std": [1.0]})
    assert (squashing.resize_mode, squashing.resize_px) == ("squash", (8, 8))
    assert (squashing.interpolation, squashing.max_side_px) == ("lanczos", 3)


PREPROCESSING = {
    "no height": {"height_px": 0},
    "two channels": {"channels": 2, "mean": (0.0, 0.0), "std": (1.0, 1.0)},
    "mean of another length": {"mean": (0.0, 0.0, 0.0)},
    "no spread": {"std": (0.0,)},
    "not a number": {"mean": (float("nan"),)},
    "unknown filter": {"interpolation": "magic"},
    "unknown resize mode": {"resize_mode": "magic"},
    "one side to resize to": {"resize_px": [8]},
    "a fill beyond white": {"fill": [256]},
    "no antialiasing that is not known": {"antialias": False, "interpolation": "bicubic"},
    "an order of one channel": {"channel_order": "bgr"},
    "text for a flag": {"exif": "no"},
    "a flag for a number": {"max_images": True},
}


@pytest.mark.parametrize("case", PREPROCESSING)
def test_preprocessing_out_of_range(case: str) -> None:
    good = Preprocessing(8, 8, 1, (0.5,), (0.5,)).to_dict()
    assert Preprocessing.from_dict(good).to_dict() == good
    with pytest.raises(SaccadeError, match="Preprocessing: "):
        Preprocessing.from_dict(good | PREPROCESSING[case])


def test_a_folder_names_the_checkpoint_in_it(tmp_path):
    (tmp_path / "own.safetensors").touch()
    with pytest.raises(SaccadeError, match=r"Pass the checkpoint in it: .*own\.safetensors"):
        load(tmp_path)


def test_a_folder_of_a_model_hub_names_the_command_that_converts_it(tmp_path):
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(
        SaccadeError, match=r"found a folder.* Convert it first: saccade convert .*/vit --o"
    ):
        load(tmp_path / "vit")
