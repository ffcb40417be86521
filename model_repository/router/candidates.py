# SPDX-License-Identifier: Apache-2.0
"""Who may answer a request whose answer adapts to the load, best first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from choose import RULES, best, compared, is_reserved, number
from forecast import Candidate
from policies import MAX_RISK, POLICY, Followed, full_policy, policy_of, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from routes import PolicyRoute, Route, Routes

MAX_LATENCY = "max_latency_ms"


class Wish(NamedTuple):
    """A request that adapts to the load.

    Units: slo_s is the time in which it wants its answer, in seconds.
    """

    slo_s: float
    followed: Followed | None  # the policy that the caller named, or the one of its risk
    risk: float | None  # the risk that the caller named


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
    if wish.followed is None:
        return by_quality(routes)
    if wish.risk is None:
        first = wish.followed.policy
        others = [one for one in routes.policies if one.seconds < first.seconds]
        most = first.risk
    else:
        first, others, most = full_policy(routes), list(routes.policies), wish.risk
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
    for route in sorted(routes.variants, key=lambda one: (-compared(one.budget), -one.quickness)):
        below = compared(route.budget) < compared((smaller or [first])[-1].budget)
        if below and (floor is None or compared(route.budget) >= compared(floor)):
            smaller.append(route)
    return (
        Candidate(first.name, (first,)),
        *(_chain(routes, policy) for policy in _cheaper(routes.policies)),
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
