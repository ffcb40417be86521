# SPDX-License-Identifier: Apache-2.0
"""The router's side of a network that answers questions: words, grids and boxes that it has."""

from typing import Any

import numpy as np
from choose import RequestRefused
from limits import shown
from plain_family import PlainFamily

SPECIAL = 4  # tokens in front of the first word: padding, start, end, a word not known
METADATA_KEYS = {"sizes": "grid", "box_count": "boxes"}


class Family(PlainFamily):
    """Questions as token ids, features as a grid of cells or as boxes."""

    def largest(self, name: str, metadata: dict[str, Any]) -> Any:
        """The largest number of an input, or one for each of its columns; none: any will do."""
        if name == "question" and metadata.get("words"):
            front = SPECIAL if metadata.get("vocabulary") == "words" else 0
            return len(metadata["words"]) + front - 1
        return (
            metadata.get(METADATA_KEYS[name])
            if name in METADATA_KEYS
            else super().largest(name, metadata)
        )

    def check(self, inputs: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
        """Whole numbers of a request are ones that the model has; features hold all their cells.

        Raises: RequestRefused otherwise.
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
