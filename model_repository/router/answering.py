# SPDX-License-Identifier: Apache-2.0
"""What a request asks for and how it is answered, apart from the server and its lanes.

The router runs this file for the groups of its lanes. `saccade predict` and bulk jobs run it for
one request at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from backlog import Ticket
from chain import EMBEDDING, SIMILARITIES, bytes_of, marks_of, outputs_of
from chain import OUTPUTS as OF_ALL
from choose import (
    Followed,
    RequestRefused,
    Wish,
    all_policies,
    choose,
    policy_of,
    steps_of,
    wish_of,
)
from decoding import Decoding, expected_megapixels
from image_decoding import ImageInput
from plain_family import OUTPUTS, Labels, check_axes, component_for, count_rows, family_of, repeated
from routes import Route, read_routes
from spaces import Spaces

if TYPE_CHECKING:
    from decoding import Observed
    from lane import Lane

NAMES = ("variant", "variant_sha256")
LANES = "saccade_lanes"  # output with a report of the lanes
SPACE = "space"  # parameter: the variant in whose space the embeddings of another are wanted
DEGRADED = "degraded"
# Most requests have the parameters of an earlier one, which are not read again.
KEPT, KEPT_TEXT = 256, 512  # texts, and characters of one

Arrays = dict[str, np.ndarray]


class RequestChoice(NamedTuple):
    """The answer that parameters choose. Requests share it, so nothing may change it."""

    parameters: dict[str, Any]
    wish: Wish | None  # None: exactly what is named must answer
    followed: Followed | None
    route: Route  # the variant that answers, or the first one of the policy
    space: str = ""  # the variant in whose space embeddings are; empty: the one that answers


class Ready(NamedTuple):
    """A request whose inputs are ready for the model."""

    ticket: Ticket
    inputs: Arrays

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key of requests that may share a call: equal inputs and shapes."""
        return tuple((name, array.shape[1:]) for name, array in sorted(self.inputs.items()))


class Answering:
    """The files that `saccade repository` wrote into a router's folder, and their rules."""

    def __init__(self, folder: Path) -> None:
        self.spaces, self.routes = Spaces(folder), read_routes(folder / "routes.json")
        # Policies of embeddings share a full model, into whose space variants are mapped.
        self.space = next((one.full for one in self.routes.policies if one.embeds), "")
        variants = [
            route._replace(in_space=self.spaces.leads(route.name, self.space))
            for route in self.routes.variants
        ]
        self.routes = self.routes._replace(variants=tuple(variants))
        declared = self.routes.preprocessing
        self.wanted = ImageInput.from_dict(declared) if declared else None
        self.images = {
            route.name: ImageInput.from_dict(route.preprocessing)
            if route.preprocessing
            else self.wanted
            for route in self.routes.variants
        }
        self.orders = {
            route.name: np.array(route.order) for route in self.routes.variants if route.order
        }
        self.family = family_of(self.routes, folder)
        self.labels = Labels(folder, self.routes.variants)
        self.policies = all_policies(self.routes)
        self.chains = {policy.name: steps_of(self.routes, policy) for policy in self.policies}
        self._kept_choice = lru_cache(KEPT)(self._choice)
        self._role = lru_cache(KEPT)(partial(component_for, self.family.components()))

    def choice(self, text: str, outputs: Iterable[str] = ()) -> RequestChoice:
        """Return what a request's parameters, a JSON object, ask for.

        `outputs` tell whether it is for embeddings, which have policies of their own.

        Raises: RequestRefused for parameters that are unknown, invalid or contradict each other.
        """
        embeds = bool(self.space) and EMBEDDING in outputs and LANES not in outputs
        choice = self._kept_choice if len(text) <= KEPT_TEXT else self._choice
        return choice(text, embeds)

    def withdraw(self, policy: str, reason: str) -> None:
        """Let the full model answer the requests for a policy from now on."""
        self.routes.withdrawn[policy] = reason
        # Replaced and not cleared: a choice may be under way.
        self._kept_choice = lru_cache(KEPT)(self._choice)

    def _choice(self, text: str, embeds: bool) -> RequestChoice:
        parameters, own_names = json.loads(text or "{}"), self._own_names
        routes = self.routes.of(embeds=embeds)
        wish = None if SPACE in parameters else wish_of(routes, parameters, own_names)
        followed = wish.followed if wish else policy_of(routes, parameters, own_names)
        if wish:
            wish = wish._replace(embeds=embeds)
        if followed is None:
            route = choose(self.routes, {} if wish else parameters, own_names)
        else:
            route = self.chains[followed.policy.name][0]
        space = self.space if embeds and (wish or followed) else ""
        if SPACE in parameters:
            space = self._space(str(parameters[SPACE]), route, embeds=embeds and not followed)
        return RequestChoice(parameters, wish, followed, route, space)

    @property
    def _own_names(self) -> tuple[str, ...]:
        return (*self.family.parameters, *((SPACE,) if self.space else ()))

    def _space(self, name: str, route: Route, *, embeds: bool) -> str:
        """Return the variant that a request names as the space of its embeddings.

        Raises: RequestRefused if there is no map, or the request has no use for one.
        """
        known = [one for one in self.routes.variants if self.spaces.leads(route.name, one.name)]
        found = [one.name for one in known if name in (one.name, one.setting)]
        if not embeds or not found:
            raise RequestRefused(
                f"parameter {SPACE} is {name!r:.60}; expected one of "
                f"{', '.join(one.setting for one in known)} in a request for the output "
                f"{EMBEDDING} of {route.name} without a policy: there are no other maps"
            )
        return found[0]

    def component(
        self, choice: RequestChoice, inputs: set[str], outputs: Iterable[str]
    ) -> tuple[str, RequestChoice]:
        """Return the role of the component for these inputs, and the choice for it.

        Raises: RequestRefused if no component takes the inputs.
        """
        role = self._role(frozenset(inputs))
        if not choice.wish or self._adapts(choice, role, set(outputs) - {LANES}):
            return role, choice
        if choice.followed is None:  # `max_latency_ms` then means what it means without load
            route = choose(self.routes, choice.parameters, self._own_names)
            choice = choice._replace(route=route, space="")
        return role, choice._replace(wish=None)

    def ticket(
        self,
        choice: RequestChoice,
        role: str,
        inputs: Arrays,
        outputs: tuple[str, ...],
        **of_caller: Any,
    ) -> Ticket:
        """Return a request with its cost; `of_caller` are the fields about its caller.

        Raises: RequestRefused for wrong inputs, or an output that a policy does not allow.
        """
        route, parameters = choice.route, choice.parameters
        check_axes(inputs, self.routes, role)
        self.family.check(inputs, route.facts)
        rows = count_rows(inputs)
        own = self.family.read(route, role, set(inputs), parameters)
        names = self.routes.components[role].encoded
        files = [file for name in names for file in inputs[name].flat]
        if choice.followed is not None:
            by_policy = (EMBEDDING,) if choice.space else self.family.by_policy
            outputs = outputs_of(outputs, by_policy, none_named=LANES in outputs)
        if choice.space and not self._embeds(role):
            raise RequestRefused(
                f"inputs {', '.join(sorted(inputs))}: only images are embedded in another space"
            )
        return Ticket(
            role=role,
            inputs=inputs,
            rows=rows,
            parameters=own,
            wanted=outputs,
            work=self.family.work(route, rows, own),
            megapixels=expected_megapixels(files, self.wanted) if self.wanted else 0.0,
            size=bytes_of(inputs),
            space=choice.space,
            **of_caller,
        )

    def on_route(self, ticket: Ticket, route: Route) -> Ticket:
        """Return a request for a variant that its parameters do not name.

        Raises: RequestRefused if the variant does not have the inputs' numbers.
        """
        self.family.check(ticket.inputs, route.facts)
        return ticket._replace(work=self.family.work(route, ticket.rows, ticket.parameters))

    def chain(self, ticket: Ticket, followed: Followed) -> tuple[Route, ...]:
        """Return the variants of a request's policy.

        Raises: RequestRefused for a request that no policy covers.
        """
        routes, needed = self.chains[followed.policy.name], self.family.decides
        if not (ticket.space or self._decides(ticket.role, routes[0])):
            raise RequestRefused(
                f"inputs {', '.join(sorted(ticket.inputs))}: the answer has no {needed}, which a "
                "policy needs; choose one variant by budget"
            )
        self.family.check_followed(ticket)
        for route in routes[1:]:
            self.family.check(ticket.inputs, route.facts)
        return routes

    def decoding(
        self, route: Route, lane: Lane, ticket: Ticket, observed: Observed | None = None
    ) -> Decoding | None:
        """Return the image files of a request, to be decoded into the pixels that a variant takes.

        None if they were decoded ahead, or for an earlier step of a policy.
        Raises: Refused for too many megapixels together.
        """
        arrays = {name: ticket.inputs[name] for name in self.routes.components[ticket.role].encoded}
        files = {name: own.ravel().tolist() for name, own in arrays.items() if own.dtype == object}
        if not files:
            return None
        wanted = self.images[route.name]
        assert wanted is not None
        return Decoding(files, wanted, ticket, lane, observed)

    def decode(
        self, route: Route, lane: Lane, ticket: Ticket, observed: Observed | None = None
    ) -> None:
        """Replace the image files of a request by the pixels that a variant takes.

        Raises: Refused for a bad image, or if the caller no longer waits.
        """
        decoding, complete = self.decoding(route, lane, ticket, observed), False
        if decoding is None:
            return
        try:
            for index in range(len(decoding)):
                decoding.decode(index)
            complete = True
        finally:
            decoding.end(complete=complete)

    def ready(self, route: Route, ticket: Ticket) -> Ready:
        """Return a request, whose images have been decoded, for the model."""
        inputs = dict(ticket.inputs)
        self.family.fill(route, ticket, inputs)
        return Ready(ticket, inputs)

    def answers(
        self,
        route: Route,
        role: str,
        group: list[Ready],
        call: Callable[[str, Arrays, list[str]], Arrays],
    ) -> list[Arrays]:
        """Return each request's rows of the answer, with one call for all if the family allows it.

        `call` runs a model by its name, on inputs by name, for the named outputs.
        """
        if not self.family.together:
            return [self.family.answer(route, one.ticket, one.inputs, call) for one in group]
        outputs = self.routes.components[role].outputs
        tickets = [request.ticket for request in group]
        asked = {name for ticket in tickets for name in ticket.wanted}
        asked |= {self.family.decides for ticket in tickets if ticket.sampled}
        scored = self.labels.known(route, role) and bool(asked & set(OUTPUTS))
        wanted = [name for name in outputs if name in asked or (scored and name == "embedding")]
        # A caller may request the variant's name only; the call still proves that it answers.
        wanted = wanted or [outputs[0]]
        inputs = group[0].inputs
        if len(group) > 1:  # a single request is not copied
            inputs = {
                name: np.concatenate([request.inputs[name] for request in group]) for name in inputs
            }
        arrays = call(route.parts[role], inputs, wanted)
        if route.name in self.orders:
            order = self.orders[route.name]
            by_label = {name: arrays[name][:, order] for name in OUTPUTS if name in arrays}
            arrays = {**arrays, **by_label}
        if scored:
            arrays |= self.labels.scores(route, arrays["embedding"])
        edges = accumulate((ticket.rows for ticket in tickets), initial=0)  # NumPy's is slower
        rows = [
            {name: value[start:stop] for name, value in arrays.items()}
            for start, stop in pairwise(edges)
        ]
        return [self._placed(route, *pair) for pair in zip(tickets, rows, strict=True)]

    def _placed(self, route: Route, ticket: Ticket, arrays: Arrays) -> Arrays:
        """Return an answer with its embeddings in the space that the request is for."""
        if not ticket.space or EMBEDDING not in arrays:
            return arrays
        decides = SIMILARITIES in ticket.wanted
        return self.spaces.placed(route.name, ticket.space, arrays, decides=decides)

    def _adapts(self, choice: RequestChoice, role: str, wanted: set[str]) -> bool:
        """Return whether the answers of different variants to a request can be compared."""
        if choice.space:
            # A caller who does not ask how it was chosen gets the answers of one variant.
            asked = choice.followed is not None or DEGRADED in wanted
            return asked and wanted <= {EMBEDDING, *OF_ALL} and self._embeds(role)
        comparable = choice.followed is not None or wanted <= {*self.family.by_policy, *OF_ALL}
        return comparable and self._decides(role, choice.route)

    def _embeds(self, role: str) -> bool:
        return role != "text" and EMBEDDING in self.routes.components[role].outputs

    def _decides(self, role: str, route: Route) -> bool:
        outputs = self.routes.components[role].outputs
        return self.family.decides in outputs or self.labels.known(route, role)


def answer_of(ticket: Ticket, arrays: Arrays, route: Route) -> Arrays:
    """Return the wanted outputs: the component's, the variant's name, and how it was chosen."""
    texts = zip(NAMES, (route.name, route.sha256), strict=True)
    named = {name: repeated(text, ticket.rows) for name, text in texts if name in ticket.wanted}
    every = {**arrays, **named, **marks_of(ticket)}
    return {name: array for name, array in every.items() if name in ticket.wanted}
