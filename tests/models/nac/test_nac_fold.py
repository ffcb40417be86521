# SPDX-License-Identifier: Apache-2.0
"""Every variant of the NAC: it learns, prunes and folds, and the fold is the same function."""

import copy
import math

import pytest
import torch
from fixed_fold import folded_in_order
from small_nac import BESIDE, FIRST, KINDS, PAPER, THEIRS, Largest, given, nac

from saccade.models.nac.components import OUTPUTS

CASES = {
    **KINDS,
    "authors": PAPER,
    "authors, tokens": {"input": "tokens", "token_dim": 5, "token_width": 9, "heads": 2},
    "authors, baseline": {**THEIRS, **FIRST, "connectivity": "dense", "modulation": False},
    "authors, beside": BESIDE,
    "authors, conditional": {
        "conditional": True,
        "condition_dim": 7,
        "read_in_residual": True,
        "read_heads": 2,
        "read_in_query_norm": True,
        "read_out_residual": True,
        "sender_norm": True,
    },
    "conv": {"tokenizer": "conv"},
    "token positions": {"input": "tokens", "token_dim": 5, "max_tokens": 9},
    "sinusoids": {"input": "tokens", "token_dim": 5, "max_tokens": 9, "positions": "sinusoidal"},
    "frozen": {"connectivity": "frozen"},
    "no modulation": {"modulation": False},
    "plain read": {"read_norm": False, "confidence": "module", "activation": "relu"},
    "geglu": {"ffn_gate": "geglu", "modfc_norm_affine": False},
    "no one": {"modfc_one": False, "ffn_gate": "geglu"},
    "no modulation, geglu": {"modulation": False, "ffn_gate": "geglu"},
    "conditional, no one": {"conditional": True, "modfc_one": False, "modfc_norm_affine": False},
    "truncated": {"truncate": 0.9, "epsilon_learned": True, "kernel_draw": "none"},
    "drawn as theirs": {"kernel_draw": "sample", "kernel_clamp": "dtype", "truncate": 0.9},
    "conditional, truncated": {"conditional": True, "truncate": 0.9, "epsilon_learned": True},
    "noise of training": {"drop_path": 0.2, "code_noise": 0.05},
    "one module": {"modules": 1},
    "conditional dense": {"conditional": True, "connectivity": "dense"},
}


@pytest.mark.parametrize("case", [name for name in CASES if name != "one module"])
def test_pruned_is_full_with_masked_modules(case: str) -> None:
    model = nac(**CASES[case])
    arguments = given(model)
    model.rank_modules(**arguments)
    pruned = model.prune(0.375)
    dropped = model.module_order[6:]
    masked = torch.zeros(model.config.modules + model.config.read_in_modules).double()
    masked[dropped] = -math.inf

    def mask_bias(_: torch.nn.Module, inputs: tuple) -> tuple:
        return (*inputs[:-1], masked[None] if inputs[-1] is None else inputs[-1] + masked)

    expected = pruned.details(**arguments)
    selected = model(**arguments, modules=model.module_order[:6])
    assert (selected - expected["logits"]).abs().max() < 1e-12
    unmasked = model.details(**arguments)
    for layer in (*model.propagators, model.read_out):
        layer.register_forward_pre_hook(mask_bias)
    actual = model.details(**arguments)
    for name in OUTPUTS:
        assert (actual[name] - expected[name]).abs().max() < 1e-12, name
    assert (unmasked["logits"] - expected["logits"]).abs().max() > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_outputs_agree_and_every_weight_learns(case: str) -> None:
    model = nac(**CASES[case])
    arguments = given(model)
    outputs = model.details(**arguments)
    assert torch.equal(outputs["logits"], model(**arguments))
    assert torch.allclose(outputs["probabilities"], outputs["logits"].softmax(-1))
    assert torch.allclose(outputs["embedding"].norm(dim=-1), torch.ones(3).double())
    torch.manual_seed(0)
    model.train()
    (model(**arguments).square().sum() + model.graph_loss()).backward()
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # A softmax drops what is constant: key biases, that of the confidences, and with one module
    # everything that says whom to listen to.
    dropped = ("key.linear.bias", "pool.score.bias")
    unused = {name for name in still if not name.endswith(dropped)}
    assert not unused or (case == "one module" and not [n for n in unused if "value" in n])
    assert ("generator.signatures" in dict(model.named_parameters())) == (
        model.config.connectivity == "learned" and not model.config.conditional
    )


@pytest.mark.parametrize("case", CASES)
def test_fold_is_the_same_function_at_every_budget(case: str) -> None:
    model = nac(**CASES[case])
    arguments = given(model)
    model.rank_modules(**arguments)
    for budget in (1, 0.25) if case != "one module" else (1,):
        pruned = model.prune(budget)
        folded = folded_in_order(pruned)
        expected, actual = pruned.details(**arguments), folded.details(**arguments)
        for name, value in expected.items():
            assert (actual[name] - value).abs().max() < 1e-10, (budget, name)
        assert torch.equal(folded(**arguments), actual["logits"])


def test_fold_can_be_told_from_another_function() -> None:
    model = nac()
    arguments = given(model)
    folded = model.fold()
    with torch.no_grad():
        model.generator.codes[3] += 0.5
    assert (folded(**arguments) - model(**arguments)).abs().max() > 1e-4


def test_fold_is_evaluation_whatever_the_source() -> None:
    model = nac()
    arguments = given(model)
    expected = model.fold()(**arguments)
    image = arguments["x"].clone()
    assert torch.equal(model.train().fold()(**arguments), expected)
    assert model.training and torch.equal(arguments["x"], image)


@pytest.mark.parametrize("case", ("default", "conditional"))
def test_fold_never_makes_keys_of_every_module_and_token(case: str) -> None:
    model = nac(**CASES[case], modules=24, patch_px=1)
    arguments = given(model, batch=1)
    keys = 24 * 64 * model.config.dim
    for run, makes in ((model, True), (model.fold(), False), (copy.deepcopy(model).train(), False)):
        with torch.no_grad(), Largest() as largest:
            run(**arguments)
        assert (largest.numbers >= keys) == makes


# The inputs' test of a file traces what is conditioned.
@pytest.mark.parametrize("case", ("conv", "token positions", "authors, beside"))
def test_fold_traces_with_a_free_batch(case: str) -> None:
    folded = nac(**CASES[case] | {"propagator_layers": 1}).fold()
    arguments = given(folded, batch=3)
    axis = {0: torch.export.Dim("b", min=1)}
    with torch.no_grad():
        program = torch.export.export(
            folded, (), arguments, dynamic_shapes=dict.fromkeys(arguments, axis)
        )
    for batch in (1, 5):
        other = given(folded, batch=batch, seed=4)
        assert (program.module()(**other) - folded(**other)).abs().max() < 1e-10
