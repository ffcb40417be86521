# SPDX-License-Identifier: Apache-2.0
"""Decode an image into the model's input, or refuse it; runs in the router (numpy, Pillow)."""

import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageOps

T = TypeVar("T")
FORMATS = ("JPEG", "PNG", "WEBP")
SIGNATURES = {
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "WebP": re.compile(rb"RIFF....WEBP", re.DOTALL),
}
# A resized image larger than this, or than this many inputs, is cropped without being made whole.
WHOLE_PIXELS, WHOLE_INPUTS = 4_000_000, 16
NEAR, FAR = (1.5, -2.5, 0, 1), (-0.5, 2.5, -4, 2)  # the cubics of the bicubic filter
# Pillow's filters by distance, and their reach in pixels of the larger of the two grids.
FILTERS = {
    "bilinear": (1, lambda x: 1 - x),
    "bicubic": (2, lambda x: np.where(x < 1, np.polyval(NEAR, x), np.polyval(FAR, x))),
    "lanczos": (3, lambda x: np.sinc(x) * np.sinc(x / 3)),
}


class ImageRefused(Exception):
    """An image is refused; the message (found, allowed, what to do) is sent to the caller."""


class ImageInput(NamedTuple):
    """The model's input, how an image is turned into it, and the caps on images."""

    height_px: int
    width_px: int
    channels: int
    resize_mode: str
    resize_px: tuple[int, int]
    interpolation: str
    antialias: bool
    fill: tuple[int, ...]
    conversion: str
    alpha: str
    exif: bool
    cut: tuple[int, ...]
    channel_order: str
    max_image_mib: int
    max_megapixels: int
    max_side_px: int
    min_side_px: int
    crop_rounding: str = "even"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ImageInput":
        """Read `preprocessing` of routes.json, without what the graph itself does."""
        values = cls._field_defaults | values
        return cls(**{field: values[field] for field in cls._fields})


def decode(data: bytes, wanted: ImageInput) -> np.ndarray:
    """Decode one image into the model's input.

    Accepts JPEG, PNG and WebP; 16 bits become 8, palettes and CMYK become RGB.
    Shapes: bytes -> uint8 [h w c].
    Raises: ImageRefused; if the reason is a cap, before any pixel is decoded.
    """
    return opened(data, wanted, fit)


def opened(data: bytes, wanted: ImageInput, use: Callable[[Image.Image, ImageInput], T]) -> T:
    """Decode one image and return what `use` makes of it.

    Raises: as `decode`.
    """
    if not data:
        raise ImageRefused("image has 0 bytes, expected a JPEG, PNG or WebP file: save it again")
    if len(data) > wanted.max_image_mib * 2**20:
        raise ImageRefused(
            f"image has {len(data) / 2**20:.1f} MiB, at most {wanted.max_image_mib} MiB are "
            "allowed: make it smaller"
        )
    image = _open(data, wanted)
    _check_size(image, wanted)
    try:
        image.load()
        return use(image, wanted)
    except ImageRefused:
        raise
    except Exception as error:
        raise ImageRefused(
            f"{image.format} image of {len(data)} bytes is truncated or corrupt: its "
            f"{image.width} x {image.height} pixels cannot be decoded. Expected a whole file: "
            "copy or save it again"
        ) from error


def fit(image: Image.Image, wanted: ImageInput) -> np.ndarray:
    """Convert an open image of any mode and size into the model's input.

    Shapes: -> uint8 [h w c].
    Raises: ImageRefused if it is smaller than the region to cut out.
    """
    image = upright(image, wanted)
    mode = "L" if wanted.channels == 1 else "RGB"
    size, window = _geometry(image.size, wanted)
    resize = _pillow if wanted.antialias else _sampled
    pixels = np.asarray(_converted(resize(image, size, window, wanted.interpolation), mode))
    pixels = pixels.reshape(*pixels.shape[:2], wanted.channels)
    if wanted.channel_order == "bgr":
        pixels = pixels[..., ::-1]
    return np.ascontiguousarray(_padded(pixels, wanted))


def upright(image: Image.Image, wanted: ImageInput) -> Image.Image:
    """Return the rotated, opaque image that will be resized, or its cut.

    Raises: ImageRefused if it is smaller than the region to cut out.
    """
    # Applying the rotation costs more than decoding a small image: first check if there is one.
    if wanted.exif and any(key in image.info for key in ("exif", "xmp", "XML:com.adobe.xmp")):
        image = ImageOps.exif_transpose(image)
    image = _opaque(image, wanted.alpha)
    image = _cut(image, *wanted.cut) if wanted.cut else image
    mode = "L" if wanted.channels == 1 else "RGB"
    return _converted(image, mode) if wanted.conversion == "before" else image


def _open(data: bytes, wanted: ImageInput) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        pixels = int(re.findall(r"[0-9]+", str(error))[0])
        raise ImageRefused(
            f"image declares {pixels / 1e6:.1f} megapixels, at most {wanted.max_megapixels} "
            "megapixels are allowed: make it smaller"
        ) from error
    except Exception as error:
        kind = next((name for name, start in SIGNATURES.items() if start.match(data)), None)
        raise ImageRefused(
            f"{kind} image of {len(data)} bytes is truncated, corrupt or neither gray, RGB nor "
            "CMYK, expected a whole file in one of these color modes: save it again"
            if kind
            else f"not a JPEG, PNG or WebP file ({_start(data)}): convert it"
        ) from error


def _start(data: bytes) -> str:
    return f"it starts with {data[:8].hex(' ')}" if data else "it has 0 bytes"


def _check_size(image: Image.Image, wanted: ImageInput) -> None:
    width, height = image.size
    megapixels = width * height / 1e6
    if max(width, height) > wanted.max_side_px or megapixels > wanted.max_megapixels:
        raise ImageRefused(
            f"image is {width} x {height} pixels, at most {wanted.max_side_px} pixels per side are "
            f"allowed; it has {megapixels:.1f} megapixels, at most {wanted.max_megapixels} "
            "megapixels are allowed: make it smaller"
        )
    if min(width, height) < wanted.min_side_px:
        raise ImageRefused(
            f"image is {width} x {height} pixels, expected at least {wanted.min_side_px} pixels "
            "per side: send the image itself, this is a placeholder"
        )
    # A JPEG photograph with a preview (MPO) is one image; only PNG and WebP can be animated.
    frames = getattr(image, "n_frames", 1) if image.format in ("PNG", "WEBP") else 1
    if frames > 1:
        raise ImageRefused(
            f"image is animated with {frames} frames, only one is allowed: save one frame"
        )


def _opaque(image: Image.Image, alpha: str) -> Image.Image:
    """Convert to 8 bits per channel and remove transparency, unless alpha is simply dropped."""
    if image.mode.startswith("I"):
        return _from_16_bits(image, alpha)
    if alpha == "dropped" or not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, alpha), image).convert("RGB")


def _from_16_bits(image: Image.Image, alpha: str) -> Image.Image:
    levels = np.asarray(image).astype(np.int64)
    grey = ((levels + 128) // 257).clip(0, 255).astype(np.uint8)
    if alpha != "dropped" and isinstance(unseen := image.info.get("transparency"), int):
        grey[levels == unseen] = {"white": 255, "black": 0}[alpha]
    return Image.fromarray(grey)


def _cut(image: Image.Image, top: int, left: int, height: int, width: int) -> Image.Image:
    if image.height < top + height or image.width < left + width:
        raise ImageRefused(
            f"image is {image.width} x {image.height} pixels, expected at least {left + width} x "
            f"{top + height}: send a larger image"
        )
    return image.crop((left, top, left + width, top + height))


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode:
        return image
    # A palette's transparency is meaningless once alpha is dropped, and Pillow would warn about it.
    image.info.pop("transparency", None)
    return (image if image.mode in ("1", "L") else image.convert("RGB")).convert(mode)


_Window = tuple[int, int, int, int]  # left, top, right, bottom of the kept part


def _geometry(size: tuple[int, int], wanted: ImageInput) -> tuple[tuple[int, int], _Window]:
    """Return the width and height to resize to, and what the center crop keeps of them."""
    width, height = _resized(size, wanted)
    kept_w, kept_h = min(width, wanted.width_px), min(height, wanted.height_px)
    # Half a pixel goes to the even side, as torchvision's CenterCrop rounds, or is cut off.
    rounded = int if wanted.crop_rounding == "down" else round
    left, top = rounded((width - kept_w) / 2), rounded((height - kept_h) / 2)
    return (width, height), (left, top, left + kept_w, top + kept_h)


def _resized(size: tuple[int, int], wanted: ImageInput) -> tuple[int, int]:
    """Return width and height by the rules of torchvision, timm and OpenCLIP, to the pixel."""
    width, height = size
    to_height, to_width = wanted.resize_px
    if wanted.resize_mode == "squash":
        return to_width, to_height
    if wanted.resize_mode == "shortest" and to_height == to_width and wanted.antialias:
        # torchvision's Resize with one number truncates the other side; elsewhere it is rounded.
        if width <= height:
            return to_width, int(to_width * height / width)
        return int(to_height * width / height), to_height
    of_both = max if wanted.resize_mode == "longest" else min
    ratio = of_both(height / to_height, width / to_width)
    return max(1, round(width / ratio)), max(1, round(height / ratio))


def _pillow(
    image: Image.Image, size: tuple[int, int], window: _Window, interpolation: str
) -> Image.Image:
    """Resize with Pillow's filters, which average over what a pixel covers when they shrink."""
    kept_size = (window[2] - window[0], window[3] - window[1])
    if size[0] * size[1] <= max(WHOLE_PIXELS, WHOLE_INPUTS * kept_size[0] * kept_size[1]):
        way = Image.Resampling[interpolation.upper()]
        whole = image if image.size == size else image.resize(size, way)
        return whole if window == (0, 0, *size) else whole.crop(window)
    if interpolation == "nearest" or image.mode in ("1", "P"):
        return _sampled(image, size, window, "nearest")
    seen = {"LA": "La", "RGBA": "RGBa"}.get(image.mode, image.mode)
    pixels, taps = np.asarray(image.convert(seen)), {}
    for axis in (0, 1):
        length, kept = pixels.shape[axis], window[1 - axis :: 2]
        places, shares = _taps(length, size[1 - axis], kept, interpolation)
        start, stop = int(places.min()), int(places.max()) + 1
        taps[axis] = places - start, shares
        pixels = pixels.take(range(start, stop), axis)
    # Pillow 13 begins with the columns if that is less work; earlier versions never do.
    shrinks, narrows = image.height - size[1], image.width - size[0]
    for axis in (0, 1) if shrinks > max(0, 2 * narrows) else (1, 0):
        rows = np.moveaxis(pixels, axis, 0)
        total = 2**21 + sum((rows[at].T * share).T for at, share in zip(*taps[axis], strict=True))
        pixels = np.moveaxis((total >> 22).clip(0, 255).astype(np.uint8), 0, axis)
    return Image.frombytes(seen, kept_size, pixels.tobytes()).convert(image.mode)


def _taps(
    length: int, to: int, kept: tuple[int, ...], interpolation: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return each kept pixel's source pixels and their weights, as in Pillow's Resample.c.

    Shapes: -> places and shares (of 2^22) int64 [taps kept].
    """
    reach, weight = FILTERS[interpolation]
    scale = length / to
    wide = max(scale, 1.0)
    centre = (np.arange(*kept) + 0.5) * scale
    first = (centre - reach * wide + 0.5).clip(0).astype(np.int64)
    last = (centre + reach * wide + 0.5).astype(np.int64).clip(max=length)
    places = first + np.arange((last - first).max())[:, None]
    far = np.abs((places - centre + 0.5) * (1 / wide))
    weights = np.where((places < last) & (far < reach), weight(far), 0.0)
    fixed = weights / np.cumsum(weights, 0)[-1] * 2**22
    shares = np.trunc(fixed + np.copysign(0.5, fixed)).astype(np.int64)
    return places.clip(max=length - 1), shares


def _sampled(
    image: Image.Image, size: tuple[int, int], window: _Window, interpolation: str
) -> Image.Image:
    """Interpolate between the two nearest pixels per axis, as OpenCV and tf.image.resize do."""
    image = image.convert("RGB") if image.mode in ("1", "P") else image
    pixels = np.asarray(image)
    for axis in (1, 0):  # in tf's order and float32, so that halves round alike
        rows, to = np.moveaxis(pixels, axis, 0), size[1 - axis]
        first, last = window[1 - axis :: 2]
        if interpolation == "nearest":
            steps = np.full(last, len(rows) / to)
            steps[0] /= 2
            at = np.cumsum(steps)[first:].astype(np.int64)  # added up, as Pillow does
            rows = rows[at.clip(max=len(rows) - 1)]
        else:
            at = (np.arange(first, last, dtype=np.float32) + 0.5) * np.float32(len(rows) / to) - 0.5
            low = np.floor(at := at.clip(0, len(rows) - 1)).astype(np.int64)
            both = low, (low + 1).clip(max=len(rows) - 1)
            near, beyond = (rows[pair_rows].T.astype(np.float32) for pair_rows in both)
            rows = (near + (beyond - near) * (at - np.floor(at))).T
        pixels = np.moveaxis(rows, 0, axis)
    kept_size = (window[2] - window[0], window[3] - window[1])
    return Image.frombytes(image.mode, kept_size, np.rint(pixels).astype(np.uint8).tobytes())


def _padded(pixels: np.ndarray, wanted: ImageInput) -> np.ndarray:
    """Center in an image of the model's size; an odd pixel goes below or to the right."""
    height, width = pixels.shape[:2]
    if (height, width) == (wanted.height_px, wanted.width_px):
        return pixels
    top, left = (wanted.height_px - height) // 2, (wanted.width_px - width) // 2
    whole = np.empty((wanted.height_px, wanted.width_px, wanted.channels), np.uint8)
    whole[:] = wanted.fill
    whole[top : top + height, left : left + width] = pixels
    return whole
