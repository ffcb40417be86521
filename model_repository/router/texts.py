# SPDX-License-Identifier: Apache-2.0
"""Texts of an answer as rows of bytes: names, hashes and captions.

They are not string tensors: if a caller requests the classes of a string output, servers before
July 2025 divide by zero and crash (triton-inference-server/server#8267).
"""

from functools import lru_cache

import numpy as np


def text_rows(texts: list[str]) -> np.ndarray:
    """Return the bytes of each text in UTF-8, padded with zeros to the longest.

    Shapes: -> uint8 [texts bytes]; at least one byte wide, since the server drops empty outputs.
    """
    encoded = [text.encode() for text in texts]
    width = max(1, *(len(row) for row in encoded))
    padded = b"".join(row.ljust(width, b"\0") for row in encoded)
    return np.frombuffer(padded, np.uint8).reshape(len(texts), width)


@lru_cache(maxsize=256)
def repeated(text: str, count: int) -> np.ndarray:
    """Repeat a string for each image.

    Shapes: -> uint8 [count bytes].
    """
    return np.repeat(text_rows([text]), count, axis=0)
