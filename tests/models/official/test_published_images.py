# SPDX-License-Identifier: Apache-2.0
"""Published models' own JSON about images is read, and every report says what it was."""

import json
from pathlib import Path
from typing import Any

import official_files
import pytest
import torch
from safetensors.torch import save_file

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import load
from saccade.models.official.conversion import ConversionReport
from saccade.models.official.convert import ConvertOptions, convert

CARD: dict[str, Any] = {
    "input_size": [3, 12, 12],
    "interpolation": "bilinear",
    "crop_pct": 0.8,
    "crop_mode": "center",
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
}


def converted(
    place: Path, pretrained: dict[str, Any] | None, *, folder: bool = False, **options: Any
) -> ConversionReport:
    """A tiny ViT of timm, with its card beside it or in --config."""
    file = official_files.FILES["vit"](place)
    flags = dict(zip(file.flags[0::2], file.flags[1::2], strict=True))
    config = json.loads(Path(flags["--config"]).read_text())
    path, given = file.path, Path(flags["--config"])
    hub = place / "hub"
    if folder:
        hub.mkdir()
        weights = torch.load(file.path, weights_only=True)["model"]
        save_file(
            {name: weight.clone() for name, weight in weights.items()}, hub / "model.safetensors"
        )
        path = hub
        said = {"architecture": "vit_tiny", "pretrained_cfg": pretrained}
        (hub / "config.json").write_text(json.dumps(said))
    elif pretrained is not None:
        given.write_text(json.dumps(config | {"pretrained_cfg": pretrained}))
    return convert(
        "vit",
        path,
        ConvertOptions(
            place / "ours.safetensors", config=given, labels=Path(flags["--labels"]), **options
        ),
    )


@pytest.mark.parametrize("folder", [False, True], ids=["in --config", "beside the weights"])
def test_the_card_of_a_timm_model_is_read(folder: bool, tmp_path: Path) -> None:
    report = converted(tmp_path, CARD, folder=folder)
    checkpoint = load(tmp_path / "ours.safetensors")
    preprocessing = checkpoint.preprocessing
    assert preprocessing is not None
    assert (preprocessing.mean, preprocessing.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (preprocessing.resize_px, preprocessing.interpolation) == ((15, 15), "bilinear")
    # The model scales by them itself.
    assert tuple(checkpoint.config["mean"]) == (0.1, 0.2, 0.3)
    assert report.images_from == checkpoint.card["images_from"] == "its pretrained_cfg"


def test_a_folder_of_timm_tells_its_source_and_its_labels(tmp_path: Path) -> None:
    converted(tmp_path, CARD, folder=True)
    hub, out = tmp_path / "hub", tmp_path / "auto.safetensors"
    content = json.loads((hub / "config.json").read_text())
    content |= {"label_names": ["a", "b", "c", "d", "e"], "num_heads": 3}
    (hub / "config.json").write_text(json.dumps(content))
    report = convert("auto", hub, ConvertOptions(out))
    assert (report.source, load(out).labels) == ("vit", ("a", "b", "c", "d", "e"))
    (hub / "config.json").write_text(json.dumps(content | {"architecture": "convnext_tiny"}))
    with pytest.raises(
        SaccadeError, match=r"architecture 'convnext_tiny', expected .* vit_.*, deit_"
    ):
        convert("auto", hub, ConvertOptions(out, force=True))


@pytest.mark.parametrize("slots", [False, True])
def test_a_folder_of_open_clip_tells_its_source(slots: bool, tmp_path: Path) -> None:
    source = "sparo-clip" if slots else "open-clip"
    file = official_files.FILES[source](tmp_path)
    flags = dict(zip(file.flags[0::2], file.flags[1::2], strict=True))
    hub = tmp_path / "hub"
    hub.mkdir()
    said = {"model_cfg": json.loads(Path(flags["--config"]).read_text())}
    (hub / "open_clip_config.json").write_text(json.dumps(said))
    (hub / "open_clip_pytorch_model.bin").write_bytes(file.path.read_bytes())
    assert convert("auto", hub, ConvertOptions(tmp_path / "ours.safetensors")).source == source


def test_a_folder_that_tells_nothing(tmp_path: Path) -> None:
    options = ConvertOptions(tmp_path / "ours.safetensors")
    with pytest.raises(SaccadeError, match=r"neither config.json with model_type .* SOURCE FILE"):
        convert("auto", tmp_path, options)
    with pytest.raises(SaccadeError, match="found nothing there"):
        convert("auto", tmp_path / "missing", options)


def test_every_report_says_what_it_assumed_and_where_from(tmp_path: Path) -> None:
    said = converted(tmp_path, None).to_text()
    assert "12 x 12 px RGB: resized to cover 13 x 13 px (bicubic), cropped at the center" in said
    assert "mean 0.5 0.5 0.5, std 0.5 0.5 0.5" in said
    assert "(from timm's vision_transformer, crop_pct 0.9)" in said


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"resize_mode": "squash", "resize_px": [12, 12], "exif": false}')
    report = converted(tmp_path, CARD, preprocessing=own)
    preprocessing = load(tmp_path / "ours.safetensors").preprocessing
    assert preprocessing is not None
    assert (preprocessing.resize_mode, preprocessing.exif, preprocessing.interpolation) == (
        "squash",
        False,
        "bilinear",
    )
    assert report.images_from == (
        "resize_mode, resize_px, exif from --preprocessing, the rest from its pretrained_cfg"
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another size": ({"input_size": [3, 16, 16]}, "height_px is 16, but the weights are for 12"),
    "a size of two numbers": (
        {"input_size": [12, 12]},
        "input_size is .*expected a list of 3 values, each a whole",
    ),
    "an unknown filter": ({"interpolation": "random"}, "interpolation is 'random', expected one o"),
    "an unknown crop": ({"crop_mode": "corner"}, "crop_mode is 'corner', expected one of center"),
    "a crop of nothing": ({"crop_pct": -1}, "crop_pct is -1, expected at least 0 and at most 1"),
    "one mean too few": ({"mean": [0.1, 0.2]}, "mean is .*expected 3 finite numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses_a_card_that_does_not_fit(case: str, tmp_path: Path) -> None:
    changes, reason = WRONG[case]
    with pytest.raises(SaccadeError, match=reason):
        converted(tmp_path, CARD | changes)
    assert not (tmp_path / "ours.safetensors").exists()


def test_a_hub_folder_without_weights_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny"}')
    with pytest.raises(SaccadeError, match=r"no model.safetensors or pytorch_model.bin"):
        convert("vit", tmp_path, ConvertOptions(tmp_path / "ours.safetensors"))
