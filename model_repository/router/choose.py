# SPDX-License-Identifier: Apache-2.0
"""Which variant answers a request: pure functions over routes.json, standard library only.

The router runs this file, and `saccade choose` imports it: one rule for both.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routes import Route, Routes

CHOICES = ("budget", "min_score", "max_latency_ms")
# What the protocol, the server and its clients put among the parameters.
RESERVED = {
    "timeout", "priority", "headers", "classification", "binary_data", "binary_data_output",
    "binary_data_size",
}  # fmt: skip
RESERVED_PREFIXES = ("sequence_", "triton_", "shared_memory_")
# As saccade reads a budget: 2/3 is the float nearest to it.
_RATIO = re.compile(r"\s*([0-9]{1,9})\s*/\s*([1-9][0-9]{0,8})\s*")
# Units of a score that is a share; files of the first release say `fraction`.
SHARES = {"share", "fraction"}
HOW_TO_MEASURE = "Run `saccade bench` on the artefact folder, then `saccade repository` again"


class RequestRefused(Exception):
    """The caller asked for what cannot be; the message is the answer."""


def choose(routes: Routes, parameters: dict[str, Any], own: tuple[str, ...] = ()) -> Route:
    """The variant for a request's parameters; without any, the largest budget.

    `own` are what requests of the family may say beside the choice.

    Raises: RequestRefused for an unknown parameter, two choices, a value that is not a number or
        out of range, and where no variant meets the request.
    """
    known = CHOICES + own
    given = [key for key in parameters if not is_reserved(key)]
    if unknown := sorted(set(given) - set(known)):
        raise RequestRefused(f"unknown parameter {unknown[0]!r:.60}; known are {', '.join(known)}")
    chosen = sorted(set(given) & set(CHOICES))
    if len(chosen) > 1:
        raise RequestRefused(f"parameters {' and '.join(chosen)} given, expected one of them")
    if not chosen:
        return by_budget(routes, 1.0)
    given_value = parameters[chosen[0]]
    if chosen[0] == "budget" and (named := by_setting(routes, given_value)):
        return named
    value = number(chosen[0], given_value, share=scores_are_shares(routes))
    return {"budget": by_budget, "min_score": by_score, "max_latency_ms": by_latency}[chosen[0]](
        routes, value
    )


def is_reserved(key: str) -> bool:
    """Whether the protocol owns the parameter and the choice must not look at it."""
    return key in RESERVED or key.startswith(RESERVED_PREFIXES)


def scores_are_shares(routes: Routes) -> bool:
    """Whether scores lie from 0 to 1; where nothing was measured, that is what one expects."""
    units = {route.score_unit for route in routes.variants if route.score_unit is not None}
    return units <= SHARES


def number(name: str, value: Any, *, share: bool = True) -> float:
    """A number in the parameter's range, from a string, an integer or a double.

    A budget may be a fraction too, as text: "2/3".
    `share` says that scores lie from 0 to 1; any other score may be any number.

    Raises: RequestRefused otherwise.
    """
    try:
        parsed = math.nan if isinstance(value, bool) else float(_divided(name, value))
    except (TypeError, ValueError, OverflowError):
        parsed = math.nan
    fits, expected = {
        "budget": (0 < parsed <= 1, "a number above 0 and at most 1, or a setting's name"),
        "min_score": (
            0 <= parsed <= 1 if share else math.isfinite(parsed),
            "a number from 0 to 1" if share else "a finite number",
        ),
        "max_latency_ms": (0 < parsed < math.inf, "a finite number above 0"),
    }[name]
    if not fits:
        raise RequestRefused(f"parameter {name} is {value!r:.60}, expected {expected}")
    return parsed


def _divided(name: str, value: Any) -> Any:
    ratio = _RATIO.fullmatch(value) if name == "budget" and isinstance(value, str) else None
    return int(ratio[1]) / int(ratio[2]) if ratio else value


@lru_cache(maxsize=1024)  # each request compares with every variant
def compared(budget: float) -> float:
    """A budget as it is compared: to six significant digits, as tables show it.

    So 2/3 finds the variant that a table, a caller or an older manifest writes 0.666667, and
    0.333333 the one of a third.
    """
    return float(f"{budget:.6g}")


def by_budget(routes: Routes, budget: float) -> Route:
    """The largest variant with at most this budget, both `compared`; of two the quicker one."""
    most = compared(budget)
    fitting = [route for route in routes.variants if compared(route.budget) <= most]
    if not fitting:
        raise RequestRefused(f"no variant has a budget of at most {budget:g}.{table(routes)}")
    return max(fitting, key=lambda route: (compared(route.budget), route.quickness))


def by_setting(routes: Routes, name: Any) -> Route | None:
    """The variant of the setting with that name, if there is one; of two the quicker."""
    fitting = [route for route in routes.variants if route.setting == name]
    return max(fitting, key=lambda route: route.quickness, default=None)


def by_score(routes: Routes, score: float) -> Route:
    """The fastest variant whose lower 95 % bound is at least this score."""
    bounds = [(each, each.lower_bound) for each in routes.variants if each.lower_bound is not None]
    if not bounds:
        raise RequestRefused(_unmeasured("min_score", "scores"))
    fitting = [route for route, bound in bounds if bound >= score]
    if not fitting:
        what = f"a {bounds[0][0].score_name} whose lower 95 % bound is at least {score:g}"
        raise RequestRefused(f"no variant has {what}.{table(routes)}")
    return max(fitting, key=lambda route: (route.quickness, route.score or 0))


def by_latency(routes: Routes, milliseconds: float) -> Route:
    """The best-scoring variant whose measured p95 is at most this; ties go to the faster."""
    latencies = [(each, each.p95_ms) for each in routes.variants if each.p95_ms is not None]
    if not latencies:
        raise RequestRefused(_unmeasured("max_latency_ms", "latencies"))
    fitting = [pair for pair in latencies if pair[1] <= milliseconds]
    if not fitting:
        raise RequestRefused(f"no variant has a p95 of at most {milliseconds:g} ms.{table(routes)}")
    best = max(fitting, key=lambda pair: (pair[0].score or 0, -pair[1], pair[0].quickness))
    return best[0]


def table(routes: Routes) -> str:
    """The variants with their figures, for a caller who asked for what is not there."""
    rows = [
        f"{route.name}: budget {route.budget:g} or {route.setting}"
        + (f", score {route.score:.4f}" if route.score is not None else "")
        + (f" (at least {route.lower_bound:.4f})" if route.lower_bound is not None else "")
        + (f", p95 {route.p95_ms:.2f} ms" if route.p95_ms is not None else "")
        for route in routes.variants
    ]
    return " Variants:\n" + "\n".join(rows)


def _unmeasured(parameter: str, what: str) -> str:
    return (
        f"{parameter} needs measured {what}, and this repository has none. {HOW_TO_MEASURE}, or "
        "ask by budget"
    )
