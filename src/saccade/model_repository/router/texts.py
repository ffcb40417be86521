# SPDX-License-Identifier: Apache-2.0
"""Texts of an answer, a row of bytes each: names, hashes, captions.

Not strings: where a caller asks for the classes of an output of strings, servers before July 2025
divide by zero and end (triton-inference-server/server#8267).
"""

from functools import lru_cache

import numpy as np


def text_rows(texts: list[str]) -> np.ndarray:
    """The bytes of each text, in UTF-8, with zeros behind a shorter one.

    Shapes: -> uint8 [texts bytes]; at least one byte wide, since the server drops empty outputs.
    """
    encoded = [text.encode() for text in texts]
    width = max(1, *(len(row) for row in encoded))
    padded = b"".join(row.ljust(width, b"\0") for row in encoded)
    return np.frombuffer(padded, np.uint8).reshape(len(texts), width)


@lru_cache(maxsize=256)
def repeated(text: str, count: int) -> np.ndarray:
    """The text once for each image.

    Shapes: -> uint8 [count bytes].
    """
    return np.repeat(text_rows([text]), count, axis=0)
