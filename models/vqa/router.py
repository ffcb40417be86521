# SPDX-License-Identifier: Apache-2.0
"""The router's part of a question-answering network: limits of words, grids and boxes."""

from typing import Any

import numpy as np
from choose import RequestRefused
from plain_family import PlainFamily, shown

SPECIAL = 4  # tokens before the first word: padding, start, end, unknown
METADATA_KEYS = {"sizes": "grid", "box_count": "boxes"}


class Family(PlainFamily):
    """Questions as token ids, features as a grid of cells or as boxes."""

    def largest(self, name: str, metadata: dict[str, Any]) -> Any:
        """Return the largest value of an input, or one per column; None if there is no limit."""
        if name == "question" and metadata.get("words"):
            front = SPECIAL if metadata.get("vocabulary") == "words" else 0
            return len(metadata["words"]) + front - 1
        return (
            metadata.get(METADATA_KEYS[name])
            if name in METADATA_KEYS
            else super().largest(name, metadata)
        )

    def check(self, inputs: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
        """Check that the integers of a request are in range, and that features contain all cells.

        Raises: RequestRefused if they are not.
        """
        super().check(inputs, metadata)
        if metadata.get("layout") == "flat" and {"sizes", "features"} <= set(inputs):
            cells = inputs["sizes"].prod(axis=1)
            if (cells > inputs["features"].shape[1]).any():
                sample = int(cells.argmax())
                raise RequestRefused(
                    f"input sizes of sample {sample} is {shown(inputs['sizes'][sample])}, "
                    f"expected at most {inputs['features'].shape[1]} cells"
                )
