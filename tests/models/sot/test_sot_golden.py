# SPDX-License-Identifier: Apache-2.0
"""SoT against what the authors' code answered, and against its lists of keys."""

import json

import pytest
from golden_cases import sot as golden
from places import TESTS

GOLDEN = TESTS / "golden" / "sot"
CASES = json.loads((GOLDEN / "manifest.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_recorded_case(case):
    assert golden.failures(GOLDEN, case) == []


def test_there_is_a_case_of_every_kind():
    assert {case["kind"] for case in CASES} == set(golden._KINDS)
    assert golden.count(GOLDEN) == len(CASES) + 1


def test_full_size_keys_load_in_both_forms_of_the_dense_block():
    assert golden.check_keys(GOLDEN / "SoT_Tiny.keys.json") == []


@pytest.mark.parametrize("kind", ["classifier", "mgcrp", "token_embed", "sot", "mpn"])
def test_other_weights_would_be_seen(kind, monkeypatch):
    case = next(case for case in CASES if case["kind"] == kind)
    arrays = golden.arrays_of

    def moved(folder, of):
        return {
            name: array * 1.001 if name in ("input", "image") else array
            for name, array in arrays(folder, of).items()
        }

    monkeypatch.setattr(golden, "arrays_of", moved)
    assert golden.failures(GOLDEN, case)
