# SPDX-License-Identifier: Apache-2.0
"""Choice of the router for each parameter, and what it says where it picks none."""

import json
import math

import numpy as np
import pytest
from router_code import family_module, router_module
from support.serving.routers import variant_route

routing, choosing = router_module("routes"), router_module("choose")
VQA = family_module("vqa").Family(None)


def route(budget, precision="fp32", **figures):
    """A variant without figures, unless they are given."""
    name = f"nac-b{round(1000 * budget):04d}-{precision}"
    known = {"budget": budget, "precision": precision, "multiply_adds": round(1e6 * budget)}
    return routing.Route(**variant_route(name, setting=name[4:9], **{**known, **figures}))


def figures(score, speed, p95_ms):
    return {
        "score_name": "top-1", "score_unit": "share", "score": score, "lower_bound": score - 0.02,
        "inferences_per_second": speed, "p95_ms": p95_ms,
    }  # fmt: skip


def routes(*variants, family="nac"):
    return routing.Routes("nac", family, None, {}, variants)


PLAIN = routes(route(1.0), route(0.5), route(0.25), route(0.125))
MEASURED = routes(
    route(1.0, **figures(0.98, 500, 9.0)),
    route(1.0, "int8", **figures(0.97, 900, 6.0)),
    route(0.5, **figures(0.97, 1000, 5.0)),
    route(0.25, **figures(0.97, 2000, 5.0)),
    route(0.125, **figures(0.90, 4000, 2.0)),
)
STEPS = routes(
    route(1.0, "int8", step_only=True, **figures(0.99, 9000, 1.0)),
    route(0.5, **figures(0.97, 1000, 5.0)),
    route(0.25, step_only=True, **figures(0.97, 8000, 1.0)),
)
CHOSEN = {
    "no step: the full budget": (STEPS, {}, "nac-b0500-fp32"),
    "no step: exactly a budget": (STEPS, {"budget": 1}, "nac-b0500-fp32"),
    "no step: a score": (STEPS, {"min_score": 0.9}, "nac-b0500-fp32"),
    "no step: a latency": (STEPS, {"max_latency_ms": 9}, "nac-b0500-fp32"),
    "nothing: the full budget": (PLAIN, {}, "nac-b1000-fp32"),
    "exactly a budget": (PLAIN, {"budget": 0.5}, "nac-b0500-fp32"),
    "between two budgets": (PLAIN, {"budget": 0.49}, "nac-b0250-fp32"),
    "an integer": (PLAIN, {"budget": 1}, "nac-b1000-fp32"),
    "a string": (PLAIN, {"budget": "0.25"}, "nac-b0250-fp32"),
    "a budget": (PLAIN, {"budget": "b0250"}, "nac-b0250-fp32"),
    "a budget of two precisions: the faster": (MEASURED, {"budget": "b1000"}, "nac-b1000-int8"),
    "the smallest": (PLAIN, {"budget": 0.125}, "nac-b0125-fp32"),
    "two precisions of a budget: the faster": (MEASURED, {"budget": 1}, "nac-b1000-int8"),
    "score: the fastest whose lower bound is enough": (
        MEASURED, {"min_score": 0.95}, "nac-b0250-fp32",
    ),
    "score above the lower bounds of all but one": (
        MEASURED, {"min_score": 0.955}, "nac-b1000-fp32",
    ),
    "score: exactly a lower bound": (
        MEASURED, {"min_score": MEASURED.variants[0].lower_bound}, "nac-b1000-fp32",
    ),
    "any score": (MEASURED, {"min_score": 0}, "nac-b0125-fp32"),
    "latency: the best-scoring": (MEASURED, {"max_latency_ms": 9}, "nac-b1000-fp32"),
    "latency: of equal scores the faster": (MEASURED, {"max_latency_ms": 8.9}, "nac-b0250-fp32"),
    "latency: exactly met": (MEASURED, {"max_latency_ms": 2}, "nac-b0125-fp32"),
    "what the protocol reserves": (
        PLAIN,
        {
            "budget": 0.25, "sequence_id": 0, "sequence_start": False, "priority": 1,
            "timeout": 5, "binary_data_output": True, "classification": 3,
            "triton_enable_empty_final_response": False,
        },
        "nac-b0250-fp32",
    ),
}  # fmt: skip


def test_a_score_that_is_no_share_may_be_any_number():
    captions = figures(1.7, 500, 9.0) | {"score_name": "CIDEr-D", "score_unit": "CIDEr-D"}
    known = routes(route(1.0, **captions))
    assert choosing.choose(known, {"min_score": 1.5}).name == "nac-b1000-fp32"
    assert choosing.choose(known, {"min_score": "-1"}).name == "nac-b1000-fp32"
    with pytest.raises(choosing.RequestRefused, match="expected a finite number"):
        choosing.choose(known, {"min_score": math.inf})


@pytest.mark.parametrize("case", CHOSEN)
def test_chooses(case):
    known, parameters, expected = CHOSEN[case]
    assert choosing.choose(known, parameters).name == expected


REFUSED = {
    "two": ({"budget": 1, "min_score": 0.5}, "expected one of them"),
    "unknown": ({"buget": 1}, "unknown parameter 'buget', expected one of budget"),
    "unknown beside a known one": ({"budget": 1, "tp": 2}, "unknown parameter 'tp'"),
    "zero": ({"budget": 0}, "budget is 0, expected a number above 0 and at most 1"),
    "negative": ({"budget": -0.5}, "above 0"),
    "above one": ({"budget": 1.01}, "at most 1"),
    "true": ({"budget": True}, "budget is True"),
    "not a number": ({"budget": math.nan}, "budget is nan"),
    "nan as text": ({"budget": "nan"}, "budget is 'nan'"),
    "text": ({"budget": "half"}, "budget is 'half', expected a number above 0 and at most 1, or a"),
    "empty": ({"budget": ""}, "budget is ''"),
    "nothing": ({"budget": None}, "budget is None"),
    "a list": ({"budget": [1]}, "budget is"),
    "score above one": ({"min_score": 95}, "from 0 to 1"),
    "negative score": ({"min_score": -0.1}, "from 0 to 1"),
    "false as a score": ({"min_score": False}, "min_score is False"),
    "no time": ({"max_latency_ms": 0}, "above 0"),
    "endless time": ({"max_latency_ms": math.inf}, "finite"),
    "a number beyond floats": ({"max_latency_ms": 10**400}, "finite"),
    "budget under the smallest": ({"budget": 0.1}, "nac-b0125-fp32: budget 0.125"),
    "score that none has": (
        {"min_score": 0.97},
        "nac-b1000-fp32: budget 1 or b1000, score 0.9800 (at least",
    ),
    "latency that none has": (
        {"max_latency_ms": 1.9},
        "nac-b0125-fp32: budget 0.125 or b0125, score 0.9000",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_and_says_why(case):
    parameters, words = REFUSED[case]
    with pytest.raises(choosing.RequestRefused) as caught:
        choosing.choose(MEASURED, parameters)
    assert words in str(caught.value)


@pytest.mark.parametrize("parameter", ["min_score", "max_latency_ms"])
def test_without_a_frontier_names_the_commands(parameter):
    with pytest.raises(choosing.RequestRefused, match=r"saccade bench.*saccade repository"):
        choosing.choose(PLAIN, {parameter: 0.5})


def test_a_variant_without_figures_is_chosen_by_budget_only():
    half = routes(route(1.0), route(0.5, **figures(0.9, 100, 3.0)))
    assert choosing.choose(half, {"min_score": 0.1}).name == "nac-b0500-fp32"
    assert choosing.choose(half, {}).name == "nac-b1000-fp32"


def test_without_figures_the_cheaper_precision_counts_as_the_faster():
    both = routes(route(1.0), route(1.0, "int8", multiply_adds=10))
    assert choosing.choose(both, {}).name == "nac-b1000-int8"


def test_routes_of_another_version_are_refused(tmp_path):
    path = tmp_path / "routes.json"
    path.write_text(json.dumps({"schema": "saccade.routes", "version": 1}))
    with pytest.raises(ValueError, match="expected"):
        routing.read_routes(path)


def test_equal_figures_are_no_error():
    same = [route(budget, **figures(0.9, 100, 3.0)) for budget in (1.0, 0.5)]
    for parameters in ({"min_score": 0.5}, {"max_latency_ms": 5}):
        assert choosing.choose(routes(*same), parameters).name == "nac-b1000-fp32"


OWN = {
    "a seed for slots": (("seed", "slots"), {"seed": 3, "budget": 0.5}, "nac-b0500-fp32"),
    "a beam for captions": (("beam", "max_length", "end"), {"beam": 3}, "nac-b1000-fp32"),
}


@pytest.mark.parametrize("case", OWN)
def test_a_familys_own_parameters_do_not_choose(case):
    own, parameters, expected = OWN[case]
    assert choosing.choose(PLAIN, parameters, own).name == expected
    with pytest.raises(choosing.RequestRefused, match="unknown parameter"):
        choosing.choose(PLAIN, parameters)


METADATA = {
    "grid": [3, 4], "boxes": 5, "max_tokens": 6, "condition_tokens": 2, "vocabulary": "words",
    "words": ["a", "b"],
}  # fmt: skip
NUMBERS = {
    "sizes": ([[3, 4], [1, 1]], [[3, 4], [4, 1]], "sample 1 is 4,1, expected 1 to 3,4"),
    "box_count": ([[1], [5]], [[0], [5]], "sample 0 is 0, expected 1 to 5"),
    "length": ([[6]], [[7]], "is 7, expected 1 to 6"),
    "length_b": ([[1]], [[0]], "is 0, expected 1 to 6"),
    "condition_length": ([[2]], [[3]], "expected 1 to 2"),
    "question": ([[0, 5]], [[0, 6]], "is 0,6, expected 0 to 5"),
    "characters": ([[-9, 2**40]], None, ""),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_a_model_would_misread_are_refused(name):
    good, bad, words = NUMBERS[name]
    VQA.check({name: np.array(good)}, METADATA)
    if bad is not None:
        with pytest.raises(choosing.RequestRefused, match=words):
            VQA.check({name: np.array(bad)}, METADATA)


def test_a_flat_layout_has_as_many_cells_as_rows():
    given = {"features": np.zeros((1, 6, 2), np.float32), "sizes": np.array([[2, 3]])}
    metadata = {**METADATA, "layout": "flat"}
    VQA.check(given, metadata)
    with pytest.raises(choosing.RequestRefused, match="at most 6 cells"):
        VQA.check({**given, "sizes": np.array([[3, 3]])}, metadata)


def test_a_step_is_neither_named_nor_part_of_the_choice_under_load():
    with pytest.raises(choosing.RequestRefused, match="budget is 'b0250'"):
        choosing.choose(STEPS, {"budget": "b0250"})
    assert [one.name for one in choosing.by_quality(STEPS)] == ["nac-b0500-fp32"]
