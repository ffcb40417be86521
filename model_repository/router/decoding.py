# SPDX-License-Identifier: Apache-2.0
"""Decode the image files of one request, one after the other, while its caller waits.

The megapixels that a file declares in its first bytes are read in microseconds, to estimate how
long decoding will take. Pillow's own reading decides which image is too large.
"""

from __future__ import annotations

import io
import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from image_decoding import FORMATS, ImageInput, ImageRefused, decode
from outcomes import INVALID_IMAGE, CallerCheck, Refused
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from backlog import Ticket
    from lane import Lane

    Observed = Callable[[Ticket, float, Iterable[float]], None]

IMAGE_MEGAPIXELS = 0.02  # opening an image costs as much as decoding this

# Sixty-four photographs of 12 megapixels are 768 megapixels: photographs of a phone always fit.
REQUEST_MEGAPIXELS = 1000
SLOW_S = 0.05  # per megapixel; several times as long as the slowest format takes

SIZED = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG segments that begin a frame
MOST_SEGMENTS = 1024


class Decoding:
    """The images of one request on their way to pixels, one at a time, perhaps in several threads.

    Image `index` is an index into all files of the request.
    """

    def __init__(
        self,
        files: Mapping[str, list[bytes]],
        wanted: ImageInput,
        ticket: Ticket,
        lane: Lane,
        observed: Observed | None = None,
    ) -> None:
        """`files` are by the name of the input; `observed` receives their sizes at the end.

        Raises: Refused for too many megapixels together, by the headers.
        """
        self.ticket, self.lane = ticket, lane
        self._files = [(name, data) for name, own in files.items() for data in own]
        self._wanted, self._observed = wanted, observed
        self.sizes = [megapixels(data) for _, data in self._files]
        check_megapixels(self.sizes, wanted)
        self._pixels: list[Any] = [None] * len(self._files)
        self._waits, self._began_s = CallerCheck(ticket), time.monotonic()
        self._decoded: list[float] = []  # sizes of those that are pixels
        self.seconds = 0.0  # of all threads

    def __len__(self) -> int:
        return len(self._files)

    def decode(self, index: int) -> None:
        """Decode one image.

        Raises: Refused that names a bad image; for too many megapixels, if a header was false; and
            if the caller no longer waits while others are left.
        """
        (_, data), began = self._files[index], time.monotonic()
        try:
            self._pixels[index] = decode(data, self._wanted)
        except ImageRefused as error:
            where = f"image {index}: " if len(self) > 1 else ""
            raise Refused(f"{where}{error}", INVALID_IMAGE) from error
        seconds, size = time.monotonic() - began, self.sizes[index]
        if seconds > SLOW_S * (IMAGE_MEGAPIXELS + size):
            # A file with a false header must not make all other images look expensive, nor pass the
            # limit. Opening each file again would cost a third of what decoding a small one does.
            size = max(size, opened_megapixels(data))
        self.lane.decoded(IMAGE_MEGAPIXELS + size, seconds)
        self._decoded.append(size)
        check_megapixels(self._decoded, self._wanted)
        self.seconds += seconds
        self.lane.step()
        if (done := len(self._decoded)) < len(self):
            self._waits.check(f"when {done} of {len(self)} images were decoded")

    def end(self, *, complete: bool) -> None:
        """Put the pixels in the place of the files if all were decoded; uint8 [b h w c] each."""
        if self._observed:
            self._observed(self.ticket, self._began_s, self.sizes)
        if not complete:
            return
        self.ticket.sender.decoded(self.seconds)
        names = [name for name, _ in self._files]
        for name in dict.fromkeys(names):
            own = [one for of, one in zip(names, self._pixels, strict=True) if of == name]
            self.ticket.inputs[name] = np.stack(own)


def expected_megapixels(files: list[bytes], wanted: ImageInput) -> float:
    """Return the megapixels to decode according to the headers; refused files cost nothing."""
    sizes = [megapixels(file) for file in files]
    sizes = [size for size in sizes if size <= wanted.max_megapixels]
    total = sum(sizes) + IMAGE_MEGAPIXELS * len(files)
    return total if total <= most_megapixels(wanted) else IMAGE_MEGAPIXELS * len(files)


def most_megapixels(wanted: ImageInput) -> int:
    """Return the most megapixels of a request's images together; one allowed image always fits."""
    return max(REQUEST_MEGAPIXELS, wanted.max_megapixels)


def check_megapixels(sizes: list[float], wanted: ImageInput) -> None:
    """Check that the images of a request together do not occupy a lane for too long.

    Raises: Refused if they have too many megapixels.
    """
    most = most_megapixels(wanted)
    if len(sizes) * wanted.max_megapixels <= most:
        return
    total = sum(sizes)
    if total > most:
        raise Refused(
            f"the request's {len(sizes)} images have {total:.1f} megapixels together, allowed are "
            f"{most} megapixels per request: send fewer images at a time, or make them smaller",
            INVALID_IMAGE,
        )


def opened_megapixels(data: bytes) -> float:
    """Return the megapixels that Pillow will decode.

    It is 0 for a file that Pillow cannot open, which is refused in its turn.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return float(image.width * image.height / 1e6)
    except Exception:
        return 0.0


def megapixels(data: bytes) -> float:
    """Return the megapixels in the header; 0 for an unknown header."""
    try:
        if data[:4] == b"\x89PNG":
            width, height = struct.unpack(">II", data[16:24])
        elif data[:2] == b"\xff\xd8":
            width, height = _jpeg(data)
        elif data[8:12] == b"WEBP":
            width, height = _webp(data)
        else:
            return 0.0
    except (struct.error, IndexError):
        return 0.0
    return float(width * height / 1e6)


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(MOST_SEGMENTS):
        if data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker in SIZED:
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        # A fill byte, or a segment with its length.
        at += 1 if marker == 0xFF else 2 + max(2, struct.unpack(">H", data[at + 2 : at + 4])[0])
    return 0, 0


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        return width + 1, height + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack("<HH", data[26:30])
    return width & 0x3FFF, height & 0x3FFF
