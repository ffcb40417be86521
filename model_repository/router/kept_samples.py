# SPDX-License-Identifier: Apache-2.0
"""A folder with the newest sampled images, for the next calibration. Standard library only."""

import hashlib
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
        self._folder, self._most_images, self._most_bytes = folder, most_images, most_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = [(file.stat(), file.name) for file in folder.iterdir() if _OWN.fullmatch(file.name)]
        own.sort(key=lambda one: one[0].st_mtime)
        self._sizes = {name: status.st_size for status, name in own}  # the oldest first

    def keep(self, image: bytes) -> None:
        """Keep an encoded image, which could be decoded: the whole file, or nothing.

        Raises: OSError if it cannot be written.
        """
        kind = "png" if image[:4] == b"\x89PNG" else "webp" if image[8:12] == b"WEBP" else "jpg"
        name = f"{hashlib.sha256(image).hexdigest()}.{kind}"
        if name in self._sizes or len(image) > self._most_bytes:
            return
        partial = self._folder / f".{name}"
        try:
            partial.write_bytes(image)
            partial.replace(self._folder / name)
        finally:
            partial.unlink(missing_ok=True)
        self._sizes[name] = len(image)
        while len(self._sizes) > self._most_images or sum(self._sizes.values()) > self._most_bytes:
            oldest = next(iter(self._sizes))
            (self._folder / oldest).unlink(missing_ok=True)
            del self._sizes[oldest]
