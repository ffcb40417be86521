# SPDX-License-Identifier: Apache-2.0
"""Constants that do not depend on the CPU: what computes them, and two CPUs on one machine."""

import hashlib
import math
import os
import subprocess
import sys
from copy import deepcopy
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CONFIG
from torch.nn import functional as F

from saccade.exporter.gate.reference import folded_float32
from saccade.exporter.graph.tracing import fold_constants, trace_module
from saccade.models.fixed_order import FixedOrder, exponential, normal_cdf, power, product, sine
from saccade.models.nac.model import NAC, NACConfig

# torch without its vector kernels, and a BLAS that sums in another order.
OLDER = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Prescott",
}


class Products(torch.nn.Module):
    """Constants that are folded where that is exact, and others."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.mT @ self.weight.exp()


def hashes(weights: str) -> list[str]:
    """Of what an export writes, and of the same constants folded as the CPU likes it.

    Tracing the model takes longer than all else here, and computes only what `Products` has.
    """
    # Positions are sines, states begin behind a GELU, links are exponentials.
    form = {"input": "tokens", "token_dim": 5, "max_tokens": 9, "positions": "sinusoidal"}
    model = NAC(NACConfig(**CONFIG | form), fresh=False)
    if not Path(weights).exists():
        save_file(model.state_dict(), weights)
    model.load_state_dict(load_file(weights))
    model.double().eval()

    def constants(folded: torch.nn.Module) -> bytes:
        return b"".join(tensor.numpy().tobytes() for tensor in folded.state_dict().values())

    folded = folded_float32(deepcopy(model))
    square = max((each for each in folded.state_dict().values() if each.dim() == 2), key=len)
    weight = square[:, : min(square.shape)][: min(square.shape)].contiguous()
    traced = trace_module(Products(weight), {"x": torch.ones(3, len(weight))}, ["y"])
    data = constants(folded) + fold_constants(traced).SerializeToString(deterministic=True)
    return [hashlib.sha256(each).hexdigest() for each in (data, constants(model.fold().float()))]


def test_an_export_has_the_same_bytes_on_an_older_cpu(tmp_path: Path) -> None:
    weights = str(tmp_path / "weights.safetensors")
    here, loose = hashes(weights)
    command = [sys.executable, __file__, weights]
    paths = os.pathsep.join(place for place in sys.path if place)
    environment = {**os.environ, **OLDER, "PYTHONPATH": paths, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    there, loose_there = done.stdout.split()
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert loose_there != loose, "both processes computed in the same way: they prove nothing"
    assert there == here


@pytest.mark.parametrize("shape", [(3, 5, 7), (70, 64, 3), (2, 0, 3), (1, 9, 20000)])
def test_product_sums_from_the_first_term_to_the_last(shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    m, k, n = shape
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    actual = product(a, b)
    assert actual.shape == (m, n)
    for row, column in ((0, 0), (m - 1, n - 1)):
        expected = 0.0
        for x, y in zip(a[row].tolist(), b[:, column].tolist(), strict=True):
            expected += x * y
        assert actual[row, column] == expected
    assert np.array_equal(product(np.stack([a, 2 * a]), np.stack([b, b]))[1], 2 * actual)


def test_functions_are_those_of_the_standard_library() -> None:
    x = np.linspace(-30, 30, 4001)
    texts = x.tolist()
    relative = exponential(20 * x) / [math.exp(20 * text) for text in texts] - 1
    assert np.abs(relative).max() <= 4e-16
    assert np.abs(sine(90 * x) - [math.sin(90 * text) for text in texts]).max() <= 3e-16
    assert np.abs(sine(90 * x, 1) - [math.cos(90 * text) for text in texts]).max() <= 3e-16
    share = [math.erfc(-text / math.sqrt(2)) / 2 for text in texts]
    assert np.abs(normal_cdf(x) - share).max() <= 4e-16
    assert exponential(np.array([-1e300, 0.0, 1e300])).tolist() == [0, 1, math.inf]
    roots = power(7.0, np.array([[-0.5, 2.0]]))
    assert abs(Fraction(roots[0, 0]) ** 2 * 7 - 1) < 4e-16 and roots[0, 1] == 49


def test_torch_computes_the_same_in_the_fixed_order() -> None:
    x = torch.randn(5, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def computed() -> list[torch.Tensor]:
        return [
            *(x.sum(), x.sum((0, 2)), x.sum(1, keepdim=True), x.mean(), x.mean((1, 2))),
            *(F.normalize(x, dim=-1), F.layer_norm(x, (7, 3)), F.gelu(x), x.exp(), x.sin()),
            *(x.cos(), x.square().add(1).rsqrt(), x[0] @ x[0, 0], x[0, 0] @ x[0, 1], 3.0**x),
            *(torch.einsum("abc,abd->acd", x, x), F.linear(x[0], x[0, :2], x[0, 0, :2])),
            torch.baddbmm(x, x, x[:, :3], beta=0.5, alpha=2),
        ]

    expected = computed()
    with FixedOrder() as order:
        actual = computed()
    assert not order.others
    for one, two in zip(expected, actual, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-14, atol=1e-14)
    with FixedOrder() as order:
        _ = x.tanh(), x.add(x, alpha=3), torch.arange(3).sum()
    assert order.others == {"tanh", "add"}


def test_the_exporter_folds_what_is_exact_and_leaves_the_rest() -> None:
    for size in (4, 100):  # one library folds small tensors, another one large ones
        model = Products(torch.linspace(-1, 1, size * size).view(size, size))
        proto = trace_module(model, {"x": torch.randn(3, size)}, ["y"])
        kinds = [node.op_type for node in fold_constants(proto).graph.node]
        assert kinds == ["MatMul", "Exp", "MatMul"], kinds
        onnx.checker.check_model(proto)


if __name__ == "__main__":
    print(*hashes(sys.argv[1]))
