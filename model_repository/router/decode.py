# SPDX-License-Identifier: Apache-2.0
"""An encoded image to the model's input: what is converted, what is refused, and why."""

import io
import re
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "WEBP")
SIGNATURES = {
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "WebP": re.compile(rb"RIFF....WEBP", re.DOTALL),
}
MIB = 2**20


class ImageRefused(Exception):
    """The message says what was found and what is allowed; it is sent to the caller."""


class Wanted(NamedTuple):
    """The model's input and the caps on what may become it."""

    height_px: int
    width_px: int
    channels: int
    resize: str
    max_image_mib: int
    max_megapixels: int
    max_side_px: int

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Wanted":
        """From the `preprocessing` of routes.json; what the graph itself does is left out."""
        return cls(**{field: values[field] for field in cls._fields})


def decode(data: bytes, wanted: Wanted) -> np.ndarray:
    """One encoded image as the model takes it.

    JPEG, PNG and WebP; EXIF rotation is applied, alpha is laid over white, palette and CMYK
    become colours, 16 bits become 8, and then grey or RGB as the model wants.
    Shapes: bytes -> uint8 [h w c].
    Raises: ImageRefused, before any pixel is decoded where a cap is the reason.
    """
    if not data:
        raise ImageRefused("image has 0 bytes, expected a JPEG, PNG or WebP file")
    if len(data) > wanted.max_image_mib * MIB:
        raise ImageRefused(
            f"image has {len(data) / MIB:.1f} MiB, allowed are {wanted.max_image_mib} MiB"
        )
    image = _open(data, wanted)
    _check_size(image, wanted)
    try:
        return _convert(image, wanted)
    except ImageRefused:
        raise
    except Exception as error:
        raise ImageRefused(
            f"{image.format} image of {len(data)} bytes is truncated or corrupt: its "
            f"{image.width} x {image.height} pixels cannot be decoded, expected a whole file"
        ) from error


def _open(data: bytes, wanted: Wanted) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        pixels = int(re.findall(r"[0-9]+", str(error))[0])
        raise ImageRefused(
            f"image declares {pixels / 1e6:.1f} megapixels, allowed are {wanted.max_megapixels} "
            "megapixels"
        ) from error
    except Exception as error:
        kind = next((name for name, start in SIGNATURES.items() if start.match(data)), None)
        raise ImageRefused(
            f"{kind} image of {len(data)} bytes is truncated or corrupt, expected a whole file"
            if kind
            else f"{len(data)} bytes starting with {data[:8].hex(' ')} are no image that is read "
            "here, expected a JPEG, PNG or WebP file"
        ) from error


def _check_size(image: Image.Image, wanted: Wanted) -> None:
    width, height = image.size
    if max(width, height) > wanted.max_side_px:
        raise ImageRefused(
            f"image is {width} x {height} pixels, allowed are {wanted.max_side_px} pixels a side"
        )
    if width * height > wanted.max_megapixels * 1_000_000:
        raise ImageRefused(
            f"image is {width} x {height} pixels ({width * height / 1e6:.1f} megapixels), allowed "
            f"are {wanted.max_megapixels} megapixels"
        )
    # A photograph with a preview in the same JPEG (MPO) is one image; only these two animate.
    frames = getattr(image, "n_frames", 1) if image.format in ("PNG", "WEBP") else 1
    if frames > 1:
        raise ImageRefused(f"image is animated with {frames} frames, allowed is one")


def _convert(image: Image.Image, wanted: Wanted) -> np.ndarray:
    mode = "L" if wanted.channels == 1 else "RGB"
    image.load()
    # Looking for the rotation costs more than decoding a small image: first see if there is any.
    if any(key in image.info for key in ("exif", "xmp", "XML:com.adobe.xmp")):
        image = ImageOps.exif_transpose(image)
    if image.mode != mode or "transparency" in image.info:
        image = _flat(image).convert(mode)
    size = (wanted.width_px, wanted.height_px)
    if image.size != size:
        image = image.resize(size, Image.Resampling[wanted.resize.upper()])
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels.reshape(wanted.height_px, wanted.width_px, wanted.channels)


def _flat(image: Image.Image) -> Image.Image:
    """Eight bits and nothing to see through."""
    if image.mode.startswith("I"):
        return _from_16_bits(image)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB") if image.mode not in ("1", "L") else image


def _from_16_bits(image: Image.Image) -> Image.Image:
    levels = np.asarray(image).astype(np.uint32)
    grey = ((levels + 128) // 257).astype(np.uint8)
    if isinstance(transparent := image.info.get("transparency"), int):
        grey[levels == transparent] = 255
    return Image.fromarray(grey)
