# SPDX-License-Identifier: Apache-2.0
"""Slots and edited images as PNG files: bare, or enlarged next to the image."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError

_SIDE_PX = 256  # minimum side of a drawn panel
_MOST_PX = 768
_GAP_PX = 8
_PAPER = (255, 255, 255)


def read_pixels(image: Path) -> np.ndarray:
    """Read an image as the picture shows it: upright, in RGB.

    Shapes: -> uint8 [h w 3].
    Raises: SaccadeError if it cannot be read.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(image) as opened:
            return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise SaccadeError(
            f"{image}: cannot be read as an image ({said}). Pass a PNG, JPEG or WebP file."
        ) from error


# Most people can distinguish these; dark and light alternate. They repeat if there are more slots.
COLOURS = (
    *((230, 159, 0), (0, 114, 178), (0, 158, 115), (204, 121, 167), (86, 180, 233)),
    *((213, 94, 0), (240, 228, 66), (102, 51, 0), (153, 153, 153), (51, 34, 136), (34, 34, 34)),
)


def masks_png(owners: np.ndarray) -> bytes:
    """Write a palette PNG in which each pixel's index is its slot.

    Shapes: owners uint8 [h w].
    """
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(owners, np.uint8), "P")
    count = int(owners.max()) + 1
    colours = [COLOURS[slot % len(COLOURS)] for slot in range(count)]
    image.putpalette([level for colour in colours for level in colour])
    return _saved(image)


def image_png(pixels: np.ndarray) -> bytes:
    """Write pixels as a PNG file.

    Shapes: uint8 [h w c].
    """
    from PIL import Image

    return _saved(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))


def _saved(image: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")  # type: ignore[attr-defined]
    return file.getvalue()


def slots_picture(pixels: np.ndarray, owners: np.ndarray) -> bytes:
    """Draw the image and, next to it, each pixel's slot with its number, as a PNG file.

    Shapes: pixels uint8 [h w 3]; owners uint8 [rows columns], the size that the model uses.
    """
    from PIL import Image, ImageDraw

    colours = np.array([COLOURS[slot % len(COLOURS)] for slot in range(int(owners.max()) + 1)])
    masks = _enlarged(Image.fromarray(colours.astype(np.uint8)[owners]), _height(pixels))
    draw = ImageDraw.Draw(masks)
    for slot in np.unique(owners):
        down, right = _middle(owners == slot)
        place = right * masks.width / owners.shape[1], down * masks.height / owners.shape[0]
        draw.text(
            place, str(slot), anchor="mm", font=_font(), fill="white", stroke_width=2,
            stroke_fill="black",
        )  # fmt: skip
    return _side_by_side(pixels, masks)


def edited_picture(pixels: np.ndarray, edited: np.ndarray) -> bytes:
    """Draw the image and, next to it, what the model made of it, as a PNG file.

    Shapes: pixels uint8 [h w 3]; edited uint8 [rows columns channels].
    """
    from PIL import Image

    drawn = Image.fromarray(edited[:, :, 0] if edited.shape[2] == 1 else edited)
    return _side_by_side(pixels, _enlarged(drawn.convert("RGB"), _height(pixels)))


def _side_by_side(pixels: np.ndarray, drawn: Any) -> bytes:
    from PIL import Image

    image = _enlarged(Image.fromarray(pixels), _height(pixels))
    size = image.width + _GAP_PX + drawn.width, max(image.height, drawn.height)
    picture = Image.new("RGB", size, _PAPER)
    picture.paste(image, (0, 0))
    picture.paste(drawn, (image.width + _GAP_PX, 0))
    return _saved(picture)


def _height(pixels: np.ndarray) -> int:
    """Return the height of both panels: the image's, within a minimum and a maximum."""
    return int(min(max(_SIDE_PX, pixels.shape[0]), _MOST_PX))


def _enlarged(image: Any, height: int) -> Any:
    """Resize the image to a height; if enlarged, its pixels become squares."""
    from PIL.Image import Resampling

    width = max(_SIDE_PX, round(image.width * height / image.height))
    how = Resampling.NEAREST if height >= image.height else Resampling.LANCZOS
    return image.resize((width, height), how)


def _middle(own: np.ndarray) -> tuple[float, float]:
    """Return the pixel of a slot nearest to its mean, which is inside it for any shape."""
    places = np.argwhere(own)
    down, right = places[np.square(places - places.mean(0)).sum(1).argmin()]
    return float(down) + 0.5, float(right) + 0.5


def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=18)
