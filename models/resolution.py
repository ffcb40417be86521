# SPDX-License-Identifier: Apache-2.0
"""Resolutions as budgets: a model that reads smaller images than it was trained with."""

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

from saccade.core.errors import SaccadeError
from saccade.models.budget import Budget, ComputeBudget

if TYPE_CHECKING:
    from torch import Tensor

    Model = TypeVar("Model")

UNIT = "pixels per side"
_EXAMPLE = 0.7  # of the side, about half of the pixels
_RESOLUTION = re.compile(r"r([1-9][0-9]{0,4})((?![r0-9])[a-z0-9]*)")


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of an image: rows and columns, and what a smaller image must not change."""

    rows: int
    columns: int
    windows: tuple[int, ...] = ()  # of a Swin: tokens per side of the windows of each stage
    antialias: bool = False  # filter positions before they are sampled at fewer places


def resolution_budget(config: Any, text: str) -> ComputeBudget | None:
    """Return the budget r160, the model on images 160 px high, or None if it is another text.

    The width keeps the aspect ratio. What the model keeps at that size may follow, as in r160fast;
    without it, that is all. The share is that of the pixels, times the share of what is kept.

    Raises: SaccadeError, with the nearest sides that fit, if the model cannot read that size.
    """
    found = _RESOLUTION.fullmatch(text)
    if found is None:
        return None
    height, rest = int(found[1]), found[2]
    if at_height(config, height) is None:
        raise SaccadeError(_refusal(config, text, height))
    part = config.budget(rest) if rest else config.budgets()[0]
    label = f"r{height}{part.label if rest else ''}"
    pixels = Fraction(height, config.height_px) ** 2
    share = Budget(float(pixels * part.share.fraction))
    return ComputeBudget(label, share, height, config.height_px, UNIT, part)


def at_height(config: Any, height_px: int) -> Any:
    """Return the configuration for images of that height and the same aspect ratio, None if none.

    The windows of a Swin stay as they are: its biases are learned for each place in a window.
    """
    width = Fraction(height_px * config.width_px, config.height_px)
    if config.token_grid is None or height_px > config.height_px or width.denominator > 1:
        return None
    try:
        smaller = replace(config, height_px=height_px, width_px=int(width))
    except SaccadeError:  # patches do not fill the image
        return None
    return smaller if smaller.token_grid.windows == config.token_grid.windows else None


def _refusal(config: Any, text: str, height: int) -> str:
    if config.token_grid is None:
        return (
            f"budget {text!r}: asks for images {height} px high, but this {config.called} model "
            "reads none, or has layers for one size of images only. Pass another budget."
        )
    sides = _sides(config)
    near = {max((side for side in sides if side < height), default=sides[0])}
    near |= {min((side for side in sides if side > height), default=sides[-1])}
    rule = "its patches must fill them"
    if config.token_grid.windows:
        rule += ", and its windows must tile every stage in their size"
    return (
        f"budget {text!r}: this {config.called} model reads images of {config.height_px} x "
        f"{config.width_px} px, or smaller ones of the same aspect ratio that fit: {rule}. Pass "
        f"the nearest: {', '.join(f'r{side}' for side in sorted(near))}."
    )


def _sides(config: Any) -> list[int]:
    """Return the heights of all images that fit, in pixels; the last is the model's own."""
    return [side for side in range(1, config.height_px + 1) if at_height(config, side)]


def examples(config: Any) -> str:
    """Return budgets of resolution, such as r224,r160; empty if only the model's own size fits."""
    own = getattr(config, "height_px", 0)
    near = range(math.ceil(_EXAMPLE * own), own)
    side = next((side for side in near if at_height(config, side)), None)
    return f"r{own},r{side}" if side else ""


def or_smaller(config: Any) -> str:
    """Return words that end an advice on budgets of a model."""
    sides = examples(config)
    return f", or read smaller images: --budget {sides}" if sides else ""


def resized(model: "Model", height_px: int) -> "Model":
    """Return the model for images of that height: all weights but those of positions are shared."""
    from saccade.models.shapes_only import Undrawn

    own: Any = model
    if height_px == own.config.height_px:
        return model
    config = at_height(own.config, height_px)
    with Undrawn():
        other = type(own)(config, fresh=False)
    weights = own.state_dict()
    for name, value in other.state_dict().items():
        if value.shape != weights[name].shape:  # only positions have the size of the grid
            weights[name] = resampled(weights[name], own.config.token_grid, config.token_grid)
    other.load_state_dict(weights, assign=True)
    made: Model = other.to(next(own.parameters())).train(own.training)
    return made


def resampled(table: "Tensor", grid: TokenGrid, wanted: TokenGrid) -> "Tensor":
    """Return positions for another grid, interpolated as by transformers (bicubic).

    Those before the grid's, of class tokens and registers, are kept.

    Shapes: table [k + rows columns, d] -> [k + wanted rows columns, d].
    """
    import torch

    first = len(table) - grid.rows * grid.columns
    patches = table[first:].reshape(1, grid.rows, grid.columns, -1).permute(0, 3, 1, 2)
    patches = torch.nn.functional.interpolate(
        patches,
        size=(wanted.rows, wanted.columns),
        mode="bicubic",
        align_corners=False,
        antialias=wanted.antialias,
    )
    return torch.cat((table[:first], patches[0].flatten(1).T))
