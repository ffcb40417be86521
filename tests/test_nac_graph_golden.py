# SPDX-License-Identifier: Apache-2.0
"""Tensors and gradients of the authors' NAC: modulation, kernel, attention, priors and starts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'saccade[export]'")

import torch
from nac_graph_golden import NOT_OURS, RUNS
from safetensors.torch import load_file

FOLDER = Path(__file__).with_name("golden") / "nac"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
CASES = {case["id"]: case for case in MANIFEST["cases"] if case["kind"] in RUNS}


def recorded(case: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """The arrays and weights of a case by their own names."""
    where, weights = case["arrays"], case.get("weights")
    with np.load(FOLDER / where["file"]) as file:
        arrays = {name: file[where["prefix"] + name] for name in where["keys"]}
    if not weights:
        return arrays, {}
    tensors = load_file(FOLDER / weights["file"])
    return arrays, {name: tensors[weights["prefix"] + name] for name in weights["keys"]}


def differences(case: dict[str, Any], arrays: dict[str, np.ndarray], found: dict[str, Any]) -> dict:
    """Recorded arrays that were not computed, or are further off than the manifest allows."""
    given = {*case["inputs"], "probe", *case.get("not_unique", ())}
    wanted = {name for name in arrays if name not in given and not name.startswith("draw/")}
    off: dict[str, Any] = dict.fromkeys(wanted - set(found), "not computed")
    for name in wanted & set(found):
        ours, theirs = np.broadcast_to(found[name], arrays[name].shape), arrays[name]
        atol = case["tolerance"]["atol"].get(name, 0.0)
        if not np.allclose(ours, theirs, rtol=case["tolerance"]["rtol"], atol=atol):
            with np.errstate(invalid="ignore"):
                off[name] = np.nanmax(np.abs(ours - theirs))
    return off


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_OURS])
def test_case_is_within_its_tolerance(name: str) -> None:
    case = CASES[name]
    arrays, weights = recorded(case)
    found = RUNS[case["kind"]](case, arrays, weights)
    assert differences(case, arrays, found) == {}
