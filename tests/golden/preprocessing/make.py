# SPDX-License-Identifier: Apache-2.0
"""Pixels that the authors' evaluation transforms make of the photographs; see README.md."""

import hashlib
import io
import itertools
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import photographs
import PIL
import skimage
import sklearn
import timm
import torch
import torchvision
from PIL import Image, ImageOps
from pipelines import MODES, PIPELINES, Pipeline
from torchvision.datasets.folder import pil_loader

FOLDER = Path(__file__).parent
FULL = (224, 224)
SMALL = (32, 32)
EXAMPLE = "coffee.jpg"  # the one whose normalised values are kept too
TRIALS = (
    "coffee.jpg",
    "astronaut.jpg",
    "text.png",
    "rocket_640x32.jpg",
    "chelsea_17x13.png",
    "coffee_225x301.jpg",
)
THIN = 14  # every 14th row and column of a full-size result is kept as a tensor
Result = dict[str, Any]
Size = tuple[int, int]  # height, width


class Recorder:
    """Cases for the manifest; equal tensors are stored once, under the hash of their bytes."""

    def __init__(self) -> None:
        self.cases: list[Result] = []
        self.tensors: dict[str, np.ndarray] = {}

    def keep(self, array: np.ndarray) -> str:
        name = hashlib.sha256(str(array.shape).encode() + array.tobytes()).hexdigest()[:16]
        self.tensors[name] = array
        return name

    def record(self, group: str, name: str, photograph: str, size: Size, **how: bool) -> None:
        pipeline = (PIPELINES | MODES)[name]
        transform = pipeline.make(size)
        image = _open(photograph, **how)
        normalised = transform(image).numpy()
        pixels = _pixels(normalised, *_scaling(transform))
        case = {
            "group": group,
            "pipeline": name,
            "photograph": photograph,
            "height_px": size[0],
            "width_px": size[1],
            "sha256": hashlib.sha256(pixels.tobytes()).hexdigest(),
        }
        if size[0] > 64:
            case["thin"] = self.keep(np.ascontiguousarray(pixels[::THIN, ::THIN]))
        else:
            case["pixels"] = self.keep(pixels)
        if how.get("normalised"):
            case["normalised"] = self.keep(normalised)
        case |= {name: True for name in ("as_opened", "mended") if how.get(name)}
        self.cases.append(case)


def _path(photograph: str) -> Path:
    folder = photographs.SKLEARN if photograph in photographs.PACKAGED else photographs.FOLDER
    return folder / photograph


def _open(photograph: str, as_opened: bool = False, mended: bool = False, **_: bool) -> Image.Image:
    """As ImageFolder does it (RGB at once), as OpenCLIP's README (RGB last), or mended."""
    path = _path(photograph)
    if not as_opened and not mended:
        return pil_loader(str(path))
    image = Image.open(io.BytesIO(path.read_bytes()))
    image.load()
    return _mend(image) if mended else image


def _mend(image: Image.Image) -> Image.Image:
    """Upright, over white, 16 bits scaled to 8: where this project differs from the authors."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        levels = (np.asarray(image).astype(int) + 128) // 257
        image = Image.fromarray(levels.astype(np.uint8))
    if image.mode in ("LA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _scaling(transform: Any) -> tuple[np.ndarray, np.ndarray]:
    steps = getattr(transform, "transforms", [transform])
    mean, std = (np.asarray(getattr(steps[-1], name), np.float64) for name in ("mean", "std"))
    return mean[:, None, None], std[:, None, None]


def _pixels(normalised: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """The uint8 [h w c] that were normalised; the rounding is checked to be no more than that."""
    levels = (normalised.astype(np.float64) * std + mean) * 255
    rounded = np.round(levels)
    assert np.abs(levels - rounded).max() < 1e-3 and rounded.min() >= 0 and rounded.max() <= 255
    return np.ascontiguousarray(rounded.astype(np.uint8).transpose(1, 2, 0))


def record_everything() -> Recorder:
    recorder = Recorder()
    whole = (*photographs.PACKAGED, *photographs.PHOTOGRAPHS)
    formats = sorted(path.name for path in photographs.FOLDER.glob("*_*.*") if _is_format(path))
    for name in PIPELINES:
        for photograph in (*whole, *photographs.SHAPES):
            recorder.record("sources", name, photograph, FULL)
            recorder.record("sources", name, photograph, SMALL, normalised=photograph == EXAMPLE)
        recorder.record("sizes", name, "china.jpg", (48, 48))
        recorder.record("sizes", name, "astronaut.jpg", (45, 45))
    for photograph in whole:  # the size of the shipped SPARO
        recorder.record("sizes", "sparo-clip", photograph, (40, 40))
    for photograph, size in itertools.product(formats, (FULL, SMALL)):
        recorder.record("formats", "open-clip", photograph, size)
        recorder.record("formats", "open-clip", photograph, size, as_opened=True)
        recorder.record("formats", "vit", photograph, size)
        if _by_design(photograph):
            recorder.record("formats", "open-clip", photograph, size, mended=True)
            recorder.record("formats", "vit", photograph, size, mended=True)
    for photograph, size in itertools.product(TRIALS[:3], ((48, 32), (32, 48))):
        for name in ("open-clip", "sparo-clip", "vit"):
            recorder.record("oblong", name, photograph, size)
    for name, photograph, size in itertools.product(MODES, TRIALS, (FULL, SMALL)):
        recorder.record("modes", name, photograph, size)
    return recorder


def _is_format(path: Path) -> bool:
    return path.name.startswith(("mode_", "exif_"))


def _by_design(name: str) -> str | None:
    """Deliberate differences from the authors, who go by Pillow's convert("RGB")."""
    if name.startswith("exif_"):
        return "turned upright; the authors' loader leaves it lying"
    if name == "mode_grey16.png":
        return "16 bits are scaled to 8; Pillow cuts off what is above 255"
    if any(word in name for word in ("rgba", "_la", "transparent")):
        return "laid over white; the authors' loader drops the alpha channel"
    return None


def _describe(name: str) -> Result:
    path = _path(name)
    with Image.open(path) as image:
        described = {"size": list(image.size), "mode": image.mode, "format": image.format}
    described |= {"by_design": reason} if (reason := _by_design(name)) else {}
    described["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    if name in photographs.PACKAGED:
        return described | {
            "package": "sklearn",
            "path": f"datasets/images/{name}",
            "licence": photographs.PACKAGED[name],
        }
    cut = (photographs.PHOTOGRAPHS | photographs.SHAPES).get(name)
    if cut is None:
        cut = photographs.Cut("chelsea.png", photographs.CC0)
    origin = {"licence": cut.licence, "from": f"scikit-image {cut.source}"}
    return described | {"path": f"photographs/{name}"} | origin


def main() -> None:
    """Write pixels.npz and manifest.json."""
    recorder = record_everything()
    names = sorted({case["photograph"] for case in recorder.cases})
    versions = {
        m.__name__: m.__version__
        for m in (torch, torchvision, open_clip, timm, PIL, np, skimage, sklearn)
    }
    manifest = {
        "made_with": {
            "python": platform.python_version(),
            **versions,
            "older": ["open_clip_torch 2.20.0", "timm 0.3.4"],
        },
        "thin": THIN,
        "photographs": {name: _describe(name) for name in names},
        "pipelines": {name: _pipeline(pipeline) for name, pipeline in (PIPELINES | MODES).items()},
        "cases": recorder.cases,
    }
    np.savez_compressed(FOLDER / "pixels.npz", **dict(sorted(recorder.tensors.items())))
    (FOLDER / "manifest.json").write_text(_lines(manifest) + "\n")
    sys.stdout.write(f"{len(recorder.cases)} cases, {len(recorder.tensors)} tensors\n")


def _lines(manifest: Result) -> str:
    """JSON with one line a photograph, pipeline and case."""
    blocks = []
    for key, value in manifest.items():
        if isinstance(value, dict):
            rows = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()]
            text = "{\n  " + ",\n  ".join(rows) + "\n }"
        elif isinstance(value, list):
            text = "[\n  " + ",\n  ".join(json.dumps(each) for each in value) + "\n ]"
        else:
            text = json.dumps(value)
        blocks.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(blocks) + "\n}"


def _pipeline(pipeline: Pipeline) -> Result:
    transform = pipeline.make(FULL)
    mean, std = (scale.ravel().tolist() for scale in _scaling(transform))
    parts = getattr(transform, "transforms", [transform])
    steps = [getattr(step, "__name__", str(step)) for step in parts]
    return {"read_in": pipeline.read_in, "mean": mean, "std": std, "steps_at_224": steps}


if __name__ == "__main__":
    main()
