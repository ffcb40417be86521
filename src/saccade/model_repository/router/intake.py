# SPDX-License-Identifier: Apache-2.0
"""A request as it came to the job it is: which component it is for, and what it asks of it."""

from typing import Any

import numpy as np
from choose import RequestRefused
from routes import Component, Routes


def component_for(components: dict[str, Component], given: set[str]) -> str:
    """The role of the component that takes these inputs.

    Raises: RequestRefused naming what was found and what is expected.
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
    """Number of samples in the request.

    Raises: RequestRefused if there is none.
    """
    rows = min((len(array) for array in inputs.values()), default=0)
    if rows == 0:
        raise RequestRefused("the request has no sample: the first axis of its inputs is 0")
    return rows


def check_axes(inputs: dict[str, np.ndarray], routes: Routes, role: str) -> None:
    """Axes with the same word have the same size, and none is empty.

    Raises: RequestRefused naming the input, its shape and the axes expected.
    """
    sizes: dict[str, int] = {}
    for spec in routes.components[role].inputs:
        if spec.name not in inputs or inputs[spec.name].dtype == object:
            continue
        shape = inputs[spec.name].shape
        # The server knows no tensor of the batch alone: it is one number wide.
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
    """A whole number in its range, from a string, an integer or a double.

    Raises: RequestRefused otherwise.
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
