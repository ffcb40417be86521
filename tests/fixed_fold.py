# SPDX-License-Identifier: Apache-2.0
"""Fold as an export does, without operations whose result depends on the CPU."""

from typing import Any

from saccade.models.fixed_order import FixedOrder


def folded_in_order(model: Any) -> Any:
    """Return the folded form, computed in the same order on every CPU."""
    with FixedOrder() as order:
        folded = model.fold()
    assert not order.others, f"models/fixed_order.py has no {sorted(order.others)}"
    return folded
