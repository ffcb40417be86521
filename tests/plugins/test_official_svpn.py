# SPDX-License-Identifier: Apache-2.0
"""svPN fast against what the official module answered, gradients included."""

import json

import numpy as np
import pytest
import torch
from places import TESTS

GOLDEN = TESTS / "golden" / "sot"
CASES = {
    case["id"]: case
    for case in json.loads((GOLDEN / "svpn.json").read_text())["cases"]
    if case["config"]["vec"] == "full"
}


@pytest.fixture(scope="module")
def arrays():
    from safetensors.numpy import load_file

    return {**np.load(GOLDEN / "svpn.npz"), **load_file(GOLDEN / "svpn.safetensors")}


@pytest.mark.parametrize("identity", CASES)
def test_output_and_gradients(identity, arrays, form):
    from saccade.plugins.ops import svpn_fast

    case, config = CASES[identity], CASES[identity]["config"]
    q = torch.from_numpy(arrays[f"{identity}/input"]).requires_grad_(True)
    start = arrays.get(f"{identity}/weight", np.ones(q.shape[-1], np.float32))
    v0 = torch.from_numpy(start).requires_grad_(True)
    y = svpn_fast(
        q,
        v0,
        alpha=config["alpha"],
        singular_values=config["svNum"] or 0,
        iterations=config["iterNum"],
    )
    actual = {"output": y.detach().flatten(1)}
    if case["grad"]:
        y.flatten(1).backward(torch.from_numpy(arrays[f"{identity}/probe"]))
        actual |= {"grad/input": q.grad, "grad/weight": v0.grad}
    allowed = case["tolerance"]["atol"]
    assert set(allowed) <= set(actual)
    for name, atol in allowed.items():
        expected = arrays[f"{identity}/{name}"]
        np.testing.assert_allclose(
            actual[name].numpy(), expected, rtol=case["tolerance"]["rtol"], atol=atol, err_msg=name
        )
