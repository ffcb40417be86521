# SPDX-License-Identifier: Apache-2.0
"""A caller's images as encoded files."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.core import limits
from saccade.core.errors import SaccadeError, ShapeError
from saccade.core.files import read_regular

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

    Image = Path | str | bytes | np.ndarray | PillowImage
else:
    Image = Path | str | bytes | np.ndarray
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # of Pillow, which PNG keeps as they are
MAX_IMAGES = 64
MAX_REQUEST_BYTES = 24 * 2**20  # below what the proxies of docs/production.md let through


def encoded(images: Sequence[Image] | np.ndarray) -> list[bytes]:
    """Return each image as the bytes of an image file.

    A path is read, bytes are used as they are, and pixels and images of Pillow are encoded as PNG.

    Shapes: an array is one image [h w], [h w 1], [h w 3] or [h w 4]; a batch is [n h w c].
    Units: pixels are uint8, 0 to 255.
    Raises: SaccadeError for a file that cannot be read; ShapeError for pixels that are not an
        image.
    """
    if isinstance(images, str | bytes | Path):
        raise SaccadeError("Found a single image, expected a list of images. Pass [image].")
    if isinstance(images, np.ndarray) and images.ndim != 4:
        raise ShapeError(
            f"Found an array of shape {list(images.shape)}, expected a list of images or an array "
            "[n, h, w, c]. Pass [image] for a single image."
        )
    if len(images) == 0:
        raise SaccadeError("Found no image, expected one or more. Pass a list of images.")
    return [_file_bytes(image) for image in images]


def _file_bytes(image: Image) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray):
        return _png(image)
    if _is_pillow(image):
        return _pillow_png(image)
    if not isinstance(image, str | Path):
        raise SaccadeError(
            f"Found an image of type {type(image).__name__}, expected a path, bytes, a uint8 "
            "array or an image of Pillow."
        )
    try:
        data = read_regular(Path(image), limits.IMAGE_BYTES)
    except OSError as error:
        raise SaccadeError(
            f"{image}: cannot be read ({error.strerror or error}). Pass a PNG, JPEG or WebP "
            "file, or a folder of them."
        ) from error
    if not data:
        raise SaccadeError(f"{image}: found an empty file. Pass a PNG, JPEG or WebP file.")
    return data


def _is_pillow(image: object) -> bool:
    # Pillow is imported if there is such an image.
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(image, module.Image)


def _pillow_png(image: Any) -> bytes:
    if image.mode not in PNG_MODES:
        raise ShapeError(
            f"Found an image of Pillow's mode {image.mode}, expected {', '.join(PNG_MODES)}. "
            "Convert it: image.convert('RGB')"
        )
    file = io.BytesIO()
    try:
        exif = image.getexif()  # it may rotate the image
        image.save(file, "PNG", compress_level=1, **({"exif": exif} if exif else {}))
    except Exception as error:  # Pillow reads the file only now, and raises anything
        name = getattr(image, "filename", "") or "an image of Pillow"
        raise SaccadeError(
            f"{name}: cannot be decoded ({error}). Pass a whole PNG, JPEG or WebP file."
        ) from error
    return file.getvalue()


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image as Pillow

    if pixels.dtype != np.uint8:
        raise ShapeError(
            f"Found pixels of type {pixels.dtype}, expected uint8 (0 to 255). Scale and convert "
            "them."
        )
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.ndim not in (2, 3) or channels not in (1, 3, 4) or 0 in pixels.shape:
        raise ShapeError(
            f"Found an image of shape {list(pixels.shape)}, expected [h, w], [h, w, 1], [h, w, 3] "
            "or [h, w, 4]."
        )
    file = io.BytesIO()
    plain = pixels[:, :, 0] if pixels.ndim == 3 and channels == 1 else pixels
    Pillow.fromarray(np.ascontiguousarray(plain)).save(file, "PNG", compress_level=1)
    return file.getvalue()
