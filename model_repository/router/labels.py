# SPDX-License-Identifier: Apache-2.0
"""Zero-shot labels at deployment: compare image codes with the vectors in the router's folder."""

from pathlib import Path

import numpy as np
from routes import Route

# Outputs that labels add to the component that takes images.
OUTPUTS = ("logits", "probabilities")


class Labels:
    """Class vectors of each variant that has them.

    Shapes: a file contains float32 [labels d], rows of length 1.
    """

    def __init__(self, folder: Path, routes: tuple[Route, ...]) -> None:
        self._vectors = {
            route.name: np.load(folder / route.classes, allow_pickle=False)
            for route in routes
            if route.classes
        }

    def known(self, route: Route, role: str) -> bool:
        """Return whether answers of this component get logits and probabilities."""
        return role == "image" and route.name in self._vectors

    def scores(self, route: Route, embedding: np.ndarray) -> dict[str, np.ndarray]:
        """Return logits and probabilities of the labels.

        Shapes: embedding [b d] -> both [b labels].
        """
        scale = np.float32(route.facts["logit_scale"])
        length = np.linalg.norm(embedding, axis=1, keepdims=True)
        code = embedding / np.maximum(length, np.float32(1e-12))
        logits = scale * (code @ self._vectors[route.name].T)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        return {"logits": logits.astype(np.float32), "probabilities": probabilities}
