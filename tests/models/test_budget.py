# SPDX-License-Identifier: Apache-2.0
"""A budget is the same fraction in an option, a manifest, a request and the router's rule."""

import importlib
import json
import math
import pickle
import sys
from copy import deepcopy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from places import PACKAGE

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes
from saccade.core.schema import typed
from saccade.exporter.artefact.variant import budget_option, choose_budgets
from saccade.models.budget import Budget, ComputeBudget, budget_text, fraction_budget
from saccade.serving.client.wire import choice

ROUTER = PACKAGE / "model_repository" / "router"
sys.path.insert(0, str(ROUTER))
try:
    rules: Any = importlib.import_module("choose")
    routing: Any = importlib.import_module("routes")
finally:
    sys.path.remove(str(ROUTER))

FRACTIONS = st.fractions(min_value=Fraction(1, 256), max_value=1, max_denominator=256)
quickly = settings(max_examples=200, deadline=None, derandomize=True, database=None)


class Modules:
    """A family of which nothing is known but how it counts."""

    def __init__(self, total: int) -> None:
        self.total = total

    def budget(self, text: str) -> ComputeBudget:
        return fraction_budget(text, self.total, "modules")


def routes(*budgets: float) -> Any:
    """A variant each that nothing was measured of, the later the quicker."""
    none: dict[str, Any] = dict.fromkeys(routing.Route._fields)
    variants = [
        routing.Route(**{**none, "name": f"{at}", "budget": budget, "multiply_adds": 1000 - at})
        for at, budget in enumerate(budgets)
    ]
    return routing.Routes("nac", "nac", None, {}, tuple(variants))


def ways_to_say(budget: Fraction) -> tuple[Any, ...]:
    """As programs hold it, and as people type it or read it in a table."""
    number = float(budget)
    exact = (budget, number, np.float64(number), Budget(number), f"{budget.numerator}/"
             f"{budget.denominator}", f" {number!r} ")  # fmt: skip
    return (*exact, f"{number:g}", float(f"{number:g}"))


@quickly
@given(FRACTIONS, st.integers(1, 4096))
@example(Fraction(7, 10), 45)  # 31.5, which is less in floats
@example(Fraction(1, 12), 6)  # a half, of which six digits keep nothing
def test_a_fraction_survives_every_step_to_the_manifest(budget: Fraction, total: int) -> None:
    number = budget.numerator / budget.denominator
    kept = math.floor(budget * total + Fraction(1, 2))
    for said in ways_to_say(budget)[:6]:
        assert Budget(budget_text(said)) == number
        if kept:
            (budget_name,) = choose_budgets(Modules(total), (said,))  # type: ignore[arg-type]
            assert (budget_name.share, budget_name.kept) == (number, kept)
            # From a manifest or a sweep's point back to the budget.
            assert fraction_budget(
                budget_option(budget_name.label, budget_name.share), total, ""
            ) == (ComputeBudget(budget_name.label, budget_name.share, kept, total, ""))
    read = typed(Budget, json.loads(json_bytes({"budget": Budget(number)}))["budget"], "")
    assert read == number and read.fraction == budget and read.label == Budget(number).label
    for copied in (deepcopy(read), pickle.loads(pickle.dumps(read))):
        assert type(copied) is Budget and copied == number
    assert Budget(budget).of(budget.denominator) == budget.numerator


@quickly
@given(FRACTIONS, FRACTIONS)
def test_the_router_finds_a_fraction_however_it_is_said_and_stored(
    budget: Fraction, other: Fraction
) -> None:
    low, high = sorted((budget, other))
    for stored in (float(high), float(f"{float(high):g}")):  # the second, as it was rounded once
        for said in ways_to_say(high):
            for parameters in ({"budget": str(said)}, choice(said)):
                assert rules.choose(routes(stored), parameters).name == "0"
        if low < high:
            for said in ways_to_say(low):
                with pytest.raises(rules.RequestRefused):
                    rules.choose(routes(stored), {"budget": str(said)})


@quickly
@given(st.one_of(
    st.floats(), st.fractions().map(str), st.decimals().map(str), st.text(max_size=12),
    st.from_regex(r"\s?[0-9]{0,10} ?/ ?[0-9]{0,10}", fullmatch=True),
))  # fmt: skip
def test_router_and_package_read_the_same_number_or_none(said: float | str) -> None:
    def outcome(read: Any, *arguments: Any) -> float | None:
        try:
            return float(read(*arguments))
        except (SaccadeError, rules.RequestRefused):
            return None

    read = outcome(Budget, said)
    assert outcome(rules.number, "budget", said) == read
    if read is not None:
        assert choice(said) == {"budget": repr(read)}


def test_six_digits_are_compared_and_no_fewer() -> None:
    said = {0.4999996: "0", 0.499999: "1", "0.49": "1", 0.500001: "0", 1: "0"}
    for budget, name in said.items():
        assert rules.choose(routes(0.5, 0.25), {"budget": budget}).name == name
    # A rounded budget beside the exact one: it is the same, and the quicker variant answers.
    assert rules.choose(routes(0.666667, 2 / 3), {}).name == "1"


@pytest.mark.parametrize(
    "budget, text, label",
    [
        (1, b"1.0", "b1000"), (0.5, b"0.5", "b0500"), (0.25, b"0.25", "b0250"),
        (0.125, b"0.125", "b0125"), (0.2, b"0.2", "b0200"), (0.0625, b"0.0625", "b0062"),
        (0.03125, b"0.03125", "b0031"), (1 / 3, b"0.3333333333333333", "b0333"),
        (2 / 3, b"0.6666666666666666", "b0667"),
    ],
)  # fmt: skip
def test_bytes_and_names_are_those_of_the_float(budget: float, text: bytes, label: str) -> None:
    share = choose_budgets(Modules(256), (budget,))[0].share  # type: ignore[arg-type]
    assert json_bytes({"budget": share}) == b'{\n "budget": ' + text + b"\n}\n"
    assert share.label == label


@pytest.mark.parametrize("total", [1, 3, 6, 7, 24, 48, 49, 256, 499])
def test_the_smallest_budget_that_a_message_names_is_accepted(total: int) -> None:
    with pytest.raises(SaccadeError, match="keeps none") as caught:
        fraction_budget("0.001", total, "modules")
    smallest = str(caught.value).rpartition(" ")[2].rstrip(".")
    assert fraction_budget(smallest, total, "modules").kept == 1


def test_chosen_budgets_are_in_order_and_make_variants_of_their_own() -> None:
    model: Any = Modules(20)
    chosen = choose_budgets(model, (1, 0.5, "0.125", 0.1))
    assert [each.kept for each in chosen] == [20, 10, 3, 2]  # 2.5 is rounded up
    assert [budget.label for budget in choose_budgets(model, ("0.25", "1"))] == ["b1000", "b0250"]
    for total, budgets, words in (
        (4096, (1, 1), "budget"),
        (4096, (0.5, 0.5004), "budget"),
        (4096, (1e-4,), "budget"),
        (16, (1, 0.03), r"keeps none of 16 modules.*1/32\."),
        (16, (0.5, 0.48), "both keep 8 of 16"),
    ):
        model = Modules(total)
        with pytest.raises(SaccadeError, match=words):
            choose_budgets(model, budgets)


WRONG = ("", "0", -0.5, 1.01, "inf", "half", "1/0", "0/1", "4/3", "-1/2", "1e400", 10**400, None)
WRONG += ([1], math.nan, "1/2/3")


@pytest.mark.parametrize("said", WRONG)
def test_what_is_no_budget_is_refused(said: Any) -> None:
    with pytest.raises(SaccadeError, match="budget"):
        choose_budgets(Modules(16), (said,))  # type: ignore[arg-type]
    with pytest.raises(rules.RequestRefused, match="budget is"):
        rules.number("budget", said)


def test_whole_numbers_stay_whole_for_families_that_count() -> None:
    assert [budget_text(given) for given in (3, 3.0, Fraction(2), "t2 ")] == ["3", "3", "2", "t2"]
