# SPDX-License-Identifier: Apache-2.0
"""A request as it came to the job it is: which part it is for, and what it asks of it."""

from typing import Any

import numpy as np
from choose import OWN, RequestRefused
from initial_state import check_slots
from routes import Route, Routes

# Per family, what the router itself takes as large at most.
MOST = {"slots": 64, "beam": 64, "max_length": 256, "seed": 2**31 - 1}
LEAST = {"slots": 1, "beam": 1, "max_length": 1, "seed": 0}


def part_for(routes: Routes, given: set[str]) -> str:
    """The role of the part that takes these inputs.

    Raises: RequestRefused naming what was found and what is expected.
    """
    parts = routes.parts_to_ask()
    for role, part in parts.items():
        if part.fits(given):
            return role
    wanted = []
    for part in parts.values():
        filled = [name for name in part.optional if name in {each.name for each in part.inputs}]
        optional = f" [and {', '.join(filled)}]" if filled else ""
        wanted.append(" and ".join(part.required) + optional)
    found = ", ".join(sorted(given)) or "none"
    raise RequestRefused(f"inputs are {found}; expected {', or '.join(wanted)}")


def own_parameters(
    routes: Routes, route: Route, role: str, given: set[str], parameters: dict[str, Any]
) -> dict[str, Any]:
    """A family's own parameters, checked; those that nothing here would obey are refused.

    Raises: RequestRefused otherwise.
    """
    found = {
        name: _end(parameters[name]) if name == "end" else _whole(name, parameters[name])
        for name in OWN.get(routes.family, ())
        if name in parameters
    }
    if routes.family == "slot-attention" and found:
        if role != "" or "initial_state" in given:
            raise RequestRefused(
                f"parameter {sorted(found)[0]} draws the initial state, but the request brings "
                f"{', '.join(sorted(given))}; leave one of them out"
            )
        check_slots(route.facts, found.get("slots", 1))
    return found


def work_of(routes: Routes, route: Route, rows: int, parameters: dict[str, Any]) -> float:
    """What the model does for a request: rows, or of a search at most so many hypotheses' steps."""
    if routes.family != "captioner":
        return float(rows)
    beam = parameters.get("beam", route.facts.get("beam", 1))
    return float(rows * beam * parameters.get("max_length", route.facts["max_length"]))


def count_rows(inputs: dict[str, np.ndarray]) -> int:
    """How many samples the request has.

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
    for spec in routes.parts[role].inputs:
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


def _whole(name: str, value: Any) -> int:
    low, high = LEAST[name], MOST[name]
    try:
        parsed = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        parsed = float("nan")
    if not (low <= parsed <= high and parsed == int(parsed)):
        raise RequestRefused(
            f"parameter {name} is {value!r:.60}, expected a whole number from {low} to {high}"
        )
    return int(parsed)


def _end(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestRefused(f"parameter end is {value!r:.60}, expected a word or a token's number")
    return str(value)
