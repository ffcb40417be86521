# SPDX-License-Identifier: Apache-2.0
"""Choice of a policy by a request's parameters: which chain of variants answers, and how strictly.

A policy is certified by `saccade calibrate`; `saccade repository` writes it into routes.json.
Standard library only.
"""

import math
from typing import Any, NamedTuple

from choose import RULES, RequestRefused, choice_of
from routes import Policy, Route, Routes, Step

POLICY, MAX_RISK, STRICT = "policy", "max_risk", "strict"
# The policy of a request that allows no risk, or less than any policy is certified for. No
# calibration can write one of this name: theirs have no space.
FULL = "full model"
NEEDS_POLICIES = (
    "needs policies, and this repository has none. Run `saccade calibrate` on the artefact folder, "
    "then `saccade repository` again"
)


class Followed(NamedTuple):
    """The policy of a request."""

    policy: Policy
    strict: bool  # an answer that is not certified is refused


def policy_of(routes: Routes, parameters: dict[str, Any], own: tuple[str, ...]) -> Followed | None:
    """The policy that a request asks for; None if it chooses a variant, or nothing.

    `own` are the parameters of the family.

    Raises: RequestRefused for an unknown parameter or policy, two choices, and a wrong value.
    """
    parameter = choice_of(parameters, (*RULES, POLICY, MAX_RISK), (STRICT, *own))
    if parameter not in (POLICY, MAX_RISK):
        if STRICT in parameters:
            raise RequestRefused(f"parameter {STRICT} is for a request with {POLICY} or {MAX_RISK}")
        return None
    if not routes.policies:
        raise RequestRefused(f"{parameter} {NEEDS_POLICIES}")
    value, strict = parameters[parameter], _truth(parameters.get(STRICT, False))
    if parameter == MAX_RISK:
        return Followed(by_risk(routes, _risk(value)), strict)
    named = next((policy for policy in routes.policies if policy.name == str(value)), None)
    if named is None:
        raise RequestRefused(f"there is no policy {value!r:.60}; there are:{_table(routes)}")
    return Followed(named, strict)


def by_risk(routes: Routes, risk: float) -> Policy:
    """The cheapest policy that is certified for a risk of at most this; else the full model.

    A risk of 0 is the full model itself, whatever a policy is certified for.
    """
    fitting = [policy for policy in routes.policies if risk > 0 and policy.risk <= risk]
    if not fitting:
        return full_policy(routes)
    return min(fitting, key=lambda policy: policy.seconds)


def all_policies(routes: Routes) -> tuple[Policy, ...]:
    """Every policy that a request can be answered by; none in a repository without policies."""
    return (*routes.policies, full_policy(routes)) if routes.policies else ()


def full_policy(routes: Routes) -> Policy:
    """The chain of one step: the variant with which all policies are compared."""
    first = routes.policies[0]
    full = route_named(routes, first.full)
    return first._replace(
        name=FULL, risk=0.0, bound=0.0, steps=(Step(full.name, full.sha256, None, 1.0),)
    )


def steps_of(routes: Routes, policy: Policy) -> tuple[Route, ...]:
    """The variants of a policy, in the order in which they are asked."""
    return tuple(route_named(routes, step.variant) for step in policy.steps)


def route_named(routes: Routes, name: str) -> Route:
    """The variant of that name; `saccade preflight` finds a repository that has none."""
    return next(route for route in routes.variants if route.name == name)


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
