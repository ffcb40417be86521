# SPDX-License-Identifier: Apache-2.0
"""A folder with the newest sampled images, for the next calibration. Standard library only."""

import hashlib
import os
import re
from pathlib import Path

MOST_IMAGES, MOST_BYTES = 5000, 2 * 2**30
_OWN = re.compile(r"[0-9a-f]{64}\.(png|jpg|webp)")  # no other file is counted or removed


class KeptSamples:
    """Keeps images as they came, under their hashes; the oldest go when there are too many.

    Raises: OSError if the folder cannot be made or read.
    """

    def __init__(
        self, folder: Path, most_images: int = MOST_IMAGES, most_bytes: int = MOST_BYTES
    ) -> None:
        self._folder, self._most = folder, (most_images, most_bytes)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = [file for file in folder.iterdir() if _OWN.fullmatch(file.name) and file.is_file()]
        own.sort(key=lambda file: file.stat().st_mtime)
        self._sizes = {file.name: file.stat().st_size for file in own}  # the oldest first

    def keep(self, image: bytes) -> None:
        """Keep an encoded image: the whole file is there, or nothing.

        Raises: OSError if it cannot be written.
        """
        name = f"{hashlib.sha256(image).hexdigest()}.{_suffix(image)}"
        if name in self._sizes or len(image) > self._most[1]:
            return
        partial = self._folder / f".{os.getpid()}.partial"
        try:
            with os.fdopen(
                os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as file:
                file.write(image)
            partial.replace(self._folder / name)
        finally:
            partial.unlink(missing_ok=True)
        self._sizes[name] = len(image)
        while len(self._sizes) > self._most[0] or sum(self._sizes.values()) > self._most[1]:
            oldest = next(iter(self._sizes))
            (self._folder / oldest).unlink(missing_ok=True)
            del self._sizes[oldest]


def _suffix(image: bytes) -> str:
    """Return the suffix of an image that was decoded, so that it has one of three formats."""
    if image[:4] == b"\x89PNG":
        return "png"
    return "webp" if image[8:12] == b"WEBP" else "jpg"
