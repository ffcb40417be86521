# SPDX-License-Identifier: Apache-2.0
"""Photographs as each source's authors make them the model's input: the same pixels."""

import hashlib
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import TESTS

from saccade.models.image_decoding import decode
from saccade.models.official.authors_images import authors_images, with_published
from saccade.models.official.conversion import Conversion, Original
from saccade.models.official.convert import SOURCES
from saccade.models.preprocessing import Preprocessing
from saccade.models.sot.config import SoTConfig

FOLDER = TESTS / "golden" / "preprocessing"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())
UNALIASED: dict[str, Any] = json.loads((FOLDER / "unaliased.json").read_text())
THIN = int(GOLDEN["thin"])
# A pipeline's name where it is another's than the source's own authors.
NAMES = {"vit/torchvision": "torchvision vit", "swin/torchvision": "torchvision swin"}
# What the authors' loaders do with a file before the transform.
OPENED = {"exif": False, "min_side_px": 1}
MENDED = {"exif": True, "alpha": "white", "min_side_px": 1}
# timm's own model cards, as `pretrained_cfg` has them.
_TIMM = {"interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}
_AUGREG = _TIMM | {"mean": [0.5] * 3, "std": [0.5] * 3}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "deit/timm": ("pretrained_cfg", _TIMM),
    "swin/timm": ("pretrained_cfg", _TIMM),
    "timm squash": ("pretrained_cfg", _AUGREG | {"crop_mode": "squash"}),
    "timm border": ("pretrained_cfg", _AUGREG | {"crop_mode": "border"}),
    "timm crop 1.0": ("pretrained_cfg", _AUGREG | {"crop_pct": 1.0}),
    "timm lanczos": ("pretrained_cfg", _AUGREG | {"interpolation": "lanczos"}),
    "timm bilinear": ("pretrained_cfg", _AUGREG | {"interpolation": "bilinear"}),
    "timm nearest": ("pretrained_cfg", _AUGREG | {"interpolation": "nearest"}),
    "open_clip longest": ("preprocess_cfg", {"resize_mode": "longest"}),
    "open_clip longest 127": ("preprocess_cfg", {"resize_mode": "longest", "fill_color": 127}),
    "older open_clip longest": ("preprocess_cfg", {"resize_mode": "longest"}),
    "open_clip squash": ("preprocess_cfg", {"resize_mode": "squash"}),
    "open_clip squash bilinear": (
        "preprocess_cfg",
        {"resize_mode": "squash", "interpolation": "bilinear"},
    ),
}


class Sizes:
    """Sizes that a model's configuration says of its images."""

    channels = 3

    def __init__(self, case: dict[str, Any]) -> None:
        self.height_px, self.width_px = case["height_px"], case["width_px"]
        scaling = GOLDEN["pipelines"][case["pipeline"]]
        self.mean, self.std = tuple(scaling["mean"]), tuple(scaling["std"])


def preprocessing_of(case: dict[str, Any]) -> Preprocessing:
    """As `convert` writes it into the checkpoint of that source."""
    pipeline = case["pipeline"]
    if pipeline == "torchvision crop beyond":
        side = int(0.875 * case["height_px"])
        config = Sizes(case)
        sides = (config.height_px, config.width_px)
        return Preprocessing(
            *sides, 3, config.mean, config.std, resize_px=(side, side), interpolation="bicubic"
        )
    if pipeline not in PUBLISHED:
        return authors_images(NAMES.get(pipeline, pipeline), Sizes(case)).preprocessing
    name, fields = PUBLISHED[pipeline]
    source = "open-clip" if name == "preprocess_cfg" else "swin"
    usual = authors_images(source, Sizes(case)).preprocessing
    config = SoTConfig(channels=3, mean=usual.mean, std=usual.std)
    converted = Conversion("sot", config, {}, {}, usual)
    preprocessing = with_published(converted, Original("", {}, {name: fields})).preprocessing
    assert preprocessing is not None
    return preprocessing


def photograph(name: str) -> bytes:
    said = GOLDEN["photographs"][name]
    path = FOLDER / said["path"]
    if said.get("package"):
        spec = find_spec(said["package"])  # not imported: that takes seconds
        if spec is None or spec.origin is None:
            pytest.skip(f"{said['package']} is not installed: pip install '.[export]'")
        path = Path(spec.origin).parent / said["path"]
    data = path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == said["sha256"]
    return data


def largest_difference(case: dict[str, Any], preprocessing: Preprocessing) -> int:
    """Of the pixels, from 0 to 255."""
    actual = decode(photograph(case["photograph"]), preprocessing.wanted())
    if hashlib.sha256(actual.tobytes()).hexdigest() == case["sha256"]:
        return 0
    with np.load(FOLDER / "pixels.npz") as tensors:
        expected = tensors[case.get("pixels") or case["thin"]]
    kept = actual if "pixels" in case else actual[::THIN, ::THIN]
    assert kept.shape == expected.shape
    # All that is not stored differs by its hash alone: as much as one can tell, and more than 0.
    return max(1, int(np.abs(kept.astype(int) - expected).max()))


PIPELINES = sorted({case["pipeline"] for case in GOLDEN["cases"]})


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pixels_are_the_authors(pipeline: str) -> None:
    cases = [case for case in GOLDEN["cases"] if case["pipeline"] == pipeline]
    assert len({case["photograph"] for case in cases}) >= (6 if pipeline in PUBLISHED else 12) or (
        pipeline == "torchvision crop beyond"
    )
    worst = {}
    for case in cases:
        usual = preprocessing_of(case)
        opened = MENDED if case.get("mended") else OPENED
        before = "after" if case.get("as_opened") else "before"
        by_design = "by_design" in GOLDEN["photographs"][case["photograph"]]
        if by_design and case["photograph"].startswith("mode_grey16") and not case.get("mended"):
            continue  # Pillow cuts 16 bits off; ours are scaled to 8
        said = replace(usual, **opened, conversion=before)  # type: ignore[arg-type]
        name = f"{case['photograph']} {case['height_px']} x {case['width_px']}"
        worst[name] = largest_difference(case, said)
    assert {name: difference for name, difference in worst.items() if difference > 1} == {}


@pytest.mark.parametrize("pipeline", ["invariant-slot-attention", "tf.image.resize", "cv2.resize"])
def test_pixels_without_antialiasing_are_the_authors(pipeline: str) -> None:
    cases = [case for case in UNALIASED["cases"] if case["pipeline"] == pipeline]
    with np.load(FOLDER / "unaliased.npz") as levels:
        for case in cases:
            if (pipeline, case["interpolation"]) == ("cv2.resize", "nearest"):
                continue  # it takes the pixel at the corner, no other library does
            case["pipeline"] = "sot"  # whose mean and std are ImageNet's: pixels have none
            usual = authors_images("invariant-slot-attention", Sizes(case)).preprocessing
            said = replace(
                usual, cut=tuple(case.get("crop", ())), resize_mode="squash",
                interpolation=case["interpolation"],
            )  # fmt: skip
            actual = decode(photograph(case["photograph"]), said.wanted()).astype(float)
            expected = levels[case["levels"]].astype(float)
            kept = actual if actual.shape == expected.shape else actual[::THIN, ::THIN]
            assert np.abs(kept - expected).max() <= 1, case


def test_every_source_of_images_has_its_authors_preprocessing() -> None:
    case = {"pipeline": "vit", "height_px": 32, "width_px": 32}
    # transformers states it in each folder, see test_hugging_face.py.
    for source in set(SOURCES) - {"tvmax-vqa", "transformers"}:
        assert authors_images(source, Sizes(case)).origin


FULL = {
    "open-clip": ("shortest", 224, "bicubic", "after", True),
    "sparo-clip": ("shortest", 224, "bicubic", "after", True),
    "sparo-dino": ("shortest", 256, "bicubic", "before", True),
    "sot": ("shortest", 256, "bicubic", "before", True),
    "vit": ("shortest", 248, "bicubic", "before", True),
    "deit": ("shortest", 256, "bicubic", "before", True),
    "swin": ("shortest", 256, "bicubic", "before", True),
    "torchvision vit": ("shortest", 256, "bilinear", "before", True),
    "torchvision swin": ("shortest", 232, "bicubic", "before", True),
    "nac": ("shortest", 256, "bicubic", "before", True),
    "invariant-slot-attention": ("shortest", 224, "bilinear", "before", False),
}


@pytest.mark.parametrize("source", FULL)
def test_what_convert_assumes_of_each_source(source: str) -> None:
    case = {"pipeline": "vit", "height_px": 224, "width_px": 224}
    preprocessing = authors_images(source, Sizes(case)).preprocessing
    mode, side, interpolation, conversion, antialias = FULL[source]
    assert (preprocessing.resize_mode, preprocessing.resize_px) == (mode, (side, side))
    assert (preprocessing.interpolation, preprocessing.antialias) == (interpolation, antialias)
    assert (preprocessing.conversion, preprocessing.alpha, preprocessing.exif) == (
        conversion,
        "dropped",
        True,
    )


def test_sizes_that_are_resized_in_another_way() -> None:
    large = Sizes({"pipeline": "vit", "height_px": 384, "width_px": 384})
    assert authors_images("swin", large).preprocessing.resize_mode == "squash"
    assert authors_images("vit", large).preprocessing.resize_px == (384, 384)
    assert authors_images("torchvision vit", large).preprocessing.interpolation == "bicubic"
    usual = Sizes({"pipeline": "vit", "height_px": 224, "width_px": 224})
    for source, sizes, side in (
        ("torchvision vit", {"layers": 24, "patch_px": 16}, 242),
        ("torchvision swin", {"dim": 96, "layers": 24}, 246),
        ("torchvision swin", {"dim": 128, "layers": 24}, 238),
    ):
        assert authors_images(source, usual, **sizes).preprocessing.resize_px == (side, side)
