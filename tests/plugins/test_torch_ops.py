# SPDX-License-Identifier: Apache-2.0
"""The torch operators: gradients, compilation, export, both forms, wrong input."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_contract import WRONG, error_of

from saccade.plugins.native import bindings
from saccade.plugins.ops import gfusedmax, masked_tvmax, sparsemax, svpn, svpn_fast, tvmax


def normal(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


SIZES = torch.tensor([[3, 4], [2, 3], [1, 1]])
CHAIN = torch.stack([torch.arange(6), torch.arange(1, 7)], 1)
# Functions of tensors that have a gradient, at points away from kinks.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "sparsemax": (lambda z: sparsemax(z), (normal(4, 9),)),
    "sparsemax, axis 0": (lambda z: sparsemax(z, axis=0), (normal(7, 2, 3, seed=1),)),
    "tvmax": (lambda z: tvmax(z, lam=0.1), (normal(2, 3, 4, seed=2),)),
    "tvmax, small logits": (lambda z: tvmax(0.1 * z, lam=0.02), (normal(1, 4, 4, seed=3),)),
    "masked tvmax": (lambda z: tvmax(z, lam=0.1, sizes=SIZES), (normal(3, 3, 4, seed=4),)),
    "gfusedmax": (lambda z: gfusedmax(0.2 * z, CHAIN, 0.05), (normal(3, 7, seed=5),)),
    "svpn": (lambda q: svpn(q), (normal(2, 5, 5, seed=6),)),
    "svpn, wide": (lambda q: svpn(q, alpha=0.3), (normal(2, 3, 6, seed=7),)),
    "svpn, tall": (lambda q: svpn(q, alpha=0.7), (normal(6, 3, seed=8),)),
    "svpn fast": (lambda q, v: svpn_fast(q, v), (normal(2, 4, 5, seed=9), normal(5, seed=10))),
    "svpn fast, two values": (
        lambda q, v: svpn_fast(q, v, singular_values=2, iterations=3, epsilon=0.0),
        (normal(2, 4, 5, seed=11), normal(5, seed=12)),
    ),
    "svpn fast, all values": (
        lambda q, v: svpn_fast(q, v, singular_values=0, iterations=3),
        (normal(1, 3, 4, seed=13), normal(4, seed=14)),
    ),
}


def wanted(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tensor.clone().requires_grad_() for tensor in tensors)


def gradients(run: Callable[..., Any], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The answer, and the gradients for a fixed cotangent."""
    given = wanted(tensors)
    answer = run(*given)
    cotangent = normal(*answer.shape, seed=99).to(answer.dtype)
    return (answer.detach(), *torch.autograd.grad(answer, given, cotangent))


@pytest.mark.parametrize("case", CASES)
def test_gradient_agrees_with_finite_differences(case: str, form: str) -> None:
    run, tensors = CASES[case]
    assert torch.autograd.gradcheck(run, wanted(tensors))


@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_torch_form(case: str, native_library: Any) -> None:
    run, tensors = CASES[case]
    with bindings.without_kernels():
        expected = gradients(run, tensors)
    torch.testing.assert_close(gradients(run, tensors), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_half_precision_computes_in_float32(case: str, form: str) -> None:
    run, tensors = CASES[case]
    half = tuple(tensor.half() for tensor in tensors)
    expected = gradients(run, tuple(tensor.float() for tensor in half))
    for actual, wide in zip(gradients(run, half), expected, strict=True):
        assert actual.dtype == torch.float16
        torch.testing.assert_close(actual.float(), wide, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(
    "case", ["sparsemax, axis 0", "tvmax", "masked tvmax", "gfusedmax", "svpn", "svpn fast"]
)
def test_compiles_into_one_graph(case: str) -> None:
    run, tensors = CASES[case]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(gradients(compiled, tensors), gradients(run, tensors))


@pytest.mark.parametrize("case", CASES)
def test_strides_and_no_grad(case: str, form: str) -> None:
    run, tensors = CASES[case]
    first, *rest = tensors
    turned = first.transpose(0, -1).contiguous().transpose(0, -1)
    expected = gradients(run, tensors)
    torch.testing.assert_close(gradients(run, (turned, *rest)), expected)
    with torch.no_grad():
        answer = run(*wanted(tensors))
    assert not answer.requires_grad
    torch.testing.assert_close(answer, expected[0])


EMPTY = {
    "sparsemax": lambda z: sparsemax(z),
    "tvmax": lambda z: tvmax(z),
    "masked tvmax": lambda z: tvmax(z, sizes=torch.zeros(*z.shape[:-2], 2, dtype=torch.int64)),
    "gfusedmax": lambda z: gfusedmax(z, torch.zeros(0, 2, dtype=torch.int64)),
    "svpn": lambda q: svpn(q),
    "svpn fast": lambda q: svpn_fast(q, torch.ones(q.shape[-1])),
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 3), (2, 3, 0)])
def test_nothing_gives_nothing(case: str, shape: tuple[int, ...], form: str) -> None:
    z = torch.zeros(shape, requires_grad=True)
    answer = EMPTY[case](z)
    answer.sum().backward()
    assert answer.shape == z.shape == z.grad.shape


class Exported(torch.nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: Any) -> Any:
        return self.run(*tensors)


GRIDS = normal(2, 5, 4, seed=20, dtype=torch.float32)
NODES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "sparsemax": (sparsemax, (GRIDS,), "saccade.sparsemax.default"),
    "tvmax": (lambda z: tvmax(z, lam=0.2, return_error=True), (GRIDS,), "saccade.tvmax.default"),
    "masked": (masked_tvmax, (GRIDS, SIZES[:2]), "saccade.masked_tvmax.default"),
    "svpn": (svpn, (GRIDS,), "saccade.svpn.default"),
    "fast": (lambda q: svpn_fast(q, torch.ones(4)), (GRIDS,), "saccade.svpn_fast.default"),
}


@pytest.mark.parametrize("case", NODES)
def test_exports_as_one_node_with_a_dynamic_batch(case: str) -> None:
    run, tensors, node = NODES[case]
    batch = tuple({0: torch.export.Dim("b", min=1, max=64)} for _ in tensors)
    program = torch.export.export(Exported(run), tensors, dynamic_shapes=(batch,))
    for one_program in (program, program.run_decompositions()):
        ours = [str(n.target) for n in one_program.graph.nodes if "saccade" in str(n.target)]
        assert ours == [node]
        larger = tuple(torch.cat([part] * 3) for part in tensors)
        torch.testing.assert_close(one_program.module()(*larger), run(*larger))


OPERATORS = {
    "sparsemax": ("sparsemax", (normal(3, 4),)),
    "tvmax": ("tvmax", (normal(2, 3, 4), 0.1, 1e-6, 100)),
    "masked tvmax": ("masked_tvmax", (normal(3, 3, 4), SIZES, 0.1, 1e-6, 100)),
    "gfusedmax": ("gfusedmax", (normal(2, 7), CHAIN, 0.1, 1e-6, 100)),
    "svpn": ("svpn", (normal(2, 5, 5), 0.5)),
    "svpn fast": ("svpn_fast", (normal(2, 4, 5), normal(5), 0.5, 1, 1, 1e-5)),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_torch_checks_the_operator(case: str) -> None:
    run, tensors = CASES[case]
    run(*tensors)  # registers it
    name, arguments = OPERATORS[case]
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            argument.requires_grad_()
    torch.library.opcheck(getattr(torch.ops.saccade, name).default, arguments)


def test_too_few_iterations_warn_once_and_not_while_tracing(form: str) -> None:
    z = normal(2, 16, 16, seed=30)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        torch.export.export(Exported(lambda z: tvmax(z, lam=0.3, max_iterations=1)), (z,))
        assert not [each for each in seen if "max_iterations" in str(each.message)]
        for _ in range(3):
            _, error = tvmax(z, lam=0.3, max_iterations=1, return_error=True)
    assert len([each for each in seen if "max_iterations=1" in str(each.message)]) == 1
    assert (error > 1e-6).all()


MIXED: list[tuple[Callable[..., Any], str]] = [
    (lambda of: sparsemax(of([1, 2])), "X is int64, expected float32 or float16 or float64 or bfl"),
    (
        lambda of: tvmax(of(np.zeros((1, 3, 4))), sizes=of(np.array([[3, 4]], np.int32))),
        "sizes is int32, expected int64",
    ),
    (
        lambda of: svpn_fast(torch.zeros(2, 3).bfloat16(), torch.zeros(3)),
        "v0 is float32 on cpu, but input Q is bfloat16",
    ),
    (
        lambda of: svpn_fast(torch.zeros(2, 3), torch.zeros(3).double()),
        "v0 is float64 on cpu, but input Q is float32",
    ),
    (
        lambda of: tvmax(of(np.zeros((1, 3, 4))), sizes=of([[-1, 4]])),
        r"sizes has \[-1, 4\], expected 0 to 3 rows and 0 to 4 columns",
    ),
]


@pytest.mark.parametrize(("call", "words"), [*WRONG, *MIXED])
def test_wrong_input_is_explained(call: Callable[..., Any], words: str, form: str) -> None:
    """As without torch, and where tensors are mixed."""
    with pytest.raises(error_of(words), match=words):
        call(lambda value: torch.from_numpy(np.asarray(value)))


def test_threads_do_not_change_an_answer(native_library: Any) -> None:
    kernels = bindings.kernels()
    z = normal(4099, 512, seed=40, dtype=torch.float32)
    one, two = torch.empty_like(z), torch.empty_like(z)
    kernels.run("sparsemax", 1, (z, one), len(z), (512,), work=512, threads=1)
    kernels.run("sparsemax", 1, (z, two), len(z), (512,), work=512, threads=3)
    assert torch.equal(one, two)
    np.testing.assert_allclose(one.sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("target", ["baseline", None])
def test_half_precision_is_rounded_to_the_nearest_and_ties_to_even(target, native_library):
    gaps = np.arange(64) * 2.0**-11  # a weight of 0.5 + gap / 2: every second one is a tie
    given = torch.from_numpy(np.stack([gaps, 0 * gaps], 1).astype(np.float16))
    expected = np.stack([0.5 + gaps / 2, 0.5 - gaps / 2], 1).astype(np.float16)
    kernels = bindings.kernels()
    assert kernels.choose_target(target)
    try:
        actual = sparsemax(given)
    finally:
        kernels.choose_target(None)
    np.testing.assert_array_equal(actual.numpy(), expected)
