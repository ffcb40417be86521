# SPDX-License-Identifier: Apache-2.0
"""Read the megapixels that an image file declares from its first bytes, in microseconds.

This estimates how long decoding will take. Pillow's own reading decides which image is too large.
"""

import struct

SIZED = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG segments that begin a frame

MOST_SEGMENTS = 1024


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
