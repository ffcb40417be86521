# SPDX-License-Identifier: Apache-2.0
"""Every kind of input of a NAC: its component, its padding, its folded form, its file."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
import small_nac
import torch
from small_nac import SMALL
from torch import Tensor, nn

from saccade.core.errors import SaccadeError, ShapeError
from saccade.exporter.graph.tracing import trace_component
from saccade.models.interface import component_named
from saccade.models.nac.components import model_arguments
from saccade.models.nac.model import NAC, NACConfig

CONDITION = {"conditional": True, "condition_dim": 7, "condition_tokens": 5}
CASES: dict[str, dict[str, Any]] = {
    "image": {},
    "tokens": {"input": "tokens", "token_dim": 5, "max_tokens": 9},
    "token set": {"input": "tokens", "token_dim": 5, "max_tokens": 9, "positions": "none"},
    "points": {"input": "points", "max_tokens": 12},
    "characters": {"input": "characters", "max_tokens": 9, "vocabulary": ("a", "b", "c")},
    "bytes": {"input": "bytes", "max_tokens": 11, "positions": "sinusoidal"},
    "local": {
        "input": "characters",
        "max_tokens": 11,
        "vocabulary": ("a", "b", "c"),
        "local_layers": 2,
        "local_width": 3,
    },
    "conditioned": CONDITION,
    "conditional characters": {
        "input": "characters",
        "max_tokens": 9,
        "vocabulary": ("a", "b", "c"),
        "conditional": True,
    },
    "image pair": {"input_sets": 2},
    "image pair, conditioned": {"input_sets": 2, **CONDITION},
    "token pair, conditional": {
        "input": "tokens",
        "token_dim": 5,
        "max_tokens": 9,
        "input_sets": 2,
        "conditional": True,
    },
    "dense": {"connectivity": "dense"},
}
VARYING = [name for name, case in CASES.items() if "max_tokens" in case or "condition_dim" in case]


def nac(case: str, **changes: object) -> NAC:
    """A small float64 NAC in evaluation, away from its initial zeros and ones."""
    model = small_nac.nac(**{**CASES[case], **changes})
    if model.config.conditional:
        model.rank_modules(*model_arguments(model.config, inputs_of(model, 16)))
    return model


def inputs_of(model: nn.Module, count: int, seed: int = 5) -> dict[str, Tensor]:
    """Random inputs of the model's one component, of all lengths."""
    component = component_named(model, "")
    assert component.random is not None
    arrays = component.random(np.random.default_rng(seed), count)
    for spec in component.inputs:
        assert arrays[spec.name].dtype == spec.dtype and arrays[spec.name].shape[0] == count
        assert arrays[spec.name].shape[1:] == spec.shape[1:]
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def run(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    component = component_named(model, "")
    with torch.no_grad():
        answer = component.run(**inputs)
    assert set(answer) == {*component.outputs, *component.optional}
    return answer


@pytest.mark.parametrize("case", CASES)
def test_folded_components_are_the_same_function_at_every_budget(case: str) -> None:
    model = nac(case)
    inputs = inputs_of(model, 5)
    whole = run(model, inputs)
    for budget in model.budgets():
        small = model.at(budget)
        expected, actual = run(small, inputs), run(small.fold(), inputs)
        assert expected["attention"].shape[:2] == (5, budget.kept)
        for name, value in expected.items():
            assert (actual[name] - value).abs().max() < 1e-10, (budget.label, name)
        if budget.share < 1:
            assert (expected["logits"] - whole["logits"]).abs().max() > 1e-4
    assert torch.allclose(whole["attention"].sum(-1), torch.ones(5, 16).double())


def with_other_padding(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same samples; whatever lies beyond a length is something else, NaN where it can be."""
    generator = torch.Generator().manual_seed(9)
    changed = {name: value.clone() for name, value in inputs.items()}
    for name, value in changed.items():
        length = {"condition": "condition_length"}.get(name, "length" + "_b" * name.endswith("_b"))
        if name.startswith(("length", "condition_length", "image")):
            continue
        beyond = torch.arange(value.shape[1]) >= inputs[length][:, None]
        if value.is_floating_point():
            value[beyond] = torch.nan
        else:
            most = 256 if value.dtype == torch.uint8 else 2**60
            filling = torch.randint(0, most, value.shape, generator=generator)
            value[beyond] = filling[beyond].to(value.dtype)
    return changed


@pytest.mark.parametrize("case", VARYING)
def test_an_answer_does_not_depend_on_padding_or_batch_mates(case: str) -> None:
    model = nac(case)
    inputs = inputs_of(model, 8)
    other = with_other_padding(inputs)
    for each in (model, model.fold()):
        expected, actual = run(each, inputs), run(each, other)
        alone = run(each, {name: value[3:4] for name, value in other.items()})
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name
            assert (alone[name] - value[3:4]).abs().max() < 1e-12, name


@pytest.mark.parametrize("case", ("tokens", "points", "characters", "bytes", "local"))
def test_a_short_input_needs_no_padding(case: str) -> None:
    model = nac(case)
    inputs = inputs_of(model, 8)
    row = int((inputs["length"] < model.config.max_tokens).nonzero()[0])
    n = int(inputs["length"][row])
    x = inputs[model.config.input]
    expected = model(x, inputs["length"])[row]
    assert (model(x[row : row + 1, :n])[0] - expected).abs().max() < 1e-12


def test_symbols_beyond_the_vocabulary_share_one_vector() -> None:
    model = nac("characters")
    x = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, -1], [0, 1, 2**40]])
    logits = model(x)
    assert torch.equal(logits[1], logits[2]) and torch.equal(logits[1], logits[3])
    assert (logits[0] - logits[1]).abs().max() > 1e-6


def test_the_inputs_of_a_pair_are_told_apart() -> None:
    model = nac("image pair")
    inputs = inputs_of(model, 2)
    swapped = {"image": inputs["image_b"], "image_b": inputs["image"]}
    answer, other = run(model, inputs), run(model, swapped)
    assert (answer["logits"] - other["logits"]).abs().max() > 1e-6
    with torch.no_grad():
        model.tokenizer.mark.fill_(0.3)
    assert (run(model, inputs)["logits"] - run(model, swapped)["logits"]).abs().max() < 1e-12


def test_points_are_a_set_and_characters_are_not() -> None:
    for case, same in (("points", True), ("token set", True), ("characters", False)):
        model = nac(case)
        x = inputs_of(model, 4)[model.config.input]
        if case == "characters":
            x = torch.arange(9).expand(4, -1) % 3
        moved = (model(x) - model(x.roll(2, 1))).abs().max()
        assert (moved < 1e-12) == same, case


@pytest.mark.parametrize("case", ("image pair, conditioned",))
def test_a_file_gives_the_same_answers_for_mixed_lengths(case: str) -> None:
    model = nac(case, propagator_layers=1)
    folded = model.float().fold()
    component = component_named(folded, "")
    outputs = (*component.outputs, *component.optional)
    proto = trace_component(
        folded, component, component.random(np.random.default_rng(0), 3), outputs
    )
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    model.double()
    for count in (1, 7):
        inputs = inputs_of(folded, count, seed=count)
        feed = {name: value.numpy() for name, value in inputs.items()}
        answers = dict(zip(outputs, session.run(None, feed), strict=True))
        for name, value in run(model, inputs).items():
            assert np.abs(answers[name] - value.numpy()).max() < 2e-4, name
        assert component.invariants["attention_sums_to_one"](feed, answers, {}) <= 1


def test_budgets_differ_and_runtime_metadata_tells_what_a_client_needs() -> None:
    model = nac("characters")
    assert [s.label for s in model.budgets()] == ["b1000", "b0500", "b0250", "b0125"]
    assert [s.kept for s in nac("image", modules=3).budgets()] == [3, 2, 1]
    assert model.budget("0.3").kept == 5 and model.at(model.budget("0.3")).config.modules == 5
    with pytest.raises(SaccadeError, match="keeps none of 16 modules"):
        model.budget("0.01")
    metadata = model.runtime_metadata()
    assert metadata["vocabulary"] == ["a", "b", "c"] and metadata["max_tokens"] == 9
    assert metadata["inputs"] == ["characters"] and metadata["lengths"] == ["length"]


def test_open_axes_and_inputs_too_long_are_refused() -> None:
    for case, field in (
        (CASES["tokens"] | {"max_tokens": 0}, "max_tokens"),
        (CONDITION | {"condition_tokens": 0}, "condition_tokens"),
    ):
        model = NAC(NACConfig(**{**SMALL, **case}), fresh=False)
        with pytest.raises(SaccadeError, match=f"{field} is 0"):
            model.components()
    with pytest.raises(ShapeError, match="found 10 in a sample, expected at most 9"):
        nac("characters")(torch.zeros(1, 10, dtype=torch.int64))
    with pytest.raises(ShapeError, match="whole numbers"):
        nac("bytes")(torch.zeros(1, 10))
    with pytest.raises(ShapeError, match=r"expected \[b, n, 3\]"):
        nac("points")(torch.zeros(1, 10, 2))
    with pytest.raises(ShapeError, match="Stack the inputs of a pair"):
        nac("image pair")(torch.zeros(1, 8, 8, 1))
