# SPDX-License-Identifier: Apache-2.0
"""A fold as an export makes it, with nothing in it that a CPU computes in its own way."""

from typing import Any

from saccade.models.fixed_order import FixedOrder


def folded_in_order(model: Any) -> Any:
    """The folded form, in the order that is the same on every CPU."""
    with FixedOrder() as order:
        folded = model.fold()
    assert not order.others, f"src/saccade/models/fixed_order.py has no {sorted(order.others)}"
    return folded
