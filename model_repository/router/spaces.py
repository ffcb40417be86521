# SPDX-License-Identifier: Apache-2.0
"""Embeddings in the space of another variant: linear maps, and anchors by which policies decide.

The router runs this file, and `saccade calibrate` imports it, so that both compute the same
numbers. NumPy only.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

FILE = "spaces.npz"  # arrays as `map_name` and ANCHORS call them
ANCHORS = "anchors"  # float32 [anchors d], rows of length 1: vectors of the full model
SCALE = np.float32(100.0)  # of similarities, as logits usually have; a temperature divides them
_LEAST = np.float32(1e-12)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return the rows with length 1.

    Shapes: [n d] -> float32 [n d].
    """
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _LEAST)


def mapped(embedding: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return embeddings in another space, as long as the vectors there usually are.

    The last two rows of the matrix are what is added, and that length in every column.
    Shapes: embedding [n d], matrix [d+2 e] -> float32 [n e].
    """
    return unit(unit(embedding) @ matrix[:-2] + matrix[-2]) * matrix[-1]


def similarities(embedding: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Return how similar embeddings are to the anchors, from which a policy decides.

    Shapes: embedding [n d], anchors [k d] -> float32 [n k].
    """
    return SCALE * (unit(embedding) @ anchors.T)


def map_name(source: str, target: str) -> str:
    """Return the name of the array that maps one variant's embeddings into another's space."""
    return f"{source}.{target}"


class Spaces:
    """The maps and anchors in a router's folder; there may be none."""

    def __init__(self, folder: Path) -> None:
        self._arrays: Mapping[str, np.ndarray] = {}
        if (folder / FILE).exists():
            with np.load(folder / FILE, allow_pickle=False) as file:
                self._arrays = dict(file)

    def leads(self, source: str, target: str) -> bool:
        """Return whether a variant's embeddings are, or can be brought, in the space of another."""
        return source == target or map_name(source, target) in self._arrays

    def placed(
        self, source: str, target: str, arrays: dict[str, np.ndarray], *, decides: bool
    ) -> dict[str, np.ndarray]:
        """Return a variant's answer with its `embedding` in a space.

        `decides`: with the `similarities` there, by which a policy decides.
        """
        embedding = arrays["embedding"]
        if source != target:
            embedding = mapped(embedding, self._arrays[map_name(source, target)])
        own = {"embedding": embedding}
        if decides:
            own["similarities"] = similarities(embedding, self._arrays[ANCHORS])
        return {**arrays, **own}
