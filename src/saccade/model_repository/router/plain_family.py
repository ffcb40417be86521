# SPDX-License-Identifier: Apache-2.0
"""The router's side of a family: what its requests may say, and how one is answered.

Most families have nothing of their own: a request is for the component whose inputs it brings. One
that has more brings a `family.py` beside this file, with a class `Family` made from this one.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from limits import check_numbers, largest
from routes import Component, Route, Routes
from ticket import Ticket

FILE = "family.py"


class PlainFamily:
    """A family without parameters of its own, whose components all answer requests."""

    parameters: tuple[str, ...] = ()  # that a request may have beside the choice
    together = True  # requests may share a call of a model; else `answer` is asked for each

    def __init__(self, routes: Routes) -> None:
        self.routes = routes

    def components(self) -> dict[str, Component]:
        """The components that a request may be for, by role."""
        return self.routes.components

    def check(self, inputs: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
        """Whole numbers of a request are ones that the model has.

        Raises: RequestRefused otherwise.
        """
        check_numbers(inputs, metadata, self.largest)

    def largest(self, name: str, metadata: dict[str, Any]) -> Any:
        """The largest number of an input, or one for each of its columns; none: any will do."""
        return largest(name, metadata)

    def read(
        self, route: Route, role: str, given: set[str], parameters: dict[str, Any]
    ) -> dict[str, Any]:
        """The family's own parameters of a request, checked; `given` are its inputs.

        Raises: RequestRefused if one is out of range, or nothing here would obey it.
        """
        return {}

    def work(self, route: Route, rows: int, parameters: dict[str, Any]) -> float:
        """The size of a request for the queue of its lane: rows, or more where they differ."""
        return float(rows)

    def fill(self, route: Route, ticket: Ticket, inputs: dict[str, np.ndarray]) -> None:
        """Add the inputs that the router draws where a request does not bring them."""

    def answer(
        self,
        route: Route,
        ticket: Ticket,
        inputs: dict[str, np.ndarray],
        step_done: Callable[[], None],
    ) -> dict[str, np.ndarray]:
        """The answer to one request, where requests do not share calls.

        Raises: Refused if it cannot be answered, or the caller's time runs out.
        """
        raise NotImplementedError


def family_of(routes: Routes, folder: Path) -> PlainFamily:
    """The family's own side, where it has brought one into the router's folder."""
    if (folder / FILE).exists():
        family: PlainFamily = import_module("family").Family(routes)
        return family
    return PlainFamily(routes)
