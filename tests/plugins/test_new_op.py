# SPDX-License-Identifier: Apache-2.0
"""A new op is a folder and a line: steps 1, 2, 3 and 6 of CONTRIBUTING, on one nobody ships."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from fakes.soft_threshold import soft_threshold
from ops_cases import Case, normal
from ops_implementations import as_read, implementation
from places import PACKAGE, ROOT, TESTS

from saccade.core.errors import SaccadeError
from saccade.plugins.availability import describe
from saccade.plugins.onnx_model import attach_bodies
from saccade.plugins.ops import OPS

CASES = {
    "as declared": Case((normal(4, 9),)),
    "wide": Case((normal(2, 3, 65, seed=1, scale=4.0),), {"lam": 1.25}),
    "nothing": Case((np.zeros((0, 5)),)),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, soft_threshold.node, soft_threshold)


@pytest.mark.parametrize("role", ["torch", "body", "body in onnx's reference"])
@pytest.mark.parametrize("case", CASES)
def test_every_form_agrees_with_the_reference(case: str, role: str) -> None:
    given = CASES[case]
    for dtype in given.dtypes:
        arrays = given.arrays(dtype)
        attributes = as_read(role, soft_threshold.defaults(given.attributes))
        (expected,) = soft_threshold.reference(*arrays, **attributes)
        (answer,) = implementation(soft_threshold, role)(arrays, given.attributes)
        assert answer.dtype.name == dtype
        exact = "float32" if role.startswith("body") and dtype == "float64" else dtype
        difference = np.abs(answer - expected) / soft_threshold.scale(expected)
        assert difference.max(initial=0) <= soft_threshold.tolerance[exact]


def test_torch_takes_it_for_an_operator_with_a_gradient() -> None:
    x = torch.tensor([[-2.0, -0.2, 0.1, 0.9]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(soft_threshold, (x,))
    torch.library.opcheck(torch.ops.saccade.soft_threshold.default, (x, 0.5))
    with pytest.raises(SaccadeError, match="lam is -1, expected a finite number >= 0"):
        soft_threshold(x, lam=-1)


def test_a_model_with_it_is_exported_as_one_node_with_its_body() -> None:
    import onnxruntime

    from saccade.exporter.graph.tracing import translations

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return soft_threshold(2 * x, lam=0.25)

    batch = ({0: torch.export.Dim("b", min=1, max=64)},)
    program = torch.onnx.export(
        Model().eval(), (torch.ones(2, 5),), dynamo=True, opset_version=20, dynamic_shapes=batch,
        custom_translation_table=translations(), verbose=False,
    )  # fmt: skip
    proto = program.model_proto
    attach_bodies(proto)
    assert [node.op_type for node in proto.graph.node if node.domain == "saccade"] == [
        "SoftThreshold"
    ]
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    x = normal(7, 5, seed=2).astype(np.float32)
    (answer,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(answer, Model()(torch.from_numpy(x)).numpy(), atol=1e-6)


def test_saccade_ops_lists_it() -> None:
    (row,) = [each for each in describe()["ops"] if each["name"] == soft_threshold.name]
    assert row["attributes"] == {"lam": {"default": 0.5, "allowed": "a finite number >= 0"}}


def test_contributing_names_its_files() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("## Add an op in six steps\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:plugins/<op>/)?(\w+\.(?:py|hpp|cuh))`", section))
    packages = {op.package for op in OPS.values() if op is not soft_threshold}
    shipped = [PACKAGE / "plugins" / package.rpartition(".")[2] for package in packages]
    every = set.intersection(*({path.name for path in folder.iterdir()} for folder in shipped))
    assert named == every - {"__pycache__"}
    there = {path.name for path in (TESTS / "fakes" / "soft_threshold").glob("*.py")}
    assert there == {name for name in named if name.endswith(".py")}
