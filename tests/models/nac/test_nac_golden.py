# SPDX-License-Identifier: Apache-2.0
"""The tensors of the NAC authors' own code, forward and gradients."""

import json
import shutil

import golden_check
import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize("name", ["kernel_train", "skmdpa_train", "seeder_noise", "seeder_mean"])
def test_a_case_has_any_number_of_samples(name):
    case = case_named(name)
    arrays = cases.arrays_of(FOLDER, case)
    batched = [*case["outputs"], "probe", *(draw["name"] for draw in case.get("draws") or ())]
    batched += [each for each in case["inputs"] if each.endswith("_states")]
    more = {each: np.concatenate([arrays[each], arrays[each][:1]]) for each in batched}
    more = {each: array if arrays[each].ndim > 2 else arrays[each] for each, array in more.items()}
    values = cases.computed(case, arrays | more, cases.weights_of(FOLDER, case))
    found = np.broadcast_to(values[case["grad_of"]], more[case["grad_of"]].shape)
    assert len(found) == 3
    np.testing.assert_allclose(found, more[case["grad_of"]], rtol=1e-9)


def test_pooling_of_any_width():
    case, rng = case_named("pool_vanilla"), np.random.default_rng(0)
    arrays, weights = cases.arrays_of(FOLDER, case), cases.weights_of(FOLDER, case)
    width, outputs = 6, case["config"]["output_dim"]
    case["config"]["state_dim"] = width
    arrays["states"] = rng.normal(size=(3, 5, width))
    arrays["probe"] = rng.normal(size=(3, outputs))
    weights = {
        name: torch.from_numpy(rng.normal(size=(*value.shape[:-1], width)))
        if value.dim() == 2
        else value
        for name, value in weights.items()
    }
    assert cases.computed(case, arrays, weights)["logits"].shape == (3, outputs)


def test_a_case_that_cannot_be_computed_is_a_line(tmp_path, capsys):
    folder = tmp_path / "nac"
    shutil.copytree(FOLDER, folder)
    stored = manifest()
    stored["cases"] = [case_named("pool_vanilla"), case_named("signature_distribution")]
    del stored["cases"][0]["config"]["output_dim"]
    stored["key_lists"] = []
    (folder / "manifest.json").write_text(json.dumps(stored))
    assert golden_check.main([str(folder)]) == 1
    text = capsys.readouterr().out
    assert "pool_vanilla: cannot be computed" in text and "signature_distribution: left out" in text
    assert "nac: 1 cases, 1 failures, 1 left out" in text
