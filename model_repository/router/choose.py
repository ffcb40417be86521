# SPDX-License-Identifier: Apache-2.0
"""Choose who answers a request: a variant, a policy, or any of several that adapt to the load.

These are pure functions over routes.json, with the standard library only. A policy is certified by
`saccade calibrate`; `saccade repository` writes it into routes.json.

The router runs this file and `saccade choose` imports it, so both apply the same rule.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from routes import PolicyRoute, Route, Routes


# Parameters that the protocol, the server and its clients use.
RESERVED = {
    "timeout", "priority", "headers", "classification", "binary_data", "binary_data_output",
    "binary_data_size",
}  # fmt: skip
# Headers of a traced caller. The server forwards them in the caller's spelling.
TRACE_CONTEXT = {"traceparent", "tracestate"}
RESERVED_PREFIXES = ("sequence_", "triton_", "shared_memory_")
# Fractions, read as everywhere in saccade: 2/3 is the nearest float.
_RATIO = re.compile(r"\s*([0-9]{1,9})\s*/\s*([1-9][0-9]{0,8})\s*")
# Units of a score that is a share; files of the first release have `fraction`.
SHARES = {"share", "fraction"}
HOW_TO_MEASURE = "Run `saccade bench` on the artefact folder, then `saccade repository` again"

POLICY, MAX_RISK, STRICT = "policy", "max_risk", "strict"
NEEDS_POLICIES = (
    "needs policies for such answers, and this repository has none. Run `saccade calibrate` on the "
    "artefact folder, then `saccade repository` again"
)

MAX_LATENCY = "max_latency_ms"


class RequestRefused(Exception):
    """Raised for a request that cannot be answered; the message goes to the caller."""


class ParameterRange(NamedTuple):
    """The allowed values of a parameter, as a function and as text for messages."""

    holds: Callable[[float], bool]
    words: str


class Rule(NamedTuple):
    """One way to choose: compare a figure of every variant with the request's number."""

    figure: str  # field of `Route` to compare
    at_least: bool  # the figure must be at least the request's number; else at most
    best: Callable[[Route], tuple[float, ...]]  # the fitting variant with the largest is chosen
    best_words: str
    words: str  # what a fitting variant has
    range: ParameterRange
    share_range: ParameterRange | None = None  # replaces `range` if scores are shares
    measured: str | None = None  # what `saccade bench` has to measure first
    compared: Callable[[float], float] = float
    by_speed: bool = False  # the best is the fastest, whose measured speed has an interval

    def fits(self, route: Route, value: float) -> bool:
        """Return whether the variant fits the request's number; never without a figure."""
        figure = getattr(route, self.figure)
        if figure is None:
            return False
        own, asked = self.compared(figure), self.compared(value)
        return own >= asked if self.at_least else own <= asked

    def wanted(self, routes: Routes, value: float) -> str:
        """Return the request in words, such as "a p95 of at most 5 ms"."""
        score = next((route.score_name for route in routes.variants if route.score_name), "score")
        return self.words.format(value=value, score=score)


def choose(routes: Routes, parameters: dict[str, Any], own: tuple[str, ...] = ()) -> Route:
    """Return the variant for a request's parameters; without any, the largest budget.

    `own` are the other parameters that requests of the family may have.

    Raises: RequestRefused for an unknown parameter, two choices, a value that is not a number or
        is out of range, or if no variant fits the request.
    """
    parameter = choice_of(parameters, tuple(RULES), own)
    if parameter is None:
        return best(routes, "budget", 1.0)
    given_value = parameters[parameter]
    if parameter == "budget" and (named := by_budget_name(routes, given_value)):
        return named
    return best(routes, parameter, asked_number(routes, parameter, given_value))


def asked_number(routes: Routes, parameter: str, value: Any) -> float:
    """Return the number of a parameter that chooses among these variants.

    Raises: RequestRefused if it is not one; for a budget, the message lists the budgets' names.
    """
    try:
        return number(parameter, value, share=scores_are_shares(routes))
    except RequestRefused as refused:
        if parameter != "budget":
            raise
        names = dict.fromkeys(route.setting for route in routes.answering)
        raise RequestRefused(f"{refused} ({', '.join(names)})") from None


def choice_of(
    parameters: dict[str, Any], choices: tuple[str, ...], others: tuple[str, ...]
) -> str | None:
    """Return the one parameter of a request that is one of these choices, or None.

    `others` are the parameters that a request may have besides the choice.

    Raises: RequestRefused for an unknown parameter, or for two choices.
    """
    known = (*choices, *others)
    given = [key for key in parameters if not is_reserved(key)]
    if unknown := sorted(set(given) - set(known)):
        raise RequestRefused(
            f"unknown parameter {unknown[0]!r:.60}, expected one of {', '.join(known)}"
        )
    chosen = sorted(set(given) & set(choices))
    if len(chosen) > 1:
        raise RequestRefused(f"parameters {' and '.join(chosen)} are given, expected one of them")
    return chosen[0] if chosen else None


def best(routes: Routes, parameter: str, value: float) -> Route:
    """Return the variant that the parameter's rule chooses.

    Raises: RequestRefused if no variant was measured, or none fits.
    """
    rule = RULES[parameter]
    fitting = [route for route in routes.answering if rule.fits(route, value)]
    if not fitting and all(getattr(route, rule.figure) is None for route in routes.answering):
        raise RequestRefused(
            f"{parameter} needs measured {rule.measured}, and this repository has none. "
            f"{HOW_TO_MEASURE}, or choose by budget"
        )
    if not fitting:
        raise RequestRefused(f"no variant has {rule.wanted(routes, value)}.{table(routes)}")
    first = max(fitting, key=rule.best)
    if not rule.by_speed:
        return first
    # Variants whose measured speeds do not differ significantly: fewer multiply-adds decide.
    as_fast = [route for route in fitting if route is first or route.name in first.as_fast]
    return max(as_fast, key=lambda route: (-route.multiply_adds, *rule.best(route)))


def by_budget_name(routes: Routes, name: Any) -> Route | None:
    """Return the variant of the budget with this name, the faster one of two, or None."""
    fitting = [route for route in routes.answering if route.setting == name]
    return max(fitting, key=lambda route: route.quickness, default=None)


def is_reserved(key: str) -> bool:
    """Return whether the protocol uses the parameter, so that the choice must ignore it."""
    if key.lower() in TRACE_CONTEXT:
        return True
    return key in RESERVED or key.startswith(RESERVED_PREFIXES)


def scores_are_shares(routes: Routes) -> bool:
    """Return whether scores are from 0 to 1; this is assumed if nothing was measured."""
    units = {route.score_unit for route in routes.variants if route.score_unit is not None}
    return units <= SHARES


def number(name: str, value: Any, *, share: bool = True) -> float:
    """Return a parameter's number, from a string, an integer or a double.

    A budget may also be a fraction as a string, "2/3". With `share`, scores are from 0 to 1;
    otherwise they may be any number.

    Raises: RequestRefused if it is not a number in the parameter's range.
    """
    try:
        parsed = math.nan if isinstance(value, bool) else float(_divided(name, value))
    except (TypeError, ValueError, OverflowError):
        parsed = math.nan
    rule = RULES[name]
    allowed = (rule.share_range if share else None) or rule.range
    if not allowed.holds(parsed):
        raise RequestRefused(f"parameter {name} is {value!r:.60}, expected {allowed.words}")
    return parsed


def _divided(name: str, value: Any) -> Any:
    ratio = _RATIO.fullmatch(value) if name == "budget" and isinstance(value, str) else None
    return int(ratio[1]) / int(ratio[2]) if ratio else value


@lru_cache(maxsize=1024)  # each request is compared with every variant
def compared(budget: float) -> float:
    """Round a budget to six significant digits for comparisons, as tables show it.

    So 2/3 finds the variant that a table, a caller or an older manifest writes as 0.666667, and
    0.333333 finds the variant of one third.
    """
    return float(f"{budget:.6g}")


def table(routes: Routes) -> str:
    """Return the variants with their figures, for a caller whose request none fits."""
    rows = [
        f"{route.name}: budget {route.budget:g} or {route.setting}"
        + (f", score {route.score:.4f}" if route.score is not None else "")
        + (f" (at least {route.lower_bound:.4f})" if route.lower_bound is not None else "")
        + (f", p95 {route.p95_ms:.2f} ms" if route.p95_ms is not None else "")
        for route in routes.answering
    ]
    return " Variants:\n" + "\n".join(rows)


RULES = {
    "budget": Rule(
        figure="budget",
        at_least=False,
        best=lambda route: (compared(route.budget), route.quickness),
        best_words="the largest budget (if tied, the fastest)",
        words="a budget of at most {value:g}",
        range=ParameterRange(
            lambda value: 0 < value <= 1, "a number above 0 and at most 1, or a budget's name"
        ),
        compared=compared,
    ),
    "min_score": Rule(
        figure="lower_bound",
        at_least=True,
        best=lambda route: (route.quickness, route.score or 0),
        best_words="the fastest",
        by_speed=True,
        words="a {score} whose lower 95 % bound is at least {value:g}",
        range=ParameterRange(math.isfinite, "a finite number"),
        share_range=ParameterRange(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
        measured="scores",
    ),
    "max_latency_ms": Rule(
        figure="p95_ms",
        at_least=False,
        best=lambda route: (route.score or 0, -(route.p95_ms or 0), route.quickness),
        best_words="the best score (if tied, the fastest)",
        words="a p95 of at most {value:g} ms",
        range=ParameterRange(lambda value: 0 < value < math.inf, "a finite number above 0"),
        measured="latencies",
    ),
}


class Followed(NamedTuple):
    """The policy of a request."""

    policy: PolicyRoute
    strict: bool  # refuse if an answer would not be certified


def policy_of(routes: Routes, parameters: dict[str, Any], own: tuple[str, ...]) -> Followed | None:
    """Return the policy that a request names; None if it chooses a variant, or nothing.

    `own` are the parameters of the family.

    Raises: RequestRefused for an unknown parameter or policy, two choices, or an invalid value.
    """
    parameter = choice_of(parameters, (*RULES, POLICY, MAX_RISK), (STRICT, *own))
    if parameter not in (POLICY, MAX_RISK):
        if STRICT in parameters:
            raise RequestRefused(
                f"found parameter {STRICT} without {POLICY} or {MAX_RISK}, expected one of them"
            )
        return None
    if not routes.policies:
        raise RequestRefused(f"{parameter} {NEEDS_POLICIES}")
    value, strict = parameters[parameter], _truth(parameters.get(STRICT, False))
    if parameter == MAX_RISK:
        return Followed(by_risk(routes, _risk(value)), strict)
    named = next((policy for policy in routes.policies if policy.name == str(value)), None)
    if named is None:
        raise RequestRefused(f"unknown policy {value!r:.60}, expected one of:{_table(routes)}")
    if (reason := routes.withdrawn.get(named.name)) and strict:
        raise RequestRefused(f"{reason}. Without {STRICT}, the full model answers")
    return Followed(routes.full_policy if reason else named, strict)


def by_risk(routes: Routes, risk: float) -> PolicyRoute:
    """Return the cheapest policy that is certified for at most this risk, or the full model.

    For a risk of 0 it is always the full model, even if a policy is certified for 0.
    """
    fitting = [policy for policy in routes.in_force if risk > 0 and policy.risk <= risk]
    if not fitting:
        return routes.full_policy
    return min(fitting, key=lambda policy: policy.seconds)


def all_policies(routes: Routes) -> tuple[PolicyRoute, ...]:
    """Return every policy that a request can follow; none in a repository without policies."""
    return (*routes.policies, routes.full_policy) if routes.policies else ()


def steps_of(routes: Routes, policy: PolicyRoute) -> tuple[Route, ...]:
    """Return the variants of a policy, in the order in which they run."""
    return tuple(routes.named(step.variant) for step in policy.steps)


def _risk(value: Any) -> float:
    try:
        risk = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        risk = math.nan
    if not 0 <= risk < 1:
        raise RequestRefused(
            f"parameter {MAX_RISK} is {value!r:.60}, expected a number of at least 0 and below 1"
        )
    return risk


def _truth(value: Any) -> bool:
    words = {"true": True, "false": False}
    found = value if isinstance(value, bool) else words.get(str(value).lower())
    if found is None:
        raise RequestRefused(f"parameter {STRICT} is {value!r:.60}, expected true or false")
    return found


def _table(routes: Routes) -> str:
    rows = [f"{policy.name}: risk of at most {policy.risk:g}" for policy in routes.policies]
    return "\n" + "\n".join(rows)


class Candidate(NamedTuple):
    """One way to answer a request: by one variant, or along the chain of a policy."""

    name: str
    routes: tuple[Route, ...]
    policy: PolicyRoute | None = None
    certified: bool = True  # whether the answer is the full model's, or covered by a certificate


class Wish(NamedTuple):
    """A request that adapts to the load.

    Units: slo_s is the time in which it wants its answer, in seconds.
    """

    slo_s: float
    followed: Followed | None  # the policy that the caller named, or the one of its risk
    risk: float | None  # the risk that the caller named
    embeds: bool = False  # embeddings in the full model's space may take each other's place


def wish_of(routes: Routes, parameters: Mapping[str, Any], own: tuple[str, ...]) -> Wish | None:
    """Return a request's wish if its parameters adapt; None if exactly what it names must answer.

    A request with `budget` or `min_score` never adapts. The others do if the repository has a
    service level objective. `max_latency_ms` together with `policy` or `max_risk` is the request's
    own objective, also in other repositories.

    Raises: RequestRefused for an unknown parameter or policy, two choices, or an invalid value.
    """
    given = {key for key in parameters if not is_reserved(key)}
    by_policy = not given.isdisjoint({POLICY, MAX_RISK})
    names_variant = not given.isdisjoint({*RULES} - {MAX_LATENCY})
    own_slo = MAX_LATENCY in given
    if names_variant or not (routes.adaptive or (own_slo and by_policy)):
        return None
    rest = {key: value for key, value in parameters.items() if key != MAX_LATENCY}
    followed = policy_of(routes, rest, own)
    slo_ms = routes.adaptive.slo_ms if routes.adaptive else 0.0
    if own_slo:
        slo_ms = number(MAX_LATENCY, parameters[MAX_LATENCY])
    risk = float(parameters[MAX_RISK]) if MAX_RISK in given else None
    return Wish(slo_ms / 1e3, followed, risk)


def candidates_of(routes: Routes, wish: Wish) -> tuple[Candidate, ...]:
    """Return who may answer, best first; never empty.

    Of a request that names a policy or a risk, no candidate has a larger risk. The first is the
    named policy or, for a risk, the full model.
    """
    routes = routes.of(embeds=wish.embeds)
    if wish.followed is None:
        return by_quality(routes)
    if wish.risk is None:
        first = wish.followed.policy
        others = [one for one in routes.in_force if one.seconds < first.seconds]
        most = first.risk
    else:
        first, others, most = routes.full_policy, list(routes.in_force), wish.risk
    cheaper = _cheaper(one for one in others if most > 0 and one.risk <= most)
    return (_chain(routes, first), *(_chain(routes, policy) for policy in cheaper))


def by_quality(routes: Routes) -> tuple[Candidate, ...]:
    """Return the candidates of a request that names nothing.

    The largest budget, the policies by risk, and then smaller and smaller budgets, down to the
    floor. A policy has no floor: its certificate limits what is lost.
    """
    first = best(routes, "budget", 1.0)
    floor = routes.adaptive.floor_budget if routes.adaptive else None
    smaller: list[Route] = []
    for route in sorted(routes.answering, key=lambda one: (-compared(one.budget), -one.quickness)):
        below = compared(route.budget) < compared((smaller or [first])[-1].budget)
        if below and (floor is None or compared(route.budget) >= compared(floor)):
            smaller.append(route)
    return (
        Candidate(first.name, (first,)),
        *(_chain(routes, policy) for policy in _cheaper(routes.in_force)),
        *(Candidate(route.name, (route,), certified=False) for route in smaller),
    )


def _cheaper(policies: Iterable[PolicyRoute]) -> list[PolicyRoute]:
    """Return the policies by risk, without those that save nothing over a safer one."""
    kept: list[PolicyRoute] = []
    for policy in sorted(policies, key=lambda one: (one.risk, one.seconds)):
        if not kept or policy.seconds < kept[-1].seconds:
            kept.append(policy)
    return kept


def _chain(routes: Routes, policy: PolicyRoute) -> Candidate:
    return Candidate(policy.name, steps_of(routes, policy), policy)
