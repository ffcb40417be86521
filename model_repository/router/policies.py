# SPDX-License-Identifier: Apache-2.0
"""Choose a policy by a request's parameters: which chain of variants answers, and how strictly.

A policy is certified by `saccade calibrate`; `saccade repository` writes it into routes.json.
Standard library only.
"""

import math
from typing import Any, NamedTuple

from choose import RULES, RequestRefused, choice_of
from routes import PolicyRoute, Route, Routes, StepRoute

POLICY, MAX_RISK, STRICT = "policy", "max_risk", "strict"
# The policy of a request that allows no risk, or less than any policy is certified for. No
# calibration can write a policy of this name, because their names contain no space.
FULL = "full model"
NEEDS_POLICIES = (
    "needs policies, and this repository has none. Run `saccade calibrate` on the artefact folder, "
    "then `saccade repository` again"
)


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
    return Followed(named, strict)


def by_risk(routes: Routes, risk: float) -> PolicyRoute:
    """Return the cheapest policy that is certified for at most this risk, or the full model.

    For a risk of 0 it is always the full model, even if a policy is certified for 0.
    """
    fitting = [policy for policy in routes.policies if risk > 0 and policy.risk <= risk]
    if not fitting:
        return full_policy(routes)
    return min(fitting, key=lambda policy: policy.seconds)


def all_policies(routes: Routes) -> tuple[PolicyRoute, ...]:
    """Return every policy that a request can follow; none in a repository without policies."""
    return (*routes.policies, full_policy(routes)) if routes.policies else ()


def full_policy(routes: Routes) -> PolicyRoute:
    """Return the chain of one step: the variant with which all policies are compared."""
    first = routes.policies[0]
    full = route_named(routes, first.full)
    return first._replace(
        name=FULL, risk=0.0, bound=0.0, steps=(StepRoute(full.name, full.sha256, None, 1.0),)
    )


def steps_of(routes: Routes, policy: PolicyRoute) -> tuple[Route, ...]:
    """Return the variants of a policy, in the order in which they run."""
    return tuple(route_named(routes, step.variant) for step in policy.steps)


def route_named(routes: Routes, name: str) -> Route:
    """Return the variant of this name; `saccade preflight` checks that the repository has it."""
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
