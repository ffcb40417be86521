# SPDX-License-Identifier: Apache-2.0
"""One model with all five ops: exported, run with and without kernels, built by TensorRT-RTX."""

import numpy as np
import pytest
import torch
from ops_implementations import built_library
from rtx_builds import build, needs_rtx


class FiveOps(torch.nn.Module):
    """A head that looks at a grid of scores in each of the five ways."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.start = torch.nn.Parameter(torch.randn(8, generator=generator))

    def forward(self, scores, sizes):
        from saccade.plugins.ops import sparsemax, svpn, svpn_fast, tvmax

        weights = sparsemax(scores, axis=1)
        whole, error = tvmax(scores, lam=0.05, return_error=True)
        part = tvmax(scores, lam=0.05, sizes=sizes)
        return weights, whole, part, svpn(scores, alpha=0.7), svpn_fast(scores, self.start), error


OUTPUTS = ("weights", "whole", "part", "exact", "fast", "error")


@pytest.fixture(scope="module")
def model():
    from saccade.exporter.graph.tracing import trace_module

    examples = {"scores": torch.randn(3, 6, 8), "sizes": torch.tensor([[6, 8]] * 3)}
    return trace_module(FiveOps(), examples, OUTPUTS)


@pytest.fixture(scope="module")
def inputs():
    generator = np.random.default_rng(1)
    sizes = np.stack([generator.integers(1, 7, 5), generator.integers(1, 9, 5)], axis=1)
    return {"scores": generator.standard_normal((5, 6, 8)).astype(np.float32), "sizes": sizes}


def run(model, inputs, library=None):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if library:
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return dict(zip(OUTPUTS, session.run(list(OUTPUTS), inputs), strict=True))


def test_holds_each_op_once_with_its_body(model):
    import onnx

    nodes = sorted(node.op_type for node in model.graph.node if node.domain == "saccade")
    assert nodes == ["MaskedTVMax", "Sparsemax", "SvPN", "SvPNFast", "TVMax"]
    assert sorted(function.name for function in model.functions) == nodes
    onnx.checker.check_model(model, full_check=True)
    alpha = {
        node.op_type: {
            attribute.name: attribute.f for attribute in node.attribute if attribute.name == "alpha"
        }
        for node in model.graph.node
    }
    assert alpha["SvPN"] == {"alpha": pytest.approx(0.7)}


def test_kernels_and_bodies_agree_with_torch(model, inputs):
    with torch.no_grad():
        expected = FiveOps()(*(torch.from_numpy(value) for value in inputs.values()))
    by_body = run(model, inputs)
    by_kernel = run(model, inputs, built_library())
    for name, value in zip(OUTPUTS, expected, strict=True):
        if name == "error":
            assert (by_body[name] <= 1e-5).all()
            assert (by_kernel[name] <= 1e-5).all()
            continue
        np.testing.assert_allclose(by_kernel[name], value.numpy(), atol=2e-5, rtol=0)
        np.testing.assert_allclose(by_body[name], value.numpy(), atol=4e-5, rtol=0)


@needs_rtx
@pytest.mark.journey
def test_builds_an_engine(model, tmp_path):
    (tmp_path / "five.onnx").write_bytes(model.SerializeToString())
    network = build(tmp_path / "five.onnx").network
    assert {value["name"] for value in network.outputs} == set(OUTPUTS)
