# SPDX-License-Identifier: Apache-2.0
"""Move, scale or remove one slot of a state before the decoder paints it (numpy only)."""

import math
from collections.abc import Mapping

import numpy as np

from saccade.core.errors import SaccadeError

LIMIT = 1.0  # of a position: the middle of the outermost pixels
SCALES = (0.001, 2.0)  # allowed scales of a slot, as in the authors' code


def edited_state(
    state: Mapping[str, np.ndarray],
    *,
    slot: int,
    move: tuple[float, float] = (0.0, 0.0),
    scale: float = 1.0,
    remove: bool = False,
) -> dict[str, np.ndarray]:
    """Return a copy of a state with one slot changed, as inputs of `decode`.

    Shapes: state: slots [b k d] and, if the model has them, positions and scales [b k 2]
            -> the same names; [b k-1 ...] if the slot is removed.
    Units:  `slot` counts from 0; `move` (y, x) is added, in halves of the image; `scale`
            multiplies.
    Raises: SaccadeError if there is no such slot, if the model's slots have no position or
        scale to change, or if the result is out of range.
    Source: Biza et al. 2022, figures 5 and 6.
    """
    total = state["slots"].shape[1]
    if not 0 <= slot < total:
        raise SaccadeError(
            f"slot {slot} does not exist: found {total} slots. Choose 0 to {total - 1}."
        )
    if remove:
        if total == 1:
            raise SaccadeError("slot 0 is the only slot. Removing one needs at least 2.")
        return {name: np.delete(value, slot, axis=1) for name, value in state.items()}
    edited = {name: value.copy() for name, value in state.items()}
    if tuple(move) != (0.0, 0.0):
        _move(edited, slot, move)
    if scale != 1:
        _scale(edited, slot, scale)
    return edited


def painted(reconstruction: np.ndarray) -> np.ndarray:
    """Convert a decoder's reconstruction to an image.

    Shapes: [h w c] -> uint8 [h w c].
    Units:  fractions of full white.
    """
    return np.clip(np.rint(255 * reconstruction.astype(np.float64)), 0, 255).astype(np.uint8)


def _move(state: dict[str, np.ndarray], slot: int, move: tuple[float, float]) -> None:
    _need(state, "positions", "t-sa or ts-sa")
    if len(move) != 2 or not all(math.isfinite(step) for step in move):
        raise SaccadeError(f"move {move}: expected two finite numbers, down and right.")
    where = state["positions"][:, slot]
    moved = where + np.asarray(move, dtype=where.dtype)
    # In float32, a move exactly to the edge may round to just beyond it.
    if np.abs(moved).max() > LIMIT + 1e-6:
        raise SaccadeError(
            f"move {move[0]:g},{move[1]:g}: slot {slot} is at {_text(where[0])} and would move to "
            f"{_text(moved[0])}, expected both from -1 to 1 (y, x). Move it less."
        )
    state["positions"][:, slot] = moved


def _scale(state: dict[str, np.ndarray], slot: int, scale: float) -> None:
    _need(state, "scales", "ts-sa")
    if not (math.isfinite(scale) and scale > 0):
        raise SaccadeError(f"scale {scale:g}: expected a number above 0 (1: no change).")
    size = state["scales"][:, slot]
    scaled = size * size.dtype.type(scale)
    if scaled.min() < SCALES[0] or scaled.max() > SCALES[1]:
        raise SaccadeError(
            f"scale {scale:g}: slot {slot} has scale {_text(size[0])} and would get "
            f"{_text(scaled[0])}, expected from {SCALES[0]:g} to {SCALES[1]:g}. Change it less."
        )
    state["scales"][:, slot] = scaled


def _need(state: dict[str, np.ndarray], name: str, attention: str) -> None:
    if name not in state:
        raise SaccadeError(
            f"this model's slots have no {name}, only {', '.join(state)}. "
            f"Use a model with attention {attention}."
        )


def _text(pair: np.ndarray) -> str:
    return ",".join(f"{float(value):.3g}" for value in pair)
