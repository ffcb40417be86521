# SPDX-License-Identifier: Apache-2.0
"""Pictures of answers: slots and edited images, and attention maps with a row per model.

Slots are PNG files, bare or enlarged next to the image. In maps, zero weights are gray and crossed
out.
"""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core import limits
from saccade.core.errors import SaccadeError, require
from saccade.core.files import read_regular
from saccade.models.attention_maps import MapRow, Panel

_SIDE_PX = 256  # minimum side of a drawn panel
_MOST_PX = 768
_GAP_PX = 8
_WHITE = (255, 255, 255)
_INK, _QUIET, _PAPER = "#22262b", "#5b626b", "#ffffff"
_COLUMNS = 8
_TITLE_INCH = 0.105  # width of a wide character of a title
_GREY = (0.299, 0.587, 0.114)


def read_pixels(image: Path | bytes) -> np.ndarray:
    """Read an image as the picture shows it: upright, in RGB.

    Shapes: -> uint8 [h w 3].
    Raises: SaccadeError if it cannot be read.
    """
    from PIL import Image, ImageOps

    try:
        data = image if isinstance(image, bytes) else read_regular(image, limits.IMAGE_BYTES)
        with Image.open(io.BytesIO(data)) as opened:
            return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        said = getattr(error, "strerror", None) or error
        # Pillow names the bytes by their place in memory.
        finding = "The file cannot be read as an image"
        if not isinstance(image, bytes):
            finding = f"{image}: cannot be read as an image ({said})"
        raise SaccadeError(f"{finding}. Choose a PNG, JPEG or WebP file.") from error


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
    picture = Image.new("RGB", size, _WHITE)
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


def maps_png(
    rows: Sequence[MapRow], pixels: np.ndarray, *, columns: int = _COLUMNS, text_pt: float = 8
) -> bytes:
    """Draw each model's title, the image, and its maps; return PNG bytes.

    Shapes: pixels uint8 [h w 3].
    Units:  text_pt is the size of titles of maps, in points; a column has 1.9 inches.
    Raises: MissingPackage without matplotlib.
    """
    matplotlib = require("matplotlib", extra="bench")
    buffer = io.BytesIO()
    # Labels are plain text: matplotlib would read text between two dollar signs as a formula.
    text = {"text.parse_math": False, "axes.titlesize": text_pt, "figure.titlesize": text_pt + 3}
    with matplotlib.rc_context(text):
        # Leave out the version, so that the same maps give the same bytes.
        _figure(rows, pixels, columns, text_pt / 8).savefig(
            buffer, format="png", metadata={"Software": None}
        )
    return buffer.getvalue()


def _figure(rows: Sequence[MapRow], pixels: np.ndarray, columns: int, larger: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, 1 + max(len(row.panels) for row in rows))
    lines = [-(-(1 + len(row.panels)) // columns) for row in rows]
    width = 1.9 * columns + 0.3
    titles = [_wrapped(row.title, width / larger) for row in rows]
    heads = larger * sum(0.2 * (1 + title.count("\n")) + 0.2 for title in titles)
    size = (width, 2.3 * sum(lines) + heads)
    figure = Figure(figsize=size, dpi=130, layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(rows), 1, height_ratios=lines, squeeze=False).ravel()
    for part, row, title, count in zip(parts, rows, titles, lines, strict=True):
        part.suptitle(title, x=0.01, ha="left", color=_INK, fontweight="bold")
        axes = np.atleast_1d(part.subplots(count, columns, squeeze=False)).ravel()
        for axis in axes:
            axis.set_axis_off()
        _draw_image(axes[0], pixels, "the image")
        for place, panel in zip(axes[1:], row.panels, strict=False):
            _draw(place, panel, pixels)
    return figure


def _wrapped(title: str, width: float) -> str:
    """Wrap the title to fit: the answer is at its end and must not be cut off."""
    return "\n".join(textwrap.wrap(title, max(20, int(width / _TITLE_INCH)))) or title


def _draw(axes: Any, panel: Panel, pixels: np.ndarray) -> None:
    if panel.pixels is not None or panel.weights is None:
        _draw_image(axes, pixels if panel.pixels is None else panel.pixels, panel.title)
        return
    height, width = pixels.shape[:2]
    extent = (0, width, height, 0)
    grey = pixels @ np.array(_GREY) / 255
    axes.imshow(0.55 + 0.45 * grey, cmap="gray", vmin=0, vmax=1, extent=extent)
    weights = panel.weights.astype(np.float64)
    shown = np.ma.masked_where(weights == 0, weights)
    most = max(float(weights.max()), 1e-12) if panel.most is None else panel.most
    strength = np.where(weights == 0, 0, 0.25 + 0.65 * np.clip(weights / most, 0, 1))
    axes.imshow(shown, cmap="inferno", vmin=0, vmax=most, extent=extent, alpha=strength)
    rows, columns = weights.shape
    down, right = np.nonzero(weights == 0)
    if 0 < len(down) <= 400:
        places = ((right + 0.5) * width / columns, (down + 0.5) * height / rows)
        axes.scatter(*places, marker="x", s=9, linewidths=0.6, color=_QUIET)
    axes.set_title(panel.title, color=_INK)


def _draw_image(axes: Any, pixels: np.ndarray, title: str) -> None:
    grey = pixels.shape[2] == 1
    axes.imshow(pixels[:, :, 0] if grey else pixels, cmap="gray" if grey else None)
    axes.set_title(title, color=_INK)
