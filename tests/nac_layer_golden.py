# SPDX-License-Identifier: Apache-2.0
"""The authors' NAC tensors against ours, of layers: ModFC and FFN.

Their weights are the leaves: ours are computed from them, so that each gradient has their name
and the arithmetic of a conversion is proved with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from saccade.models.nac.modulation import ModFC, ModFFN, Modulation

Arrays = dict[str, np.ndarray]
Tensors = dict[str, Tensor]


@contextmanager
def recorded_draws(arrays: Arrays) -> Iterator[None]:
    """torch's draws are the case's, in their order, and all of them are made."""
    names = sorted(name for name in arrays if name.startswith("draw/"))
    given = iter([torch.from_numpy(arrays[name]) for name in names])
    real = torch.rand, torch.rand_like, torch.randn

    def draw(*shape: Any, **_: Any) -> Tensor:
        drawn = next(given)
        wanted = shape[0].shape if isinstance(shape[0], Tensor) else tuple(np.ravel(shape))
        assert tuple(drawn.shape) == tuple(wanted), (drawn.shape, wanted)
        return drawn

    torch.rand = torch.rand_like = torch.randn = draw  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.rand, torch.rand_like, torch.randn = real
    assert next(given, None) is None, "a draw of theirs was not made"


def leaves(case: dict[str, Any], arrays: Arrays, weights: Tensors) -> Tensors:
    """Inputs and weights in float64, of which gradients are wanted."""
    given = {name: torch.from_numpy(arrays[name]) for name in case["inputs"]} | weights
    return {name: value.double().requires_grad_() for name, value in given.items()}


def with_gradients(
    case: dict[str, Any], arrays: Arrays, given: Tensors, values: dict[str, Any]
) -> Arrays:
    """Outputs, and the gradients that the case records."""
    probe = torch.from_numpy(arrays["probe"])
    total = (values[case["grad_of"]] * probe).sum()
    names = [name for name in given if f"grad/{name}" in arrays]
    gradients = torch.autograd.grad(total, [given[name] for name in names], retain_graph=True)
    named = {f"grad/{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    for name in case["grad_none"]:
        unused = torch.autograd.grad(total, given[name], allow_unused=True, retain_graph=True)[0]
        assert unused is None or not unused.any(), name
    return {name: value.detach().numpy() for name, value in (values | named).items()}


def mod_fc(
    given: Tensors, prefix: str, config: dict[str, Any], x: Tensor, code: Tensor, *, rows: Any = 1.0
) -> Tensor:
    """Our ModFC with theirs of that prefix; `rows`, their layer scale, is folded into it."""
    own = {name[len(prefix) :]: value for name, value in given.items() if name.startswith(prefix)}
    modulation = config.get("mod_fc_cls", "ModFC") == "ModFC" and "lin.weight" not in own
    one = config.get("mod_fc_kwargs", config).get("add_one_to_scale", False)
    weight = own.get("native_weight", own.get("lin.weight"))
    outputs, inputs = weight.shape
    gain = Modulation(code.shape[-1], on=modulation, one=one, norm_affine=False)
    layer = ModFC(inputs, outputs, gain)
    bias = own.get("native_bias", own.get("lin.bias", torch.zeros(outputs).double()))
    scale = torch.as_tensor(rows).double().reshape(-1, 1)
    state = {"linear.weight": scale * weight, "linear.bias": scale.squeeze(1) * bias}
    if modulation:
        state["code.weight"] = own["scale.weight"]
    if modulation and one:
        state["alpha"] = own["scale_gain"]
    assert set(state) == set(layer.state_dict())
    return functional_call(layer.double(), state, (x, code))


def run_mod_fc(case: dict[str, Any], arrays: Arrays, weights: Tensors) -> Arrays:
    """One ModFC, or FC."""
    given = leaves(case, arrays, weights)
    output = mod_fc(given, "", case["config"], given["input"], given["context"])
    return with_gradients(case, arrays, given, {"output": output})


def run_ffn(case: dict[str, Any], arrays: Arrays, weights: Tensors) -> Arrays:
    """A ModFFN with its LayerNorm and residual."""
    given, config = leaves(case, arrays, weights), case["config"]
    dim, code_dim = config["state_dim"], config["code_dim"]
    given_fc = config.get("mod_fc_kwargs") or {}
    gain = Modulation(
        code_dim,
        on=config.get("mod_fc_cls", "ModFC") == "ModFC",
        one=given_fc.get("add_one_to_scale", False),
        norm_affine=False,
    )
    hidden = round(config["capacity_factor"] * dim)
    layer = ModFFN(dim, hidden, gain, gate="geglu" if config["use_geglu"] else "none").double()
    names = {"native_weight": "linear.weight", "native_bias": "linear.bias", "scale_gain": "alpha"}
    names |= {
        "lin.weight": "linear.weight",
        "lin.bias": "linear.bias",
        "scale.weight": "code.weight",
    }
    state = {}
    for prefix, ours in (("ffn.0.", "widen."), ("ffn.2.", "narrow.")):
        for name in (each for each in given if each.startswith(prefix)):
            value = given[name]
            if ours == "narrow." and "layer_scale.gamma" in given and "native" in name:
                gamma = given["layer_scale.gamma"]
                value = value * (gamma[:, None] if value.dim() == 2 else gamma)
            state[ours + names[name[len(prefix) :]]] = value
    assert set(state) == set(layer.state_dict())
    x = given["states"]
    normed = F.layer_norm(x, (dim,), given["layernorm.weight"], given["layernorm.bias"])
    output = x + functional_call(layer, state, (normed, given["codes"]))
    return with_gradients(case, arrays, given, {"output": output})
