# SPDX-License-Identifier: Apache-2.0
"""The tensors of the NAC authors' own code, forward and gradients."""

import json

import pytest
from golden_cases import nac as cases
from places import TESTS

FOLDER = TESTS / "golden" / "nac"


def manifest():
    return json.loads((FOLDER / "manifest.json").read_text())


def case_named(name):
    return next(case for case in manifest()["cases"] if case["id"] == name)


@pytest.mark.parametrize("name", [case["id"] for case in manifest()["cases"]])
def test_case_is_within_its_tolerance(name):
    if reason := cases.NOT_OURS.get(name):
        pytest.skip(reason)
    assert list(cases.check_case(FOLDER, case_named(name))) == []


@pytest.mark.parametrize("file", [each["file"] for each in manifest()["key_lists"]])
def test_every_key_of_a_shipped_template_finds_its_place(file):
    assert cases.check_keys(FOLDER / file) == []


def test_the_check_can_fail():
    case = case_named("model_eval")
    arrays, weights = cases.arrays_of(FOLDER, case), cases.weights_of(FOLDER, case)
    weights["output_tokenizer.to_logits.weight"][0, 0] += 0.01
    values = cases.computed(case, arrays, weights)
    assert abs(values["logits"] - arrays["logits"]).max() > 1e-4
    assert abs(values["output_states"] - arrays["output_states"]).max() < 1e-12


def test_pixels_to_logits_to_a_trillionth():
    case = case_named("model_eval")
    arrays = cases.arrays_of(FOLDER, case)
    values = cases.computed(case, arrays, cases.weights_of(FOLDER, case))
    assert abs(values["logits"] - arrays["logits"]).max() < 1e-12
