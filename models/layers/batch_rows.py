# SPDX-License-Identifier: Apache-2.0
"""Noise for a part of a batch: the numbers that a pass over the whole batch would draw.

A batch may be passed through the model in parts, one per process or one after the other. Each part
draws for the whole batch and uses its own rows, so the sum of the parts equals one pass, and the
random generators of all processes stay in the same state.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class BatchRows:
    """The rows of a part: `count` of `total`, beginning at `first`."""

    first: int
    count: int
    total: int


# Not a context variable: autograd recomputes layers in threads of its own.
_current: BatchRows | None = None


def current_rows() -> BatchRows | None:
    """Return the rows of the part in work; None if it is the whole batch."""
    return _current


@contextmanager
def rows_of_batch(rows: BatchRows | None) -> Iterator[None]:
    """Draw noise for these rows inside the block."""
    global _current
    before, _current = _current, rows
    try:
        yield
    finally:
        _current = before


def drawn(
    draw: Callable[..., Tensor], shape: Sequence[int], like: Tensor, *, by_row: bool = True
) -> Tensor:
    """Return `draw(shape)`, such as torch.rand, of the type of `like`.

    In a part of a batch, these are its rows of a draw for the whole batch; if `by_row` is false,
    all parts have the same numbers.

    Shapes: `shape`; if `by_row`, its first axis is a multiple of the part's rows.
    """
    kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    rows = _current
    if rows is None or not by_row:
        return draw(tuple(shape), **kind)
    size = shape[0] // rows.count
    whole = draw((size * rows.total, *shape[1:]), **kind)
    return whole[size * rows.first : size * (rows.first + rows.count)]
