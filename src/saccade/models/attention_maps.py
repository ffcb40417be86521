# SPDX-License-Identifier: Apache-2.0
"""Maps over an image, that say where a model looked: what a family answers to `saccade show`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import SaccadeError


@dataclass(frozen=True)
class Panel:
    """One map over the image; `most` is the weight that is drawn brightest, by default its own.

    Shapes: weights [h w], or none for the image alone; pixels uint8 [h w c] in place of it.
    """

    title: str
    weights: np.ndarray | None = None
    pixels: np.ndarray | None = None
    most: float | None = None


@dataclass(frozen=True)
class MapRow:
    """Answer of one model and its maps, a row of the picture each."""

    title: str
    panels: tuple[Panel, ...]
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawing:
    """Answer of one model and a picture that its family draws itself, as PNG bytes."""

    title: str
    png: bytes
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ShowRequest:
    """One image, and a model behind a running server that is asked what it looked at.

    `client` is a `Client`, `view` what its router tells of itself, `options` are `ShowOptions`:
    of a layer above this one.

    Shapes: pixels uint8 [h w 3], the image as the picture shows it.
    """

    client: Any
    view: Any
    image: Path
    pixels: np.ndarray
    options: Any

    def ask(self, outputs: Sequence[str], inputs: Mapping[str, Any] | None = None) -> Any:
        """These outputs by name, and the variant that answered as `by`; without inputs the image.

        Raises: SaccadeError if the model was exported without one of them.
        """
        view = self.view
        served = {name for role in view.components for name in view.outputs(role)}
        if missing := [name for name in outputs if name not in served]:
            raise SaccadeError(
                f"{view.model} was exported without {missing[0]}, so that it cannot say where it "
                f"looked. Export again with --outputs {','.join(missing)}, then write the "
                "repository."
            )
        given = {"image": [self.image]} if inputs is None else inputs
        result = self.client.infer(given, [*outputs, "variant"], self.options.budget)
        return {**result, "by": result["variant"].item(0).decode()}

    def grid(self, tokens: int) -> tuple[int, int]:
        """Rows and columns of an image's patches, which come behind tokens of another kind.

        Raises: SaccadeError if so many tokens are no grid over the image.
        """
        height, width = self.view.image_size()
        for rows in range(int(tokens**0.5) + height, 0, -1):
            if rows * width % height == 0 and 0 <= tokens - rows * (rows * width // height) <= 2:
                return rows, rows * width // height
        raise SaccadeError(
            f"{self.view.model}: {tokens} tokens are no grid over {height} x {width} pixels."
        )


def zero_share(weights: np.ndarray) -> str:
    """Share of a map that weighs nothing, in words."""
    return f"{100 * float(np.mean(weights == 0)):.0f} % zero"
