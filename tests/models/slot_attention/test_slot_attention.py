# SPDX-License-Identifier: Apache-2.0
"""Slot attention: recorded cases, equivariance, initial states, folding, what is exported."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fixed_fold import folded_in_order
from golden_cases import slot_attention as golden
from places import TESTS

from saccade.core.errors import SaccadeError
from saccade.models.interface import component_named
from saccade.models.slot_attention import components
from saccade.models.slot_attention.config import PRESETS, SlotConfig
from saccade.models.slot_attention.fold import fold_attention, reordered_attention
from saccade.models.slot_attention.initial import WrongSlots, initial_states
from saccade.models.slot_attention.model import SlotModel
from saccade.models.slot_attention.rounds import SlotAttention

GOLDEN = TESTS / "golden" / "slot_attention"
TINY = PRESETS["slot-attention-tiny"]
BASELINE = replace(TINY, attention="sa", grid_embedding="project_add", grid_embedding_mlp=8)
CNN = {
    "decoder": "cnn",
    "decoder_height": 7,
    "decoder_width": 7,
    "decoder_channels": (8, 8),
    "decoder_kernels": (5, 3),
    "decoder_strides": (2, 1),
    "decoder_transposed": (True, False),
}
FORMS = {
    "sa": BASELINE,
    "sa, two heads, gaussian": replace(BASELINE, heads=2, initial_slots="gaussian"),
    "sa, CNN": replace(BASELINE, **CNN),
    "sa, equation 1": replace(TINY, attention="sa", keys_see_grid=True),
    "t-sa": replace(TINY, attention="t-sa", scales_factor=1.0),
    "t-sa, plain values": replace(TINY, attention="t-sa", values_see_grid=False),
    "ts-sa": TINY,
    "ts-sa, no norm, no MLP, CNN": replace(TINY, grid_norm=False, mlp_dim=0, **CNN),
    "ts-sa, learned grid": replace(TINY, grid_embedding="project_add", values_see_grid=False),
}


def model_of(config: SlotConfig) -> SlotModel:
    """A model in float64 whose biases and norms are not at their first values."""
    model = SlotModel(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.add_(0.2 * torch.randn(value.shape, generator=generator).double())
    return model


def rounds_of(config: SlotConfig, **changes: object) -> SlotAttention:
    attention = model_of(config).attention
    attention.config = replace(config, **changes)
    return attention


def inputs_of(attention: SlotAttention, *, cells: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with their grid, and states whose positions and scales stay inside the clips."""
    generator = torch.Generator().manual_seed(2)
    config, n = attention.config, cells * cells
    width = attention.norm_inputs.weight.shape[0]
    tokens = torch.randn(2, n, width, generator=generator).double()
    line = torch.linspace(-0.5, 0.5, cells).double()
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).reshape(1, n, 2)
    slots = torch.randn(2, 3, config.slot_dim, generator=generator).double()
    places = torch.rand(2, 3, 2, generator=generator).double() - 0.5
    scales = 0.1 + 0.4 * torch.rand(2, 3, 2, generator=generator).double()
    parts = [slots, places, scales][: 1 + config.equivariant + config.scaled]
    return torch.cat([tokens, grid.expand(2, -1, -1)], -1), torch.cat(parts, -1)


def moved(inputs, state, config, *, by=0.0, times=1.0):
    """Grid, positions and scales under x -> times x + by."""
    d, inputs, state = config.slot_dim, inputs.clone(), state.clone()
    by = torch.as_tensor(by).double()
    inputs[..., -2:] = inputs[..., -2:] * times + by
    state[..., d : d + 2] = state[..., d : d + 2] * times + by
    state[..., d + 2 :] *= times
    return inputs, state


def test_recorded_cases_are_reproduced():
    assert golden.count(GOLDEN) == 10 + 19
    assert golden.check(GOLDEN) == []


def test_recorded_cases_can_fail(tmp_path):
    for file in GOLDEN.iterdir():
        (tmp_path / file.name).symlink_to(file)
    data = dict(np.load(GOLDEN / "tsa_v2_qkv20.npz"))
    data["out/slots_out"] = data["out/slots_out"] + 1e-3
    (tmp_path / "tsa_v2_qkv20.npz").unlink()
    np.savez(tmp_path / "tsa_v2_qkv20.npz", **data)
    lines = golden.check(tmp_path)
    assert lines and all("tsa_v2_qkv20: " in line and "slots_out" in line for line in lines)


# The weighted means divide by S + epsilon: with epsilon 0 the invariants hold to rounding.
@pytest.mark.parametrize(("epsilon", "allowed"), [(0.0, 1e-12), (1e-8, 1e-6)])
@pytest.mark.parametrize("kind", ["t-sa", "ts-sa"])
def test_translation_moves_positions_and_nothing_else(kind, epsilon, allowed):
    config = replace(TINY, attention=kind, epsilon=epsilon)
    attention, by = rounds_of(config), torch.tensor([0.3, -0.4])
    inputs, state = inputs_of(attention)
    before, _ = attention(inputs, state)
    after, _ = attention(*moved(inputs, state, config, by=by))
    assert (after.slots - before.slots).abs().max() <= allowed
    assert (after.positions - before.positions - by).abs().max() <= allowed
    other, _ = attention(moved(inputs, state, config, by=by)[0], state)
    assert (other.slots - before.slots).abs().max() > 1e-3, "the test can fail"


@pytest.mark.parametrize(("epsilon", "allowed"), [(0.0, 1e-12), (1e-8, 1e-6)])
def test_scale_multiplies_positions_and_scales_and_nothing_else(epsilon, allowed):
    config = replace(TINY, epsilon=epsilon)
    attention = rounds_of(config)
    inputs, state = inputs_of(attention)
    before, _ = attention(inputs, state)
    after, _ = attention(*moved(inputs, state, config, times=1.6))
    assert (after.slots - before.slots).abs().max() <= allowed
    assert (after.positions - 1.6 * before.positions).abs().max() <= allowed
    assert (after.scales - 1.6 * before.scales).abs().max() <= allowed


@pytest.mark.parametrize("form", ["sa", "t-sa", "ts-sa"])
def test_slots_permute_with_their_initial_state(form):
    model, component = model_of(FORMS[form]), component_named(model_of(FORMS[form]), "")
    given = component.random(np.random.default_rng(0), 2)
    image, state = (torch.from_numpy(given[name]) for name in ("image", "initial_state"))
    order = torch.tensor([2, 0, 3, 1])
    run = component_named(model, "").run
    before, after = run(image, state), run(image, state[:, order])
    for name in set(before) - {"reconstruction"}:
        assert (after[name] - before[name][:, order]).abs().max() <= 1e-12, name
    assert (after["reconstruction"] - before["reconstruction"]).abs().max() <= 1e-12


def test_a_moved_slot_is_painted_where_it_was_moved():
    model = model_of(replace(FORMS["t-sa"], decoder_height=9, decoder_width=9))
    given = component_named(model, "decode").random(np.random.default_rng(0), 1)
    slots, places = (torch.from_numpy(given[name]).double() for name in ("slots", "positions"))
    run = model.decoder
    state = type(model.attention._start(torch.cat([slots, places], -1)))
    alphas = run(state(slots, places)).alphas
    moved_right = run(state(slots, places + torch.tensor([0.0, 0.25]))).alphas  # one cell of 8
    assert (moved_right[..., 1:] - alphas[..., :-1]).abs().max() <= 1e-10


@pytest.mark.parametrize("pixels", [1, 2**20])
def test_samples_of_the_decoder_are_computed_without_painting(pixels, monkeypatch):
    model = model_of(TINY)
    image, states = component_named(model, "").random(np.random.default_rng(0), 3).values()
    with torch.no_grad():
        expected, _, _ = model(torch.from_numpy(image), torch.from_numpy(states))
    monkeypatch.setattr(components, "_states", lambda *_: states)
    monkeypatch.setattr(components, "_CHUNK_PIXELS", pixels)  # one image at a time, or all
    monkeypatch.setattr(model.decoder, "forward", None)
    found = component_named(model, "decode").samples({"image": image})
    np.testing.assert_allclose(found["slots"], expected.slots, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_folded_model_is_the_same_function(form):
    model = model_of(FORMS[form])
    folded = folded_in_order(model)
    for role in ("", "decode"):
        component, other = component_named(model, role), component_named(folded, role)
        given = {
            name: torch.from_numpy(value).double() if value.dtype != np.uint8 else value
            for name, value in component.random(np.random.default_rng(3), 3).items()
        }
        given = {name: torch.as_tensor(value) for name, value in given.items()}
        with torch.no_grad():
            expected, actual = component.run(**given), other.run(**given)
        assert list(actual) == list(expected) and set(component.outputs) <= set(actual)
        for name in expected:
            assert (actual[name] - expected[name]).abs().max() <= 1e-10, (role, name)
    assert not any(parameter.requires_grad for parameter in folded.parameters())


@pytest.mark.parametrize("form", ["t-sa", "ts-sa, no norm, no MLP, CNN"])
def test_training_order_has_the_same_gradients(form):
    attention = rounds_of(FORMS[form])
    inputs, state = inputs_of(attention)
    gradients = []
    for each in (attention, reordered_attention(attention)):
        attention.zero_grad()
        each(inputs, state)[0].joined().square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in attention.named_parameters()})
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).abs().max() <= 1e-9 * (1 + expected.abs().max())


def test_switches_of_algorithm_1():
    attention = rounds_of(FORMS["t-sa"])
    inputs, state = inputs_of(attention)
    before, _ = attention(inputs, state)
    printed = rounds_of(FORMS["t-sa"], returned_slots="normalised")(inputs, state)[0]
    assert torch.equal(printed.slots, attention.norm_slots(before.slots))
    assert torch.equal(printed.positions, before.positions)
    by_slots = rounds_of(FORMS["t-sa"], query_scale="slots")(inputs, state)[0]
    by_heat = rounds_of(FORMS["t-sa"], temperature=(3 / 16) ** 0.5)(inputs, state)[0]
    assert (by_slots.slots - by_heat.slots).abs().max() <= 1e-12


def test_folded_baseline_keeps_its_heads():
    attention = rounds_of(FORMS["sa, two heads, gaussian"])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 20, attention.norm_inputs.weight.shape[0], generator=generator).double()
    state = torch.randn(2, 3, 16, generator=generator).double()
    expected, actual = attention(tokens, state)[1], fold_attention(attention)(tokens, state)[1]
    assert expected[-1].shape == (2, 2, 3, 20)
    assert (actual[-1] - expected[-1]).abs().max() <= 1e-12


@pytest.mark.parametrize("form", ["sa, two heads, gaussian", "ts-sa"])
def test_initial_states_follow_their_rule(form):
    model = model_of(FORMS[form])
    rule, config = model.runtime_metadata()["initial_state"], model.config
    states = initial_states(rule, 3, 4, seed=7)
    assert states.shape == (3, 4, config.state_dim) and states.dtype == np.float32
    later = initial_states(rule, 1, 4, seed=7, first=2)
    assert np.array_equal(later[0], states[2]) and not np.array_equal(states[0, 0], states[1, 0])
    rng = np.random.default_rng([7, 1])
    if form == "ts-sa":
        expected = [np.array(rule["slots"]), rng.uniform(-1, 1, (4, 2))]
        expected.append(0.1 + 0.1 * rng.standard_normal((4, 2)))
        with pytest.raises(WrongSlots, match="slots is 5, expected 1 to 4"):
            initial_states(rule, 1, 5)
    else:
        mean, std = (np.array(rule[name]) for name in ("mean", "std"))
        expected = [mean + std * rng.standard_normal((4, 16))]
        assert initial_states(rule, 1, 9).shape == (1, 9, 16)
    assert np.array_equal(states[1], np.concatenate(expected, -1).astype(np.float32))


def test_budgets_are_rounds():
    model = model_of(TINY)
    assert [budget.label for budget in model.budgets()] == ["t3", "t2", "t1"]
    assert model.budget("t2") == model.budget("2") == model.budgets()[1]
    assert model.budget("1").share == 1 / 3
    small = model.at(model.budget("t1"))
    assert small.config.rounds == small.attention.config.rounds == 1
    assert model.config.rounds == model.attention.config.rounds == 3
    for text in ("4", "0", "0.5", "t"):
        with pytest.raises(SaccadeError, match="from 1 to 3"):
            model.budget(text)


class Served(torch.nn.Module):
    def __init__(self, model, role):
        super().__init__()
        self.model, self.component = model, component_named(model, role)

    def forward(self, *inputs):
        names = [spec.name for spec in self.component.inputs]
        return tuple(self.component.run(**dict(zip(names, inputs, strict=True))).values())


@pytest.mark.parametrize("role", ["", "decode"])
def test_traced_components_take_any_batch_and_number_of_slots(role):
    folded = SlotModel(replace(TINY, rounds=1)).eval().fold()
    component, served = component_named(folded, role), Served(folded, role)
    words = {word: torch.export.Dim(word, min=1) for word in ("b", "k")}
    axes = tuple({i: words.get(w) for i, w in enumerate(spec.shape)} for spec in component.inputs)
    example = component.random(np.random.default_rng(0), 3).values()
    with torch.no_grad():
        traced = torch.export.export(
            served, tuple(map(torch.from_numpy, example)), dynamic_shapes={"inputs": axes}
        ).module()
        given = component.random(np.random.default_rng(1), 2)
        for some in (slice(0, 1), slice(1, 4)):
            one = [x[1:] if name == "image" else x[1:, some] for name, x in given.items()]
            one = [torch.from_numpy(np.ascontiguousarray(value)) for value in one]
            for actual, expected in zip(traced(*one), served(*one), strict=True):
                assert actual.shape == expected.shape
                assert (actual - expected).abs().max() <= 1e-5


def test_equation_1_by_hand():
    """Keys and values f(k(token) + g(grid)) of one round, without our reader."""
    attention = rounds_of(FORMS["sa, equation 1"], rounds=1)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(2, 9, attention.norm_inputs.weight.shape[0], generator=generator).double()
    grid, slots = torch.rand(9, 2, generator=generator).double(), torch.rand(2, 3, 16).double()
    now, (seen,) = attention(torch.cat([tokens, grid.expand(2, -1, -1)], -1), slots)

    reader, normed = attention.reader, attention.norm_inputs(tokens)
    queries = attention.queries(attention.norm_slots(slots)) / 16**0.5

    def f(linear):
        x = linear(normed) + reader.grid(grid)
        return reader.narrow(torch.relu(reader.widen(reader.norm(x))))

    shares = torch.einsum("bkd,bnd->bkn", queries, f(reader.keys)).softmax(1)
    weights = shares / (shares.sum(2, keepdim=True) + attention.config.epsilon)
    updated = attention.gate(slots, torch.einsum("bkn,bnd->bkd", weights, f(reader.values)))
    torch.testing.assert_close(seen[:, 0], shares)
    torch.testing.assert_close(now.slots, updated + attention.mlp(updated))
    assert now.positions is None
