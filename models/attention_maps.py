# SPDX-License-Identifier: Apache-2.0
"""Maps over an image that show where a model looked: what a family returns to `saccade show`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError


@dataclass(frozen=True)
class Panel:
    """One map over the image; `most` is the weight drawn brightest (default: the map's maximum).

    Shapes: weights [h w], or None to draw the image alone; pixels uint8 [h w c] to draw instead.
    """

    title: str
    weights: np.ndarray | None = None
    pixels: np.ndarray | None = None
    most: float | None = None


@dataclass(frozen=True)
class MapRow:
    """Answer of one model and its maps: one row of the drawing."""

    title: str
    panels: tuple[Panel, ...]
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawing:
    """Answer of one model and a drawing that its family makes itself, as PNG bytes."""

    title: str
    png: bytes
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ShowRequest:
    """One image, and a model on a running server that reports where it looked.

    `client` is a `Client`, `view` is what its router reports about the model, and `options` are
    `ShowOptions`. All three come from a layer above this one.

    Shapes: pixels uint8 [h w 3], the image as it is drawn.
    """

    client: Any
    view: Any
    image: Path | bytes
    pixels: np.ndarray
    options: Any

    def ask(self, outputs: Sequence[str], inputs: Mapping[str, Any] | None = None) -> Any:
        """Return these outputs by name, and the variant that answered as `by`.

        Without `inputs`, the model gets the image.

        Raises: SaccadeError if the model was exported without one of them.
        """
        view = self.view
        provided = {name for role in view.components for name in view.outputs(role)}
        if missing := [name for name in outputs if name not in provided]:
            raise SaccadeError(
                f"{view.model} was exported without {missing[0]}, so it cannot show where it "
                f"looked. Export it again with --outputs {','.join(missing)}, then write the "
                "repository again: saccade repository FOLDER --out REPOSITORY"
            )
        values = {"image": [self.image]} if inputs is None else inputs
        result = self.client.infer(values, [*outputs, "variant"], self.options.budget)
        return {**result, "by": result["variant"].item(0).decode()}

    def attention(self) -> tuple[Any, np.ndarray]:
        """Return the answer with `attention`, and its maps over the image's patches.

        Shapes: -> [k h w], one per head or slot.
        Raises: SaccadeError if the tokens do not form a grid over the image.
        """
        answer, size = self.ask(("attention",)), self.view.image_size()
        weights = answer["attention"][0]
        tokens = weights.shape[-1]
        if grid := patch_grid(tokens, size):
            rows = weights.reshape(-1, tokens)[:, -grid[0] * grid[1] :]
            return answer, rows.reshape(-1, *grid)
        raise SaccadeError(
            f"{self.view.model}: {tokens} tokens do not form a grid over {size[0]} x {size[1]} "
            "pixels."
        )


OTHER_TOKENS = 5  # most tokens of an image that are not patches: a class token and four registers


def patch_grid(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the rows and columns of an image's patches; up to five tokens may be of another kind.

    These are class tokens and registers.
    Units: size is height and width in pixels.
    """
    height, width = size
    for rows in range(int(tokens**0.5) + height, 0, -1):
        if (
            rows * width % height == 0
            and 0 <= tokens - rows * (rows * width // height) <= OTHER_TOKENS
        ):
            return rows, rows * width // height
    return None


def mean_map(
    metadata: Mapping[str, Any], outputs: Mapping[str, np.ndarray], size: tuple[int, int]
) -> np.ndarray | None:
    """Return the mean attention over heads, slots or modules; None without `attention`.

    Shapes: outputs["attention"] [n ... tokens], patches last -> [n h w].
    """
    weights = outputs.get("attention")
    grid = None if weights is None else patch_grid(weights.shape[-1], size)
    if weights is None or grid is None:
        return None
    patches = weights[..., -grid[0] * grid[1] :].reshape(len(weights), -1, *grid)
    return np.asarray(patches.mean(1))


def zero_share(weights: np.ndarray) -> str:
    """Describe which share of a map has zero weight."""
    return f"{100 * float(np.mean(weights == 0)):.0f} % zero"
