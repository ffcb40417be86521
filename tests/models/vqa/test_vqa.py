# SPDX-License-Identifier: Apache-2.0
"""The network that answers questions: folding, layouts, masks, the authors' solver, wrong input."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fixed_fold import folded_in_order

from saccade.core.errors import SaccadeError
from saccade.models.vqa.config import PRESETS, VQAConfig
from saccade.models.vqa.image_attention import tv_dykstra
from saccade.models.vqa.mcan import Attention
from saccade.models.vqa.model import VQA
from saccade.models.vqa.questions import question_tokens
from saccade.plugins.ops import sparsemax, tvmax

TINY = PRESETS["vqa-tiny"]
FLAT = replace(
    TINY,
    features="given",
    layout="flat",
    grid=(4, 5),
    rows=14,
    feature_dim=12,
    boxes=5,
    box_dim=7,
    layers=2,
)
FORMS = {
    "pixels": TINY,
    "pixels, tvmax": replace(TINY, attention="tvmax", lam=0.05, answer="sigmoid"),
    "rows, softmax": replace(FLAT, attention="softmax", norm="spread", eps=1e-6),
    "cells, the authors' tvmax": replace(FLAT, layout="grid", attention="tvmax", solver="authors"),
    "boxes": replace(FLAT, image="boxes"),
    "sparse, rows with tvmax and boxes": replace(
        FLAT, image="both", attention="tvmax", self_attention="sparsemax"
    ),
}


def _model(config: VQAConfig) -> VQA:
    """Fresh weights, with gains and biases that are not 1 and 0."""
    model = VQA(config).double().eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    return model


def _inputs(model: VQA, count: int = 9) -> dict[str, torch.Tensor]:
    random = model.components()[0].random
    assert random is not None
    drawn = random(np.random.default_rng(0), count)
    return {name: torch.from_numpy(array) for name, array in drawn.items()}


@pytest.mark.parametrize("form", FORMS)
def test_folding_changes_nothing(form: str) -> None:
    model = _model(FORMS[form])
    inputs = _inputs(model)
    expected, actual = model.details(**inputs), folded_in_order(model).components()[0].run(**inputs)
    assert list(actual) == list(expected)
    for name, values in expected.items():
        assert (actual[name] - values).abs().max() < 1e-10, name


@pytest.mark.parametrize("form", FORMS)
def test_invariants_hold_and_can_fail(form: str) -> None:
    model = _model(FORMS[form])
    component, inputs = model.components()[0], _inputs(model)
    answers = {name: array.numpy() for name, array in component.run(**inputs).items()}
    given = {name: value.numpy() for name, value in inputs.items()}
    assert all(
        invariant(given, answers, answers) <= 1 for invariant in component.invariants.values()
    )
    wrong = answers | {"attention": answers["attention"] + 0.01}
    broken = {
        name
        for name, invariant in component.invariants.items()
        if invariant(given, wrong, answers) > 1
    }
    assert "attention_sums_to_one" in broken
    assert ("attention_support" in broken) == (model.config.attention != "softmax")
    if "tvmax_bound" in component.invariants:
        far = answers | {"attention_excess": answers["attention_excess"] + 1e-9}
        assert component.invariants["tvmax_bound"](given, far, answers) > 1


@pytest.mark.parametrize("solver", ["exact", "authors"])
def test_layouts_agree_and_nothing_outside_counts(solver: str) -> None:
    flat = replace(FLAT, attention="tvmax", lam=0.05, solver=solver, tolerance=1e-12)
    model = _model(flat)
    other = VQA(replace(flat, layout="grid"), fresh=False).double().eval()
    other.load_state_dict(model.state_dict())
    inputs = _inputs(model)
    cells = torch.full((9, 4, 5, 12), torch.nan, dtype=torch.float32)
    rows = inputs["features"].clone()
    for index, (h, w) in enumerate(inputs["sizes"].tolist()):
        cells[index, :h, :w] = rows[index, : h * w].unflatten(0, (h, w))
        rows[index, h * w :] = 7.0
    expected = model.details(**inputs)
    for actual in (
        other.details(**inputs | {"features": cells}),
        model.details(**inputs | {"features": rows}),
    ):
        assert (actual["logits"] - expected["logits"]).abs().max() < 1e-10
        assert (actual["attention"] - expected["attention"]).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["softmax", "sparsemax"])
def test_self_attention_is_what_its_field_says_in_the_decoders_alone(kind: str) -> None:
    model = _model(replace(FLAT, self_attention=kind))
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            module.keys.weight.mul_(8)  # so that a sparsemax leaves something out

            def keep(_: torch.nn.Module, given: tuple, name: str = name) -> None:
                seen[name] = given[0]

            module.dropout.register_forward_pre_hook(keep)
    inputs = _inputs(model)
    inputs["question"].clamp_(min=1)
    inputs["sizes"][:] = torch.tensor([3, 4])
    inputs["features"] = inputs["features"].sign() + 2  # no cell of zeros, which is masked
    model(**inputs)
    # By layer: the share of places inside the grid or the question that get no weight.
    zeros = {name: float((each[..., :12] == 0).double().mean()) for name, each in seen.items()}
    own = {name for name in zeros if "decoder" in name and name.endswith(".attention")}
    assert len(own) == FLAT.layers < len(zeros)
    for name, share in zeros.items():
        assert (share > 0.05) == (kind == "sparsemax" and name in own), (name, share)


def test_padding_and_zero_rows_are_masked() -> None:
    model = _model(replace(FLAT, attention="softmax"))
    inputs = _inputs(model, 2)
    inputs["sizes"][:] = torch.tensor([3, 4])
    inputs["features"][0, 5] = 0
    inputs["question"][:, 6:] = 0
    answer = model.details(**inputs)
    assert answer["attention"][0, 1, 1] == 0
    assert answer["attention"][1, 1, 1] > 0
    shorter = model.details(**inputs | {"question": inputs["question"][:, :6]})
    assert (answer["logits"] - shorter["logits"]).abs().max() < 1e-12


def test_each_answer_is_its_samples_own() -> None:
    model = _model(replace(FLAT, attention="tvmax", solver="authors", lam=0.05, stop=0.003))
    inputs = _inputs(model)
    together = model(**inputs)
    for index in range(9):
        alone = model(**{name: value[index : index + 1] for name, value in inputs.items()})
        assert (alone[0] - together[index]).abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(1, 9), (9, 1)])
def test_the_authors_chains_are_exact(shape: tuple[int, int]) -> None:
    z = torch.randn(8, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z[2, :, :] = 0.5
    sizes = torch.tensor([shape]).expand(8, 2)
    solved = tv_dykstra(z, sizes, torch.zeros_like(z, dtype=torch.bool), 0.2)
    weights = sparsemax(solved.flatten(1)).view_as(z)
    assert (weights - tvmax(z, 0.2, tolerance=1e-12)).abs().max() < 1e-10


def test_the_authors_rounds_end_early_but_lead_to_the_answer() -> None:
    z = 0.3 * torch.randn(4, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z[0, 2, 3] = -1e9
    masked, sizes = z < -1e8, torch.tensor([[4, 5], [3, 4], [1, 5], [4, 2]])
    exact = tvmax(z, 0.05, sizes, tolerance=1e-12)
    inside = exact >= 0
    for h, w, grid in zip(*sizes.T.tolist(), inside, strict=True):
        grid[h:], grid[:, w:] = False, False

    def apart(stop: float, rounds: int) -> float:
        solved = tv_dykstra(z, sizes, masked, 0.05, rounds, stop)
        weights = sparsemax(torch.where(inside, solved, -1e9).flatten(1)).view_as(z)
        return float((weights - exact).abs().max())

    assert apart(stop=0.0, rounds=35) < 1e-10
    assert 1e-4 < apart(stop=0.01, rounds=35) < 2e-2


def test_what_a_client_needs() -> None:
    words = ("what", "is", "red")
    metadata = VQA(replace(FLAT, words=words, tokens=7, question_length=5)).runtime_metadata()
    assert question_tokens(metadata, "What is blue?", truncate=True).tolist() == [1, 4, 5, 3, 2]
    listed = ("PAD", "UNK", "what", "is", "red")
    metadata = VQA(replace(FLAT, words=listed, vocabulary="listed", tokens=5)).runtime_metadata()
    assert question_tokens(metadata, "Is what's-this red?")[:5].tolist() == [3, 1, 1, 4, 0]
    with pytest.raises(SaccadeError, match="--vocabulary"):
        question_tokens(VQA(FLAT).runtime_metadata(), "is it red ?")


WRONG_INPUTS = {
    "a grid too wide": ({"sizes": [[4, 6]]}, "1 to 5 columns"),
    "more cells than rows": ({"sizes": [[4, 4]]}, "14 cells"),
    "no cell": ({"sizes": [[0, 3]]}, "found"),
    "no box": ({"box_count": [0]}, "1 to 5 boxes"),
    "a word of another vocabulary": ({"question": [[99]]}, "token ids"),
}


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_wrong_inputs_are_named(case: str) -> None:
    model = _model(replace(FLAT, image="both"))
    inputs = _inputs(model, 1)
    given, message = WRONG_INPUTS[case]
    with pytest.raises(SaccadeError, match=message):
        model(**inputs | {name: torch.tensor(value) for name, value in given.items()})


def test_a_budget_is_the_whole_model() -> None:
    model = VQA(TINY)
    assert model.budget("1") == model.budgets()[0]
    assert model.at(model.budget("whole")) is model
    with pytest.raises(SaccadeError, match="whole"):
        model.budget("0.5")
