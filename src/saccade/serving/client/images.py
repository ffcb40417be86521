# SPDX-License-Identifier: Apache-2.0
"""Images of a caller, as encoded files in requests of a size the server takes."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from saccade.errors import SaccadeError, ShapeError

Image = Path | str | bytes | np.ndarray
MAX_IMAGES = 64
MAX_REQUEST_BYTES = 64 * 2**20  # far below what a message may have, and a step for deadlines


def encoded(images: Sequence[Image] | np.ndarray) -> list[bytes]:
    """Each image as the bytes of a file: read, as given, or pixels as PNG.

    Shapes: an array is one image [h w], [h w 1], [h w 3] or [h w 4]; a batch is [n h w c].
    Units: pixels are uint8, 0 to 255.
    Raises: SaccadeError for a file that cannot be read, ShapeError for pixels that are no image.
    """
    if isinstance(images, str | bytes | Path):
        raise SaccadeError("Expected a list of images, found a single one. Write [image].")
    if isinstance(images, np.ndarray) and images.ndim != 4:
        raise ShapeError(
            f"Expected a list of images or an array [n, h, w, c], found an array of shape "
            f"{list(images.shape)}. Write [image] for a single image."
        )
    if len(images) == 0:
        raise SaccadeError("No image given. Give one or more.")
    return [_file_bytes(image) for image in images]


def requests(files: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Split files so that each request keeps below the count and the bytes the server takes."""
    batch: list[bytes] = []
    size = 0
    for file in files:
        if batch and (len(batch) == MAX_IMAGES or size + len(file) > MAX_REQUEST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += len(file)
    if batch:
        yield batch


def _file_bytes(image: Image) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray):
        return _png(image)
    if not isinstance(image, str | Path):
        raise SaccadeError(
            f"Expected an image as path, bytes or uint8 array, found {type(image).__name__}."
        )
    try:
        data = Path(image).read_bytes()
    except OSError as error:
        raise SaccadeError(
            f"{image}: cannot be read ({error.strerror}). Name a PNG, JPEG or WebP file."
        ) from error
    if not data:
        raise SaccadeError(f"{image}: has 0 bytes. Name a PNG, JPEG or WebP file.")
    return data


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image as Pillow

    if pixels.dtype != np.uint8:
        raise ShapeError(
            f"Expected pixels as uint8 (0 to 255), found {pixels.dtype}. Scale and convert them."
        )
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.ndim not in (2, 3) or channels not in (1, 3, 4) or 0 in pixels.shape:
        raise ShapeError(
            "Expected an image of shape [h, w], [h, w, 1], [h, w, 3] or [h, w, 4], "
            f"found {list(pixels.shape)}."
        )
    file = io.BytesIO()
    plain = pixels[:, :, 0] if pixels.ndim == 3 and channels == 1 else pixels
    Pillow.fromarray(np.ascontiguousarray(plain)).save(file, "PNG", compress_level=1)
    return file.getvalue()
