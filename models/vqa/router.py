# SPDX-License-Identifier: Apache-2.0
"""The router's side of a network that answers questions: words, grids and boxes that it has."""

from typing import Any

import numpy as np
from choose import RequestRefused
from limits import shown
from plain_family import PlainFamily

SPECIAL = 4  # tokens in front of the first word: padding, start, end, a word not known
FACTS = {"sizes": "grid", "box_count": "boxes"}


class Family(PlainFamily):
    """Questions as token ids, features as a grid of cells or as boxes."""

    def largest(self, name: str, facts: dict[str, Any]) -> Any:
        """The largest number of an input, or one for each of its columns; none: any will do."""
        if name == "question" and facts.get("words"):
            front = SPECIAL if facts.get("vocabulary") == "words" else 0
            return len(facts["words"]) + front - 1
        return facts.get(FACTS[name]) if name in FACTS else super().largest(name, facts)

    def check(self, inputs: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
        """Whole numbers of a request are ones that the model has; features hold all their cells.

        Raises: RequestRefused otherwise.
        """
        super().check(inputs, facts)
        if facts.get("layout") == "flat" and {"sizes", "features"} <= set(inputs):
            cells = inputs["sizes"].prod(axis=1)
            if (cells > inputs["features"].shape[1]).any():
                sample = int(cells.argmax())
                raise RequestRefused(
                    f"input sizes of sample {sample} is {shown(inputs['sizes'][sample])}, "
                    f"expected at most {inputs['features'].shape[1]} cells"
                )
