# SPDX-License-Identifier: Apache-2.0
"""The image files of one request, decoded one after the other while its caller waits."""

import io
import time

import numpy as np
from calls import CallerCheck, Refused
from image_decoding import FORMATS, ImageRefused, Wanted, decode
from image_size import megapixels
from lane import Lane
from outcomes import INVALID_IMAGE
from pace import IMAGE_MEGAPIXELS
from PIL import Image
from ticket import Ticket

# Sixty-four photographs of 12 megapixels are 768: what a phone makes is always taken.
REQUEST_MEGAPIXELS = 1000
SLOW_S = 0.05  # a megapixel; several times of what the slowest format takes


def decoded(files: list[bytes], wanted: Wanted, ticket: Ticket, lane: Lane) -> np.ndarray:
    """The images of one request.

    Shapes: -> uint8 [b h w c].
    Raises: Refused naming the image, for too many megapixels together before any is decoded,
        and between two images where the caller no longer waits.
    """
    check_megapixels(files, wanted)
    images, waits, decoding_s = [], CallerCheck(ticket), 0.0
    for index, data in enumerate(files):
        began = time.monotonic()
        try:
            images.append(decode(data, wanted))
        except ImageRefused as error:
            where = f"image {index}: " if len(files) > 1 else ""
            raise Refused(f"{where}{error}", INVALID_IMAGE) from error
        seconds, size = time.monotonic() - began, IMAGE_MEGAPIXELS + megapixels(data)
        if seconds > SLOW_S * size:
            # A file whose first header lies must not make all others look dear.
            size = max(size, opened_megapixels(data))
        lane.decoded(size, seconds)
        decoding_s += seconds
        lane.step()
        if index + 1 < len(files):
            waits.check(f"when {index + 1} of {len(files)} images were decoded")
    ticket.sender.decoded(decoding_s)
    return np.stack(images)


def expected_megapixels(files: list[bytes], wanted: Wanted) -> float:
    """Megapixels to decode by the files' headers; what will be refused costs nothing."""
    sizes = [megapixels(file) for file in files]
    sizes = [size for size in sizes if size <= wanted.max_megapixels]
    total = sum(sizes) + IMAGE_MEGAPIXELS * len(files)
    return total if total <= most_megapixels(wanted) else IMAGE_MEGAPIXELS * len(files)


def most_megapixels(wanted: Wanted) -> int:
    """Of the images of one request together; one image that is allowed always is."""
    return max(REQUEST_MEGAPIXELS, wanted.max_megapixels)


def check_megapixels(files: list[bytes], wanted: Wanted) -> None:
    """All images of a request together are no more than a lane can be held up by.

    Raises: Refused otherwise.
    """
    most = most_megapixels(wanted)
    if len(files) * wanted.max_megapixels <= most:
        return
    total = sum(opened_megapixels(data) for data in files)
    if total > most:
        raise Refused(
            f"the request's {len(files)} images have {total:.1f} megapixels together, allowed are "
            f"{most} megapixels a request: send fewer at once, or make them smaller",
            INVALID_IMAGE,
        )


def opened_megapixels(data: bytes) -> float:
    """Megapixels that Pillow will decode; 0 if it cannot open the file, refused when its turn
    comes.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return float(image.width * image.height / 1e6)
    except Exception:
        return 0.0
