# SPDX-License-Identifier: Apache-2.0
"""The router's part of a captioner: the encoder once, then the steps of a search."""

from collections.abc import Callable
from typing import Any

import numpy as np
from backlog import Ticket
from caption_search import (
    SPECIAL,
    SearchedCaption,
    WrongSearch,
    best_captions,
    check_search,
    sentence,
    step_of,
)
from choose import RequestRefused
from outcomes import INVALID_REQUEST, CallerCheck, Refused
from plain_family import PlainFamily, text_rows, whole
from routes import ComponentRoute, Route, Routes

RANGES = {"beam": (1, 64), "max_length": (1, 256)}


class Family(PlainFamily):
    """Requests with images only: the router itself runs the steps of the search."""

    parameters = ("beam", "max_length", "end")
    together = False  # each request's search ends at a different time

    def components(self) -> dict[str, ComponentRoute]:
        """Return the encoder."""
        return {"encode": self.routes.components["encode"]}

    def read(
        self, route: Route, role: str, inputs: set[str], parameters: dict[str, Any]
    ) -> dict[str, Any]:
        """Read the beam, length limit and end of a request.

        Raises: RequestRefused if one is out of range, or not a word.
        """
        return {
            name: end_of(parameters[name])
            if name == "end"
            else whole(name, parameters[name], *RANGES[name])
            for name in self.parameters
            if name in parameters
        }

    def work(self, route: Route, rows: int, parameters: dict[str, Any]) -> float:
        """Return an upper limit of the request's steps, counted per hypothesis."""
        beam = parameters.get("beam", route.facts.get("beam", 1))
        return float(rows * beam * parameters.get("max_length", route.facts["max_length"]))

    def answer(
        self,
        route: Route,
        ticket: Ticket,
        inputs: dict[str, np.ndarray],
        call: Callable[[str, dict[str, np.ndarray], list[str]], dict[str, np.ndarray]],
    ) -> dict[str, np.ndarray]:
        """Return the sentences of a request's images and the attention map of each word.

        Shapes: -> caption uint8 [b bytes], attention float32 [b steps h w], zeros after a
                sentence.
        Raises: Refused if the search settings are wrong, or the caller's deadline passes.
        """
        metadata = route.facts
        try:
            settings = search_settings(metadata, ticket.parameters)
            captions = search(self.routes, route, ticket, inputs, settings, call)
        except WrongSearch as error:
            raise Refused(str(error), INVALID_REQUEST) from error
        sentences = [sentence(caption, metadata["words"]) for caption in captions]
        steps = max(1, *(len(caption.attention) for caption in captions))
        maps = np.zeros((len(captions), steps, *captions[0].attention.shape[1:]), np.float32)
        for row, caption in zip(maps, captions, strict=True):
            row[: len(caption.attention)] = caption.attention
        return {"caption": text_rows(sentences), "attention": maps}


def search_settings(metadata: dict[str, Any], parameters: dict[str, Any]) -> dict[str, int]:
    """Return beam, length limit and end token, from the request or the model.

    Raises: WrongSearch if one is out of range, or not a word of the model.
    """
    words = metadata["words"]
    settings = {
        "beam": parameters.get("beam", metadata.get("beam", 1)),
        "max_length": parameters.get("max_length", metadata["max_length"]),
        "end": token(parameters["end"], words) if "end" in parameters else metadata["end"],
    }
    check_search(**settings, longest=metadata["max_length"], vocabulary=SPECIAL + len(words))
    return settings


def search(
    routes: Routes,
    route: Route,
    ticket: Ticket,
    inputs: dict[str, np.ndarray],
    settings: dict[str, int],
    call: Callable[[str, dict[str, np.ndarray], list[str]], dict[str, np.ndarray]],
) -> list[SearchedCaption]:
    """Return the best sentence of each image."""
    encode, components = routes.components["encode"], route.parts
    state = call(components["encode"], inputs, list(encode.outputs))
    waits = CallerCheck(ticket)
    names = {spec.name for spec in routes.components["step"].inputs}
    state = {name: value for name, value in state.items() if name in names}
    outputs = list(routes.components["step"].outputs)

    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        waits.check(f"in the search of variant '{route.name}'")
        arrays = {name: column(array) for name, array in arrays.items()}
        return call(components["step"], arrays, outputs)

    step = step_of(run)
    return best_captions(step, state, start=int(route.facts["start"]), **settings)


def column(array: np.ndarray) -> np.ndarray:
    """Turn one number per hypothesis into a column, as the server expects."""
    return array[:, None] if array.ndim == 1 else array


def token(text: str, words: list[str]) -> int:
    """Return the token of a word, or of a number.

    Raises: WrongSearch if the model does not have the word.
    """
    if text.isdecimal():
        return int(text)
    if text not in words:
        raise WrongSearch(f"end is {text!r:.60}, expected a word of the model or a token's number")
    return SPECIAL + words.index(text)


def end_of(value: Any) -> str:
    """Return the word that ends a sentence, or its token's number.

    Raises: RequestRefused if it is neither.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestRefused(f"parameter end is {value!r:.60}, expected a word or a token's number")
    return str(value)
