# SPDX-License-Identifier: Apache-2.0
"""The torch operators under transforms: forward mode, batching, bfloat16, autocast."""

from typing import Any

import pytest
import torch
from test_torch_ops import CASES, normal, wanted
from torch.autograd import forward_ad

from saccade.core.errors import SaccadeError
from saccade.plugins.native import bindings
from saccade.plugins.ops import sparsemax, svpn, svpn_fast, tvmax

close = torch.testing.assert_close
# torch calls an operator without a rule once for each, and says so.
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


@pytest.mark.parametrize("case", CASES)
def test_forward_and_batched_gradients_agree_with_finite_differences(case: str) -> None:
    run, tensors = CASES[case]
    assert torch.autograd.gradcheck(
        run,
        wanted(tensors),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_the_jacobian_gives_the_same(case: str) -> None:
    run, tensors = CASES[case]
    which = tuple(range(len(tensors)))
    expected = torch.autograd.functional.jacobian(run, tensors)
    close(torch.func.jacrev(run, which)(*tensors), expected)
    close(torch.func.jacfwd(run, which)(*tensors), expected)
    for strategy in ("reverse-mode", "forward-mode"):
        actual = torch.autograd.functional.jacobian(run, tensors, vectorize=True, strategy=strategy)
        close(actual, expected)
    assert any(each.abs().max() > 0.01 for each in expected)


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_are_transposes(case: str) -> None:
    """<u, J t> = <J' u, t>, in plain forward mode, with and without a gradient beside it."""
    run, tensors = CASES[case]
    tangents = tuple(normal(*tensor.shape, seed=60 + i) for i, tensor in enumerate(tensors))
    given = wanted(tensors)
    answer = run(*given)
    cotangent = normal(*answer.shape, seed=70)
    pulled = torch.autograd.grad(answer, given, cotangent)
    expected = sum((cotangent * t).sum() for cotangent, t in zip(pulled, tangents, strict=True))
    for start in (tensors, given):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(*pair) for pair in zip(start, tangents, strict=True)]
            with torch.no_grad():
                actual = forward_ad.unpack_dual(run(*duals)).tangent
        close((cotangent * actual).sum(), expected)


@pytest.mark.parametrize("case", CASES)
def test_mapping_is_a_loop(case: str) -> None:
    run, tensors = CASES[case]
    batch = tuple(torch.stack([tensor, tensor.flip(-1), 0.5 * tensor]) for tensor in tensors)
    expected = torch.stack([run(*each) for each in zip(*batch, strict=True)])
    close(torch.func.vmap(run)(*batch), expected)
    # Only the first argument, along its last axis.
    last, rest = batch[0].movedim(0, -1), tensors[1:]
    axes = (-1, *(None for _ in rest))
    expected = torch.stack([run(each, *rest) for each in batch[0]])
    close(torch.func.vmap(run, in_dims=axes)(last, *rest), expected)
    twice = torch.func.vmap(torch.func.vmap(run, in_dims=(0, *axes[1:])), in_dims=(0, *axes[1:]))
    close(twice(batch[0].unflatten(0, (1, 3)), *rest)[0], expected)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_for_each_sample(case: str) -> None:
    run, tensors = CASES[case]
    which = tuple(range(len(tensors)))
    slope = torch.func.grad(lambda *given: run(*given).square().sum(), which)
    batch = tuple(torch.stack([tensor, tensor.flip(-1), 0.5 * tensor]) for tensor in tensors)
    alone = [slope(*each) for each in zip(*batch, strict=True)]
    for gradients, *parts in zip(torch.func.vmap(slope)(*batch), *alone, strict=True):
        close(gradients, torch.stack(parts))


@pytest.mark.parametrize("case", ["sparsemax", "tvmax", "masked tvmax", "gfusedmax"])
def test_hessian_where_there_is_a_second_derivative(case: str) -> None:
    run, tensors = CASES[case]
    assert torch.autograd.gradgradcheck(run, wanted(tensors), check_fwd_over_rev=True)
    total = lambda *given: run(*given).square().sum()  # noqa: E731
    hessian = torch.func.hessian(total)(*tensors)
    close(hessian, torch.func.jacrev(torch.func.jacrev(total))(*tensors))
    assert hessian.abs().max() > 0.01
    z, moved = tensors[0].clone().requires_grad_(), normal(*tensors[0].shape, seed=90)
    with forward_ad.dual_level():
        (slope,) = torch.autograd.grad(total(forward_ad.make_dual(z, moved)), z)
        along = forward_ad.unpack_dual(slope).tangent
    close(along, torch.tensordot(hessian, moved, moved.dim()))


@pytest.mark.parametrize("case", ["svpn", "svpn fast"])
def test_a_second_derivative_that_nobody_wrote_is_refused(case: str) -> None:
    run, tensors = CASES[case]
    first = torch.func.grad(lambda q: run(q, *tensors[1:]).square().sum())
    forward = lambda q: torch.func.jvp(lambda p: run(p, *tensors[1:]), (q,), (q,))[1].sum()  # noqa: E731
    for second in (torch.func.jacrev(first), torch.func.jacfwd(first), torch.func.grad(forward)):
        with pytest.raises(SaccadeError, match="found a second derivative, expected only a first"):
            second(tensors[0])
    given = wanted(tensors)
    (slope, *_) = torch.autograd.grad(run(*given).sum(), given, create_graph=True)
    with pytest.raises(SaccadeError, match="found a second derivative, expected only a first one"):
        slope.sum().backward()


@pytest.mark.parametrize("case", ["sparsemax", "tvmax", "svpn", "svpn fast"])
def test_compiles_under_transforms(case: str) -> None:
    run, tensors = CASES[case]

    def both(*given: Any) -> Any:
        moved = torch.func.jvp(run, given, given)[1]
        mapped = torch.func.vmap(run, in_dims=(-1, *(None for _ in given[1:])))
        return moved, mapped(torch.stack([given[0]] * 2, -1), *given[1:])

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    close(compiled(*tensors), both(*tensors))


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_computes_in_float32(case: str, form: str) -> None:
    run, tensors = CASES[case]
    half = wanted(tuple(tensor.bfloat16() for tensor in tensors))
    wide = wanted(tuple(tensor.detach().float() for tensor in half))
    answer, expected = run(*half), run(*wide)
    assert answer.dtype == torch.bfloat16
    # Rounded once, at the end.
    assert torch.equal(answer, expected.bfloat16()) or case in ("tvmax, small logits", "gfusedmax")
    close(answer.float(), expected, atol=4e-3, rtol=8e-3)
    cotangent = normal(*answer.shape, seed=80).bfloat16()
    actual = torch.autograd.grad(answer, half, cotangent)
    truth = torch.autograd.grad(expected, wide, cotangent.float())
    for each, other in zip(actual, truth, strict=True):
        assert each.dtype == torch.bfloat16
        close(each.float(), other, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("case", CASES)
def test_autocast_computes_in_float32(case: str) -> None:
    """As torch's softmax, so that a row of many small weights still sums to 1."""
    run, tensors = CASES[case]
    half = wanted(tuple(tensor.bfloat16() for tensor in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        answer = run(*half)
        mixed = run(half[0], *(tensor.float() for tensor in half[1:]))
        assert run(*tensors).dtype == torch.float64
    assert answer.dtype == mixed.dtype == torch.float32
    if case not in ("tvmax, small logits", "gfusedmax"):  # which multiply in bfloat16
        close(answer, run(*(tensor.float() for tensor in half)))
    for gradient in torch.autograd.grad(answer.sum(), half):
        assert gradient.dtype == torch.bfloat16


def test_a_layer_trains_under_autocast() -> None:
    layer = torch.nn.Linear(6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        logits = layer(normal(5, 6, dtype=torch.float32))
        loss = (sparsemax(logits) ** 2).sum() + tvmax(logits.view(5, 2, 3)).square().sum()
        loss = loss + svpn(logits.view(5, 2, 3)).sum() + svpn_fast(logits, torch.ones(6)).sum()
    loss.backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.abs().max() > 0


def test_a_pulled_back_vector_outlives_its_transform() -> None:
    z = normal(3, 5)
    answer, pull = torch.func.vjp(sparsemax, z)
    close(pull(z)[0], torch.func.jvp(sparsemax, (z,), (z,))[1])
    close(answer.sum(-1), torch.ones(3, dtype=torch.float64))


def test_a_batch_of_gradients_is_one_call(
    native_library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    run = bindings.Kernels.run

    def counted(self: Any, name: str, code: int, tensors: Any, count: int, *rest: Any, **how: Any):
        if name == "sparsemax_backward":
            rows.append(count)
        run(self, name, code, tensors, count, *rest, **how)

    monkeypatch.setattr(bindings.Kernels, "run", counted)
    z = normal(3, 5)
    torch.autograd.functional.jacobian(sparsemax, z, vectorize=True)
    torch.func.jacrev(sparsemax)(z)
    torch.func.jacfwd(sparsemax)(z)
    assert rows == [45, 45, 45]
