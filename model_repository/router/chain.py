# SPDX-License-Identifier: Apache-2.0
"""The chain of a policy over the rows of one request, and what an answer says of its variants."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from backlog import Ticket
from choose import RequestRefused
from confidence import DECIDES, stops
from plain_family import PlainFamily, repeated, text_rows
from routes import PolicyRoute, Route

# Of a policy of embeddings: its output, and what it decides by.
EMBEDDING, SIMILARITIES = "embedding", "similarities"
# Outputs of every request with a policy, besides those of the family.
OUTPUTS = ("variant", "variant_sha256", "steps", "certified", "degraded")
Arrays = dict[str, np.ndarray]


def outputs_of(
    requested: Sequence[str], by_policy: Sequence[str], *, none_named: bool
) -> tuple[str, ...]:
    """Return the outputs of a request that follows a policy for the outputs `by_policy`.

    `none_named`: the caller named no output, so the server requests all.

    Raises: RequestRefused for an output that cannot be compared between variants.
    """
    allowed = (*by_policy, *OUTPUTS)
    if none_named:
        return allowed
    if odd := sorted(set(requested) - set(allowed)):
        raise RequestRefused(
            f"found output {odd[0]} in a request with a policy. Different variants may answer the "
            f"samples of one request, and their {odd[0]} cannot be compared. Request only "
            f"{', '.join(allowed)}, or choose one variant by budget"
        )
    return tuple(requested)


class RequestChain:
    """The rows of one request along a policy's variants: the remaining ones, and all answers."""

    def __init__(
        self, request: Ticket, policy: PolicyRoute, routes: Sequence[Route], family: PlainFamily
    ) -> None:
        """`routes` are the variants of the policy."""
        self._request, self._policy, self._routes, self._family = request, policy, routes, family
        self._decides = SIMILARITIES if policy.embeds else family.decides
        by_policy = (EMBEDDING,) if policy.embeds else family.by_policy
        kept = {*request.wanted, *([self._decides] if request.sampled else ())}
        self.kept = [name for name in by_policy if name in kept]
        self.at = 0  # the current step
        self.open = np.arange(request.rows)  # rows of which no step was confident
        # Decoding replaces the files in the request's own dictionary.
        self._files = {
            name: array for name, array in request.inputs.items() if array.dtype == object
        }
        # The preprocessing of each step: the first step with the same.
        kinds = [route.preprocessing for route in routes]
        self._forms = [kinds.index(kind) for kind in kinds]
        self._pixels: dict[int, tuple[np.ndarray, Arrays]] = {}  # by form: rows, and their images
        self._asked = self.open  # rows of the latest step
        self._arrays: Arrays = {}  # the latest answer to each row
        self._writable = False  # whether these are the request's own arrays
        self._answered_by = np.zeros(request.rows, np.int32)  # the step that gave it
        self.given_up = False  # whether the remaining rows are not certified

    @property
    def route(self) -> Route:
        """The variant of the current step."""
        return self._routes[self.at]

    @property
    def needed(self) -> tuple[str, ...]:
        """Outputs of each step: those of the request, and the one that decides."""
        return tuple({*self.kept, self._decides})

    def take(self, arrays: Arrays) -> np.ndarray:
        """Take the answers to the remaining rows, and go on to the next step if one is unsure.

        Shapes: -> int [unsure], the unsure ones among the remaining rows.
        """
        self._keep({name: arrays[name] for name in self.kept if name in arrays})
        self._answered_by[self.open], self._asked = self.at, self.open
        step = self._policy.steps[self.at]
        if step.threshold is None:
            return np.arange(0)
        decides = self._decides
        own = DECIDES[decides](self._policy.measure, arrays[decides], step.temperature)
        unsure = np.flatnonzero(~stops(own, step.threshold, arrays[decides], self._policy.early))
        if len(unsure):
            self.open = self.open[unsure]
            self.at += 1
        return unsure

    def left(self, inputs: Arrays, unsure: np.ndarray) -> Arrays:
        """Return the inputs of the current step, from those of the step before.

        Images are files again if no earlier step had pixels of the form that this one takes.
        """
        left = {name: array[unsure] for name, array in inputs.items()}
        before, form = self._forms[self.at - 1], self._forms[self.at]
        if form == before or not self._files:
            return left
        if before in self._forms[self.at + 1 :]:
            self._pixels[before] = self._asked, {name: inputs[name] for name in self._files}
        every = np.arange(self._request.rows), self._files
        rows, images = self._pixels.get(form, every)
        places = np.searchsorted(rows, self.open)
        return {**left, **{name: array[places] for name, array in images.items()}}

    def give_up(self) -> None:
        """Keep the previous step's answer to the remaining rows, not certified."""
        self.given_up = True
        self.at -= 1

    def answer(self) -> Arrays:
        """Return the wanted outputs of all rows."""
        named = {**self._arrays, **self._names(), "certified": self._certified()}
        named["degraded"] = degraded_of(self._request)
        return {name: array for name, array in named.items() if name in self._request.wanted}

    def decided(self, row: int) -> np.ndarray | None:
        """Return what decides of the answer to a row that was watched.

        None if it is the full model's own, or if the row did not get to the end of the chain.
        """
        route = self._routes[self._answered_by[row]]
        if route.name == self._policy.full or (self.given_up and row in self.open):
            return None
        return self._arrays[self._family.decides][row]

    def rows_by_step(self) -> list[int]:
        """Return how many rows ended at each step."""
        ended = np.bincount(self._answered_by, minlength=len(self._routes))
        return [int(rows) for rows in ended]

    def rows_by_end(self) -> Counter[tuple[int, bool]]:
        """Return the number of rows by the step that answered, and whether it is certified."""
        certified = self._certified()[:, 0].tolist()
        return Counter(zip(self._answered_by.tolist(), certified, strict=True))

    def _certified(self) -> np.ndarray:
        certified = truth(True, self._request.rows)
        if self.given_up:
            certified = certified.copy()
            certified[self.open] = False
        return certified

    def _keep(self, answers: Arrays) -> None:
        if len(self.open) == self._request.rows:
            self._arrays, self._writable = answers, False
            return
        if not self._writable:  # the memory belongs to the answer of a call
            self._arrays = {name: array.copy() for name, array in self._arrays.items()}
            self._writable = True
        for name, answer in answers.items():
            self._arrays[name][self.open] = answer

    def _names(self) -> Arrays:
        """Return the variant that answered each row, and after how many steps."""
        used = sorted({*self._answered_by.tolist()})
        routes = [self._routes[end] for end in used]
        if len(used) == 1:  # always true for one image, the most frequent request
            rows = self._request.rows
            return {
                "variant": repeated(routes[0].name, rows),
                "variant_sha256": repeated(routes[0].sha256, rows),
                "steps": ended_at(used[0] + 1, rows),
            }
        places = np.searchsorted(used, self._answered_by)
        return {
            "variant": text_rows([route.name for route in routes])[places],
            "variant_sha256": text_rows([route.sha256 for route in routes])[places],
            "steps": self._answered_by[:, None] + np.int32(1),
        }


def bytes_of(inputs: Arrays) -> int:
    """Return the bytes of a request's inputs, of which images may be files."""
    return sum(
        sum(map(len, array.flat)) if array.dtype == object else array.nbytes
        for array in inputs.values()
    )


@lru_cache(maxsize=128)
def truth(value: bool, rows: int) -> np.ndarray:
    """Return the same truth for all rows; do not change the array.

    Shapes: -> bool [rows 1].
    """
    return np.full((rows, 1), value, bool)


def degraded_of(ticket: Ticket) -> np.ndarray:
    """Return `degraded` of a request's answer.

    Shapes: -> bool [rows 1].
    """
    return truth(bool(ticket.adapted and ticket.adapted.degraded), ticket.rows)


def marks_of(ticket: Ticket) -> Arrays:
    """Return what the answer of one variant says about how it was chosen; empty for a budget."""
    if not (ticket.policy or ticket.adapted):
        return {}
    certified = ticket.adapted is None or ticket.adapted.certified
    return {
        "steps": ended_at(1, ticket.rows),
        "certified": truth(certified, ticket.rows),
        "degraded": degraded_of(ticket),
    }


@lru_cache(maxsize=256)
def ended_at(steps: int, rows: int) -> np.ndarray:
    """Return `steps` for rows that all ended after the same number; do not change the array.

    Shapes: -> int32 [rows 1].
    """
    return np.full((rows, 1), steps, np.int32)
