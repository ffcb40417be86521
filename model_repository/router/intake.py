# SPDX-License-Identifier: Apache-2.0
"""Check an incoming request: its component, and its axes, rows and numbers."""

from typing import Any

import numpy as np
from choose import RequestRefused
from routes import ComponentRoute, Routes


def component_for(components: dict[str, ComponentRoute], given: set[str]) -> str:
    """Return the role of the component that takes these inputs.

    Raises: RequestRefused with the inputs found and expected.
    """
    for role, component in components.items():
        if component.fits(given):
            return role
    wanted = []
    for component in components.values():
        filled = [
            name
            for name in component.optional
            if name in {value.name for value in component.inputs}
        ]
        optional = f" [and {', '.join(filled)}]" if filled else ""
        wanted.append(" and ".join(component.required) + optional)
    names = ", ".join(sorted(given)) or "none"
    raise RequestRefused(f"inputs are {names}; expected {', or '.join(wanted)}")


def count_rows(inputs: dict[str, np.ndarray]) -> int:
    """Return the number of samples in the request.

    Raises: RequestRefused if there is none.
    """
    rows = min((len(array) for array in inputs.values()), default=0)
    if rows == 0:
        raise RequestRefused("the request has no sample: the first axis of its inputs is 0")
    return rows


def check_axes(inputs: dict[str, np.ndarray], routes: Routes, role: str) -> None:
    """Check that axes of the same name have the same size, and that no axis is empty.

    Raises: RequestRefused with the input, its shape and the expected axes.
    """
    sizes: dict[str, int] = {}
    for spec in routes.components[role].inputs:
        if spec.name not in inputs or inputs[spec.name].dtype == object:
            continue
        shape = inputs[spec.name].shape
        # The server has no tensors with a batch axis only: such a tensor arrives as [b 1].
        axes = spec.axes.split() if " " in spec.axes else [spec.axes, "1"]
        fits = len(shape) == len(axes)
        for axis, size in zip(axes, shape, strict=False):
            fits &= size > 0 and size == (
                int(axis) if axis.isdigit() else sizes.setdefault(axis, size)
            )
        if not fits:
            raise RequestRefused(
                f"input {spec.name} has shape {list(shape)}, expected [{' '.join(axes)}]"
                + "".join(f", {axis} = {size}" for axis, size in sizes.items() if axis != "b")
            )


def whole(name: str, value: Any, low: int, high: int) -> int:
    """Return a parameter's whole number, from a string, an integer or a double.

    Raises: RequestRefused if it is not a whole number in the range.
    """
    try:
        parsed = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        parsed = float("nan")
    if not (low <= parsed <= high and parsed == int(parsed)):
        raise RequestRefused(
            f"parameter {name} is {value!r:.60}, expected a whole number from {low} to {high}"
        )
    return int(parsed)
