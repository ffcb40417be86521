# SPDX-License-Identifier: Apache-2.0
"""The router's side of a family: the parameters of its requests, and how to answer one.

Most families need nothing special: a request is for the component whose inputs it has. A family
that needs more adds a `family.py` next to this file, with a class `Family` derived from this one.
"""

from collections.abc import Callable, Set
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from backlog import Ticket
from choose import RequestRefused
from routes import ComponentRoute, Route, Routes

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

    def of_row(self, parameters: dict[str, Any], row: int) -> dict[str, Any]:
        """Return the parameters of a request with one row of another request alone."""
        return parameters

    def agrees(self, one: np.ndarray, other: np.ndarray, least: float | None) -> bool:
        """Return whether two variants give a row the same answer, by what decides of it.

        `least` is how much segmentations must agree.
        """
        return bool(one.argmax() == other.argmax())

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
        call: Callable[[str, dict[str, np.ndarray], list[str]], dict[str, np.ndarray]],
    ) -> dict[str, np.ndarray]:
        """Return the answer to one request, if requests do not share calls.

        `call` runs a model by its name, on inputs by name, for the named outputs.

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


def component_for(components: dict[str, ComponentRoute], given: Set[str]) -> str:
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


# Outputs that labels add to the component that takes images.
OUTPUTS = ("logits", "probabilities")


class Labels:
    """Class vectors of each variant that has them.

    Shapes: a file contains float32 [labels d], rows of length 1.
    """

    def __init__(self, folder: Path, routes: tuple[Route, ...]) -> None:
        self._vectors = {
            route.name: np.load(folder / route.classes, allow_pickle=False)
            for route in routes
            if route.classes
        }

    def known(self, route: Route, role: str) -> bool:
        """Return whether answers of this component get logits and probabilities."""
        return role == "image" and route.name in self._vectors

    def scores(self, route: Route, embedding: np.ndarray) -> dict[str, np.ndarray]:
        """Return logits and probabilities of the labels.

        Shapes: embedding [b d] -> both [b labels].
        """
        scale = np.float32(route.facts["logit_scale"])
        length = np.linalg.norm(embedding, axis=1, keepdims=True)
        code = embedding / np.maximum(length, np.float32(1e-12))
        logits = scale * (code @ self._vectors[route.name].T)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        return {"logits": logits.astype(np.float32), "probabilities": probabilities}


# Texts are rows of bytes and not string tensors: if a caller requests the classes of a string
# output, servers before July 2025 divide by zero and crash (triton-inference-server/server#8267).
def text_rows(texts: list[str]) -> np.ndarray:
    """Return the bytes of each text in UTF-8, padded with zeros to the longest.

    Shapes: -> uint8 [texts bytes]; at least one byte wide, since the server drops empty outputs.
    """
    encoded = [text.encode() for text in texts]
    width = max(1, *(len(row) for row in encoded))
    padded = b"".join(row.ljust(width, b"\0") for row in encoded)
    return np.frombuffer(padded, np.uint8).reshape(len(texts), width)


@lru_cache(maxsize=256)
def repeated(text: str, count: int) -> np.ndarray:
    """Repeat a string for each image.

    Shapes: -> uint8 [count bytes].
    """
    return np.repeat(text_rows([text]), count, axis=0)
