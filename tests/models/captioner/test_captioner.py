# SPDX-License-Identifier: Apache-2.0
"""The captioner: its folded form, its search, its files."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fixed_fold import folded_in_order

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.captioner.caption_search import beam_search, greedy_search, step_of
from saccade.models.captioner.config import PRESETS
from saccade.models.captioner.model import Captioner
from saccade.models.interface import component_named
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE

TINY = PRESETS["captioner-tiny"]


def model_of(attention="tvmax", **changes):
    """Weights that make captions differ from image to image; batch norms that do something."""
    torch.manual_seed(0)
    model = Captioner(replace(TINY, attention=attention, **changes)).double()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not name.startswith(("conv", "position", "embedding")):
                value *= 3
        if model.config.encoder == "cnn":
            shown = torch.from_numpy(images(32, seed=9))
            for layer in model.convolutions:
                layer.momentum = 1.0  # of batch norms: the statistics of what is shown
            model.train().encode(shown)
            # Sure of itself, and no token likelier than another over many states.
            model.head.weight *= 20
            tokens = torch.randint(0, model.config.vocabulary, (32, 6))
            logits, _ = model.eval()(shown, tokens)
            model.head.bias -= logits.mean((0, 1))
    return model.eval()


def images(count=6, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return coarse.repeat(4, 1).repeat(4, 2)


@pytest.mark.parametrize("changes", [{}, {"position": False}, {"encoder": "features"}])
def test_folded_form_is_the_same_function(changes):
    model = model_of("tvmax", **changes)
    folded = folded_in_order(model)
    given = torch.from_numpy(images())
    if changes.get("encoder") == "features":
        given = torch.randn(6, 4, 4, TINY.feature_dim)
    token = torch.arange(6)
    with torch.no_grad():
        one, two = model.encode(given), folded.encode(given)
        pairs = list(zip(one, two, strict=True))
        pairs += zip(model.step(*one, token), folded.step(*one, token), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-10
    assert [component.role for component in folded.components()] == ["encode", "step"]
    assert not (folded.training or any(value.requires_grad for value in folded.parameters()))


def test_teacher_forcing_takes_the_same_steps():
    model = model_of()
    tokens = torch.tensor([[1, 4, 5, 2], [1, 6, 7, 2]])
    image = torch.from_numpy(images(2))
    with torch.no_grad():
        logits, maps = model(image, tokens)
        state = model.encode(image)
        features = state[0]
        for place in range(4):
            step = model.step(features, *state[1:], tokens[:, place])
            state = (features, step.h, step.c)
            torch.testing.assert_close(step.logits, logits[:, place])
            torch.testing.assert_close(step.attention, maps[:, place])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The tiny model with TVMax through the gate."""
    from quick_gate import FEW_SAMPLES

    from saccade.exporter.export import ExportOptions, export
    from saccade.models.checkpoint import save
    from saccade.models.preprocessing import Preprocessing

    folder = tmp_path_factory.mktemp("captioner")
    model = model_of().float()
    config = model.config
    save(
        folder / "tiny.safetensors",
        family="captioner",
        config=config.to_dict(),
        weights=model.state_dict(),
        preprocessing=Preprocessing(16, 16, 3, config.mean, config.std),
        labels=(),
        calibration={"image": images(256)},
        card={},
    )
    export(folder / "tiny.safetensors", ExportOptions(folder / "out"), FEW_SAMPLES)
    return model, folder / "out"


def test_exported_files_caption_like_the_model(exported):
    from saccade.exporter.runtimes.runners import onnx_runner, onnx_session

    model, folder = exported
    files = {role: next(folder.glob(f"*-{role}-*.onnx")) for role in ("encode", "step")}
    encode, step = (onnx_runner(onnx_session(files[role])) for role in ("encode", "step"))
    asked = images(5, seed=1)
    start = {"start": model.config.start, "end": model.config.end, "max_length": 8}
    state = encode({"image": asked})
    greedy = greedy_search(step_of(step), state, **start)
    expected = model.caption(asked, beam=1)
    assert [each.tokens for each in greedy] == [each.tokens for each in expected]
    assert len({each.tokens for each in greedy}) > 1, "the test should see different captions"
    for place, wanted in enumerate(model.caption(asked, beam=3)):
        row = {name: value[place : place + 1] for name, value in state.items()}
        actual = beam_search(step_of(step), row, beam=3, **start)[0]
        assert actual.tokens == wanted.tokens and actual.ended == wanted.ended
        assert actual.score == pytest.approx(wanted.score, abs=1e-3)
        assert actual.attention.shape == (len(actual.tokens), 4, 4)
        np.testing.assert_allclose(actual.attention, wanted.attention, atol=1e-4)


def test_invariants_fail_on_weights_that_break_them():
    model = model_of("tvmax")
    component = component_named(model, "step")
    inputs = component.real({"image": images(16)})
    assert len(set(inputs["token"].tolist())) > 1 and inputs["features"].dtype == np.float32
    given = {name: torch.from_numpy(value) for name, value in inputs.items()}
    given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    with torch.no_grad():
        true = {name: each.numpy() for name, each in component.run(**given).items()}
    assert max(invariant(inputs, true, true) for invariant in component.invariants.values()) <= 1
    uneven = true | {"attention": true["attention"] * 1.001}
    dense = true | {"attention": true["attention"] * 0.9 + 0.1 / 16}
    above = true | {"attention_excess": true["attention_excess"] + 1e-5}
    assert component.invariants["attention_sums_to_one"](inputs, uneven, true) > 1
    assert component.invariants["attention_support"](inputs, dense, true) > 1
    assert component.invariants["tvmax_bound"](inputs, above, true) > 1


def test_an_error_above_the_tolerance_is_an_excess(monkeypatch):
    model = model_of("tvmax")
    allowed = max(TINY.tolerance, SMALLEST_FLOAT32_TOLERANCE)
    state = *model.encode(torch.from_numpy(images(1))), torch.tensor([1])
    for times, excess in ((0.9, 0.0), (3.0, 2.0)):
        found = model.step(*state)._replace(error=torch.tensor([times * allowed]).double())
        monkeypatch.setattr(model, "step", lambda *_, found=found: found)
        component = component_named(model, "step").run(*state)
        assert component["attention_excess"].item() == pytest.approx(
            excess * allowed, abs=0.01 * allowed
        )
        chances = component["log_probabilities"].detach().exp()
        torch.testing.assert_close(chances, found.logits.softmax(-1))
        monkeypatch.undo()


def test_a_caption_longer_than_trained_is_refused():
    with pytest.raises(SaccadeError, match="max_length is 99, expected a whole number from 1 to 8"):
        model_of().caption(images(1), max_length=99)


def test_images_of_another_size_and_other_budgets_are_refused():
    with pytest.raises(ShapeError, match="Resize"):
        model_of().encode(torch.zeros(1, 8, 8, 3))
    with pytest.raises(SaccadeError, match="exported whole"):
        model_of().budget("0.01")
    assert model_of().budget("1") == model_of().budgets()[0]
