# SPDX-License-Identifier: Apache-2.0
"""Images of a source in the model's size, decoded when they are indexed, some ahead of time."""

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from threading import Lock
from typing import Any, TypeVar, cast

import numpy as np
from PIL import Image

from saccade.core.errors import SaccadeError
from saccade.models.data.options import Once, here
from saccade.models.data.samples.source import SKIP_HINT, RowUnreadable, SampleSource
from saccade.models.image_decoding import FORMATS, ImageInput, ImageRefused, fit, opened, upright
from saccade.models.preprocessing import Preprocessing

T = TypeVar("T")
KEPT_BYTES = 512 * 2**20  # images that fit into it are decoded once; others when they are used
_MOST_WORKERS = 8
_BLOCK = 64  # images of a pass over all


class Images:
    """The images of some rows; indexed like an array of uint8 [n h w c].

    A slice is again `Images`; an array of places gives the pixels. Consecutive places are decoded
    one block ahead, other ones if `ahead` names them.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(
        self, source: SampleSource, rows: np.ndarray, wanted: ImageInput, once: Once = here
    ) -> None:
        self.source, self.rows, self.wanted, self.once = source, rows, wanted, once
        self.shape: tuple[int, ...] = (len(rows), wanted.height_px, wanted.width_px)
        self.shape += (wanted.channels,)
        self._ahead: dict[int, Future[np.ndarray]] = {}
        # A model that reads all images in order spares the hash a second pass.
        self._digest = hashlib.sha256(repr((self.shape, source.class_names)).encode())
        self._hashed = 0

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Return the size that all of them have in memory."""
        return int(np.prod(self.shape))

    def __getitem__(self, key: Any) -> Any:
        """Return the pixels at these places, or the images of a slice."""
        if isinstance(key, slice):
            return self.part(self.rows[key])
        places = np.asarray(key)
        if places.dtype == bool:
            places = np.flatnonzero(places)
        if places.ndim == 0:
            return self._decoded(places[None] % len(self))[0]
        pixels = self._decoded(np.where(places < 0, places + len(self), places))
        if len(places) and (np.diff(places) == 1).all():
            if places[0] == self._hashed:
                self._digest.update(pixels.tobytes())
                self._hashed += len(places)
            if len(places) > 1:
                end = int(places[-1]) + 1
                self.ahead(np.arange(end, min(end + len(places), len(self))))
        return pixels

    def part(self, rows: np.ndarray) -> "Images":
        """Return the images of other rows."""
        return Images(self.source, rows, self.wanted, self.once)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all images as one array."""
        pixels = np.empty(self.shape, dtype=np.uint8)
        for start in range(0, len(self), _BLOCK):  # not every image twice in memory
            places = np.arange(start, min(start + _BLOCK, len(self)))
            pixels[places] = self._decoded(places)
        return pixels if dtype is None else pixels.astype(dtype)

    def ahead(self, places: np.ndarray) -> None:
        """Begin to decode the images at these places, which will be asked for next."""
        kept = self._ahead
        rows = dict.fromkeys(self.rows[places].tolist())
        self._ahead = {row: kept.get(row) or _pool().submit(self._one, row) for row in rows}

    def unreadable(self, most: int) -> list[tuple[int, str]]:
        """Read all images and return the place of each that cannot be read, with the reason.

        Raises: SaccadeError if there are more than `most`.
        """
        found: list[tuple[int, str]] = []
        for start in range(0, len(self), _BLOCK):
            rows = self.rows[start : start + _BLOCK].tolist()
            for place, error in enumerate(_pool().map(self._error, rows), start):
                if error is not None:
                    found.append((place, error))
            if len(found) > most:
                raise SaccadeError(
                    f"{found[0][1]} --skip-bad {most} leaves out at most {most} such rows; found "
                    f"{len(found)} in the first {min(start + _BLOCK, len(self)):,} of "
                    f"{len(self):,}. Raise it, or correct the rows."
                )
        return found

    def sha256(self) -> str:
        """Return the hash of the pixels, the labels and the class names.

        Reads the images that were not yet read in order.
        """
        digest: str = self.once(self._sha256)
        return digest

    def _sha256(self) -> str:
        while self._hashed < len(self):
            self[np.arange(self._hashed, min(self._hashed + _BLOCK, len(self)))]
        whole = self._digest.copy()
        whole.update(self.source.labels[self.rows].tobytes())
        return whole.hexdigest()

    def _decoded(self, places: np.ndarray) -> np.ndarray:
        rows = self.rows[places].tolist()
        ready, self._ahead = self._ahead, {}
        missing = [row for row in dict.fromkeys(rows) if row not in ready]
        ready |= {row: _pool().submit(self._one, row) for row in missing}
        pixels = np.empty((len(rows), *self.shape[1:]), dtype=np.uint8)
        for place, row in enumerate(rows):
            pixels[place] = ready[row].result()
        return pixels

    def _one(self, row: int) -> np.ndarray:
        return self.opened(row, fit)

    def opened(self, row: int, use: Callable[[Image.Image, ImageInput], T]) -> T:
        """Decode a row's image with the router's own code, and return what `use` makes of it."""
        try:
            data = self.source.read(row, self.wanted.max_image_mib * 2**20)
            return opened(data, self.wanted, use)
        except (ImageRefused, RowUnreadable, OSError) as error:
            raise self.source.refused(row, f"{error}, or remove it.{SKIP_HINT}") from error

    def _error(self, row: int) -> str | None:
        try:
            self._one(row)
        except SaccadeError as error:
            return str(error).removesuffix(SKIP_HINT)
        return None


class Originals:
    """Images in the size of their files, for crops that are new in every step.

    Those that fit into KEPT_BYTES stay in memory after they were first used.
    """

    def __init__(self, images: Images) -> None:
        self._images, self._room = images, KEPT_BYTES
        self._kept: dict[int, Image.Image] = {}
        self._ahead: dict[int, Future[Image.Image]] = {}
        self._keeping = Lock()

    def each(
        self,
        places: np.ndarray,
        use: Callable[[Image.Image, ImageInput, np.random.Generator], np.ndarray],
        numbers: Sequence[np.random.Generator],
    ) -> np.ndarray:
        """Return what `use` makes of each image, with its generator.

        Shapes: places [n] -> uint8 [n h w c].
        """
        ready, self._ahead = self._ahead, {}

        def made(row: int, rng: np.random.Generator) -> np.ndarray:
            image = ready[row].result() if row in ready else self._opened(row)
            return use(image, self._images.wanted, rng)

        pixels = np.empty((len(places), *self._images.shape[1:]), dtype=np.uint8)
        # The images ahead were submitted before, so a worker never waits for a later task.
        rows = self._images.rows[places].tolist()
        for place, image in enumerate(_pool().map(made, rows, numbers)):
            pixels[place] = image
        return pixels

    def ahead(self, places: np.ndarray) -> None:
        """Begin to decode the images at these places, which will be asked for next."""
        rows = dict.fromkeys(self._images.rows[places].tolist())
        missing = [row for row in rows if row not in self._kept]
        self._ahead = {row: _pool().submit(self._opened, row) for row in missing}

    def _opened(self, row: int) -> Image.Image:
        image = self._kept.get(row)
        if image is None:
            image = self._images.opened(row, upright)
            size = image.width * image.height * len(image.getbands())
            with self._keeping:
                # Another worker may have decoded the same row, for which there is room only once.
                if row not in self._kept and size <= self._room:
                    self._room -= size
                    self._kept[row] = image
        return image


_GRAY_MODES = {"1", "L", "I", "I;16", "I;16B", "F"}
_HEADER_BYTES = 2**26


def is_gray(source: SampleSource, row: int) -> bool:
    """Return whether a row's image has no colors, or cannot be opened, which decoding reports."""
    try:
        with Image.open(io.BytesIO(source.read(row, _HEADER_BYTES)), formats=FORMATS) as image:
            return image.mode in _GRAY_MODES
    except Exception:  # Pillow raises many types for damage
        return True


def fitting(images: Images) -> np.ndarray:
    """Return the pixels if they fit into KEPT_BYTES, else the images, which are indexed alike."""
    return np.asarray(images) if images.nbytes <= KEPT_BYTES else cast(np.ndarray, images)


def at_size(images: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
    """Return images in arrays, which have the size of training, in that of the preprocessing.

    They are resized by its filter; what was cut off before is not there.

    Shapes: uint8 [n H W c] -> [n h w c].
    """
    if images.shape[1:3] != preprocessing.trained_px:
        return images
    whole = replace(preprocessing, resize_mode="squash", resize_px=(), cut=(), channel_order="rgb")
    return fitted(images, whole)


def fitted(images: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
    """Return images in arrays as the router makes a variant's input of files of them.

    Shapes: uint8 [n H W c] -> [n h w c].
    """
    wanted, gray = preprocessing.wanted(), images.shape[-1] == 1
    made = (fit(Image.fromarray(image[..., 0] if gray else image), wanted) for image in images)
    return np.stack([*made])


def pixels_sha256(images: np.ndarray) -> str:
    """Return the hash of the pixels alone, of an array or of `Images`."""

    def made() -> str:
        digest = hashlib.sha256()
        for start in range(0, len(images), _BLOCK):
            digest.update(images[np.arange(start, min(start + _BLOCK, len(images)))].tobytes())
        return digest.hexdigest()

    digest: str = images.once(made) if isinstance(images, Images) else made()
    return digest


@cache
def _pool() -> ThreadPoolExecutor:
    # Pillow decodes without the interpreter's lock.
    return ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1), "saccade-decode")
