# SPDX-License-Identifier: Apache-2.0
"""The router's side of a family: the parameters of its requests, and how to answer one.

Most families need nothing special: a request is for the component whose inputs it has. A family
that needs more adds a `family.py` next to this file, with a class `Family` derived from this one.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from choose import RequestRefused
from routes import ComponentRoute, Route, Routes
from ticket import Ticket

FILE = "family.py"


class PlainFamily:
    """A family without its own parameters, whose components all answer requests."""

    parameters: tuple[str, ...] = ()  # parameters of requests besides the choice
    decides = "logits"  # the output from which a policy decides
    # Outputs of a request with a policy: those that different variants may answer row by row.
    by_policy: tuple[str, ...] = ("logits", "probabilities")
    together = True  # requests may share a call of a model; else `answer` is called for each

    def __init__(self, routes: Routes) -> None:
        self.routes = routes

    def components(self) -> dict[str, ComponentRoute]:
        """Return the components that a request may be for, by role."""
        return self.routes.components

    def check(self, inputs: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
        """Check that the model has the whole numbers of a request.

        Raises: RequestRefused otherwise.
        """
        check_numbers(inputs, metadata, self.largest)

    def largest(self, name: str, metadata: dict[str, Any]) -> Any:
        """Return the largest number of an input, or of each of its columns; None: no limit."""
        return largest(name, metadata)

    def read(
        self, route: Route, role: str, given: set[str], parameters: dict[str, Any]
    ) -> dict[str, Any]:
        """Check and return the family's own parameters of a request; `given` are its inputs.

        Raises: RequestRefused if one is out of range, or would have no effect here.
        """
        return {}

    def check_followed(self, ticket: Ticket) -> None:
        """Check that a policy's certificate covers the request.

        Raises: RequestRefused otherwise.
        """

    def work(self, route: Route, rows: int, parameters: dict[str, Any]) -> float:
        """Return the work of a request for its lane: rows, or more if rows differ in work."""
        return float(rows)

    def fill(self, route: Route, ticket: Ticket, inputs: dict[str, np.ndarray]) -> None:
        """Add the inputs that the router fills in if a request does not have them."""

    def answer(
        self,
        route: Route,
        ticket: Ticket,
        inputs: dict[str, np.ndarray],
        step_done: Callable[[], None],
    ) -> dict[str, np.ndarray]:
        """Return the answer to one request, if requests do not share calls.

        Raises: Refused if it cannot be answered, or the caller's time runs out.
        """
        raise NotImplementedError


def family_of(routes: Routes, folder: Path) -> PlainFamily:
    """Return the family from `family.py` in the router's folder, or else a plain family."""
    if (folder / FILE).exists():
        family: PlainFamily = import_module("family").Family(routes)
        return family
    return PlainFamily(routes)


def check_numbers(
    inputs: dict[str, np.ndarray],
    metadata: dict[str, Any],
    most_of: Callable[[str, dict[str, Any]], Any],
) -> None:
    """Check that the model has every size, count, length and id; `most_of` is like `largest`.

    Raises: RequestRefused with the input, the sample, and the numbers found and expected.
    """
    for name, array in inputs.items():
        if array.dtype != np.int64 or (most := most_of(name, metadata)) is None:
            continue
        least = 0 if name in ("tokens", "question") else 1
        wrong = ((array < least) | (array > np.asarray(most))).any(axis=1)
        if wrong.any():
            sample = int(wrong.argmax())
            raise RequestRefused(
                f"input {name} of sample {sample} is {shown(array[sample])}, expected "
                f"{least} to {shown(np.atleast_1d(most))}"
            )


def largest(name: str, metadata: dict[str, Any]) -> Any:
    """Return the largest number of an input, or of each of its columns; None without a limit."""
    if name == "tokens" and "vocabulary" in metadata:
        return int(metadata["vocabulary"]) - 1
    if name.partition("_")[0] == "length":
        return metadata.get("max_tokens")
    return metadata.get("condition_tokens") if name == "condition_length" else None


def shown(numbers: np.ndarray) -> str:
    """Return numbers as text, at most the first eight."""
    return ",".join(str(number) for number in numbers[:8]) + (",..." if numbers.size > 8 else "")
