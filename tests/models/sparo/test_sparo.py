# SPDX-License-Identifier: Apache-2.0
"""SPARO beyond the recorded cases: folding, budgets, selection, components, authors' files."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fixed_fold import folded_in_order

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.interface import component_named
from saccade.models.sparo.components import nearest_neighbour, random_tokens
from saccade.models.sparo.config import PRESETS, SparoConfig
from saccade.models.sparo.model import Sparo, slots_sha256
from saccade.models.sparo.pooling import unit_code
from saccade.models.sparo.ranking import (
    rank_by_negatives,
    rank_slots,
    read_selection,
    selection,
    train_masks,
    with_selection,
    write_selection,
)
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.zero_shot import class_vectors, encode_classes, zero_shot_logits

TINY = PRESETS["sparo-tiny"]
FORMS = {
    "default": TINY,
    "groups, own values": replace(TINY, slot_heads=4, share_kv=False, value_dim=6),
    "gates": replace(TINY, sparo_type="sqrtsem:sqrtsoftmax", slot_heads=2),
    "shared queries": replace(TINY, share_queries=True, reduce_depth=1),
    "masked": replace(TINY, masked=True, sparo_type="cont:softmax"),
    "images alone": replace(TINY, text=False, patch_bias=True, pre_norm=False),
    "class token": replace(TINY, pooling="cls", bottleneck_dim=12),
    "average": replace(TINY, pooling="gap", activation="quick_gelu"),
    "attention": replace(TINY, pooling="attention", queries=3, pooler_heads=2),
    "means of two attentions": replace(
        TINY,
        pooling="attention",
        queries=3,
        pooler_heads=2,
        mean_of_queries=True,
        text_queries=5,
        text_pooler_heads=4,
        text_mean_of_queries=True,
    ),
    "codebook": replace(TINY, pooling="codebook", codes=24, temperature=0.1),
    "narrow codebook": replace(
        TINY, pooling="codebook", codes=24, temperature=0.1, bottleneck_dim=12
    ),
}
TYPES = [
    f"{rep}:{weight}"
    for rep in ("cont", "sqrtsem", "sem")
    for weight in ("const", "norm", "sqrtsoftmax", "softmax")
    if (rep, weight) != ("sem", "norm")
]


def model_of(config: SparoConfig) -> Sparo:
    """A model in float64 whose biases and masks are not at their first values."""
    model = Sparo(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.copy_(0.2 * torch.randn(value.shape, generator=generator))
        if config.masked:
            model.slot_mask.copy_(torch.rand(model.slot_mask.shape, generator=generator))
    return model


def inputs_of(config: SparoConfig, count: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    shape = (count, config.height_px, config.width_px, 3)
    image = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
    tokens = torch.from_numpy(random_tokens(config, rng, count))
    role = "image" if config.text else ""
    return {role: {"image": image}} | ({"text": {"tokens": tokens}} if config.text else {})


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_folded_is_the_same_function(form):
    model = model_of(FORMS[form])
    folded = folded_in_order(model)
    for role, inputs in inputs_of(model.config).items():
        component = component_named(folded, role)
        expected, actual = component_named(model, role).run(**inputs), component.run(**inputs)
        assert set(actual) == {*component.outputs, *component.optional} == set(expected)
        for name, value in expected.items():
            assert (actual[name] - value).abs().max() < 1e-10, (role, name)
        ones = expected["embedding"].norm(dim=-1)
        assert torch.allclose(ones, torch.ones_like(ones), atol=1e-12)


@pytest.mark.parametrize(
    ("form", "norm", "blocks"),
    [("default", "norm", 3), ("gates", "norm", 3), ("class token", "norm", 4),
     ("attention", "norm_tokens", 4), ("codebook", "map.norm", 4)],
)  # fmt: skip
@torch.no_grad()
def test_a_probe_gets_the_last_class_tokens_and_the_slots_before_normalization(form, norm, blocks):
    model = model_of(replace(FORMS[form], image_layers=5))
    after: list[torch.Tensor] = []
    for block in model.image.blocks:
        block.register_forward_hook(lambda module, given, tokens: after.append(tokens[:, 0]))
    found = model.encode_image(next(iter(inputs_of(model.config)["image"].values())))
    expected = [model.image_pool.get_submodule(norm)(token) for token in after[-blocks:]]
    assert len(after) == 5 and len(expected) == blocks
    if found.raw is not None:
        expected.append(found.raw[..., -model.config.slot_dim :].flatten(1))
        assert expected[-1].shape == found.code.shape
    assert torch.equal(found.probe_features, torch.cat(expected, 1))
    image = torch.zeros(1, *model.image.scale.size)
    assert model.train().encode_image(image).probe_features is None


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_fewer_slots_are_the_same_slots_renormalised_in_both_towers(kind):
    config = replace(TINY, sparo_type=kind, slot_heads=4, share_queries=True)
    model = model_of(config)
    model.slot_order.copy_(torch.tensor([6, 1, 4, 3, 7, 0, 2, 5]))
    image, tokens = (next(iter(each.values())) for each in inputs_of(config).values())
    smaller = model.at(model.budget("0.375"))
    assert smaller.config.kept == (1, 4, 6)
    for full, part in (
        (model.encode_image(image), smaller.encode_image(image)),
        (model.encode_text(tokens), smaller.encode_text(tokens)),
    ):
        expected = unit_code(full.raw[:, [1, 4, 6]], kind)
        assert (part.slots - expected).abs().max() < 1e-12
        assert (part.attention - full.attention[:, [1, 4, 6]]).abs().max() < 1e-12
    # Cut again: slots keep the numbers of the whole model, and their order.
    two = smaller.at(smaller.budget("0.67"))
    assert two.config.kept == (1, 6) and two.runtime_metadata()["slots"] == [1, 6]
    assert two.runtime_metadata()["slots_sha256"] == slots_sha256([1, 6])


def test_budgets_are_those_that_differ():
    assert [budget.label for budget in Sparo(TINY).budgets()] == ["b1000", "b0500", "b0250"]
    one = Sparo(replace(TINY, slots=1))
    assert [budget.label for budget in one.budgets()] == ["b1000"]
    baseline = Sparo(FORMS["class token"])
    assert [budget.label for budget in baseline.budgets()] == ["b1000"]
    with pytest.raises(SaccadeError, match="no slots to leave out"):
        baseline.budget("0.5")


@torch.no_grad()
def test_what_stands_behind_the_end_of_a_text_does_not_count():
    model = model_of(TINY)
    tokens = torch.tensor([[1, 5, 6, 2, 0, 0, 0, 0], [1, 5, 6, 2, 9, 2, 7, 11]])
    pooled = model.encode_text(tokens)
    assert torch.equal(pooled.code[0], pooled.code[1])
    assert pooled.attention[:, :, 4:].abs().max() == 0
    assert pooled.attention[:, :, 3].min() > 0


@torch.no_grad()
def test_masks_change_the_image_code_alone(tmp_path):
    model = model_of(TINY)
    image, tokens = (next(iter(each.values())) for each in inputs_of(TINY).values())
    mask = np.linspace(0, 1, 8)
    chosen = selection(kind="slot", data="shapes", checkpoint_sha256="a" * 64, mask=mask)
    assert chosen["order"] == [7, 6, 5, 4, 3, 2, 1, 0]
    write_selection(tmp_path / "slots.json", chosen)
    masked = with_selection(model, read_selection(tmp_path / "slots.json"), "a" * 64)
    assert torch.equal(masked.encode_text(tokens).code, model.encode_text(tokens).code)
    code = model.encode_image(image).slots * torch.from_numpy(mask)[:, None]
    expected = torch.nn.functional.normalize(code.flatten(1), dim=-1)
    assert (masked.encode_image(image).code - expected).abs().max() < 1e-12
    assert masked.at(masked.budget("0.25")).config.kept == (6, 7)
    with pytest.raises(SaccadeError, match="selected for checkpoint aaaa"):
        with_selection(model, chosen, "b" * 64)
    with pytest.raises(SaccadeError, match="orders 2 slots"):
        with_selection(model, chosen | {"order": [0, 1]})


def test_slots_that_know_the_class_come_first():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 90)
    texts = rng.standard_normal((3, 2, 4, 6))
    images = rng.standard_normal((90, 4, 6))
    images[:, 2] += 4 * texts[labels].mean(1)[:, 2]
    order, accuracy = rank_slots(images, labels, texts)
    assert order[0] == 2 and accuracy[2] > 0.9 and accuracy[[0, 1, 3]].max() < 0.6


@pytest.mark.parametrize("kind", ["slot", "dimension"])
def test_trained_masks_turn_off_what_misleads(kind):
    rng = np.random.default_rng(0)
    images, positives, negatives = rng.standard_normal((3, 200, 4, 6))
    positives[:, 1] += 0.6 * images[:, 1]
    negatives[:, 3] += 0.6 * images[:, 3]
    order, _ = rank_by_negatives(images, positives, negatives)
    assert (order[0], order[-1]) == (1, 3)
    codes = images, positives, negatives
    _, before = train_masks(*codes, kind=kind, epochs=0)
    mask, after = train_masks(*codes, kind=kind, epochs=15)
    assert mask.shape == ((4,) if kind == "slot" else (4, 6))
    mean = mask.reshape(4, -1).mean(1)
    assert after > before + 0.15 and mean[1] > 0.8 and mean[3] < 0.2


def masks_by_hand(codes, kind, epochs, rate):
    """Masks as the paper prints them, in float64: every mask, and how many texts are told by it."""
    image, true, false = (torch.from_numpy(code) for code in codes)
    shape = image.shape[1:] if kind == "dimension" else (image.shape[1], 1)
    theta = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(math.log(100) + 1e-9, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([theta, alpha], lr=rate, momentum=0.9)
    between = unit_rows(true) - unit_rows(false)
    masks, accuracies = [], []
    for _ in range(epochs + 1):
        scale = max(100 * alpha**0, alpha.exp())
        mask = 1 / (1 + torch.exp(-scale * theta / 4))
        margin = (unit_rows(image * mask) * between).sum(1)
        masks.append(mask.detach().numpy().squeeze())
        accuracies.append(float((margin > 0).double().mean()))
        optimizer.zero_grad()
        torch.log1p(torch.exp(-scale * margin)).mean().backward()
        optimizer.step()
    return masks, accuracies


def unit_rows(codes):
    rows = codes.flatten(1)
    return rows / rows.norm(dim=1, keepdim=True)


def misled(far):
    """Images, true and false texts that slot 3 confuses: far apart, or so near that s grows."""
    images, positives, negatives = np.random.default_rng(0).standard_normal((3, 60, 4, 6))
    if far:
        positives[:, 1] += 0.6 * images[:, 1]
        negatives[:, 3] += 0.6 * images[:, 3]
    else:
        negatives = positives - 0.01 * images + 0.01 * negatives
        negatives[:, 3] += 0.03 * images[:, 3]
    return images, positives, negatives


@pytest.mark.parametrize(
    ("kind", "rate", "far"), [("slot", 0.02, True), ("dimension", 0.05, False)]
)
def test_masks_are_trained_as_printed(kind, rate, far):
    codes = misled(far)
    masks, accuracies = masks_by_hand(codes, kind, 6, rate)
    best = int(np.argmax(accuracies))
    assert best > 1, "the first steps cannot tell momentum and scale"
    mask, share = train_masks(*codes, kind=kind, epochs=6, learning_rate=rate)
    assert share == accuracies[best]
    np.testing.assert_allclose(mask, masks[best], atol=1e-5)


@pytest.mark.parametrize("masks", ["slot", "dimension"])
@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_a_mask_fits_the_codes_that_it_is_applied_to(kind, masks):
    """Whatever weighs the slots: what the fit says is what the masked model answers."""
    model = Sparo(replace(TINY, sparo_type=kind)).eval()
    model.image_pool.read_out.project.weight.mul_(6)  # slots of very different weight
    inputs = inputs_of(model.config, 120)
    image, tokens = inputs["image"]["image"], inputs["text"]["tokens"]
    true, false = tokens[:60].repeat(2, 1), tokens[60:].repeat(2, 1)

    def share(masked):
        code = masked.encode_image(image).code
        nearer = code * (masked.encode_text(true).code - masked.encode_text(false).code)
        return (nearer.sum(1) > 0).double().mean().item()

    codes = (model.encode_image(image), model.encode_text(true), model.encode_text(false))
    slots = [code.slots.numpy() for code in codes]
    with torch.enable_grad():
        mask, fit = train_masks(*slots, kind=masks, epochs=5)
        _, before = train_masks(*slots, kind=masks, epochs=0)
    chosen = selection(kind=masks, data="shapes", checkpoint_sha256="a" * 64, mask=mask)
    masked = with_selection(model, chosen)
    assert before == share(model)
    assert fit == share(masked) >= before
    half = masked.at(masked.budget("0.5"))
    kept = list(half.config.kept)
    code = (unit_code(codes[0].raw[:, kept], kind) * masked.slot_mask[kept]).flatten(1)
    expected = torch.nn.functional.normalize(code, dim=1)
    assert (half.encode_image(image).code - expected).abs().max() < 1e-6


def test_zero_shot_classes_are_means_of_their_prompts():
    codes = np.array([[[2.0, 0, 0], [0, 3.0, 0]], [[0, 0, 1.0], [0, 0, 5.0]]])
    classes = class_vectors(codes)
    half = 0.5**0.5
    assert np.allclose(classes, [[half, half, 0], [0, 0, 1]])
    assert np.allclose(zero_shot_logits(np.eye(3)[2:], classes, 10.0), [[0, 10]])
    seen = []
    encode_classes(lambda texts: seen.extend(texts) or np.ones((4, 3)), ["x", "y"], ["a {}", "{}"])
    assert seen == ["a x", "x", "a y", "y"]
    with pytest.raises(SaccadeError, match="0 places for the label"):
        encode_classes(lambda texts: codes, ["x"], ["a photo"])
    with pytest.raises(ShapeError, match="the same slots in both"):
        zero_shot_logits(np.ones((1, 2)), classes, 1.0)


def test_the_score_is_the_label_of_the_nearest_other_image():
    codes = np.array([[1, 0], [2, 0.1], [0, 1], [0.1, 3], [-1, 0.0]])
    arrays = {"labels": np.array([0, 0, 1, 1, 0])}
    assert nearest_neighbour({"embedding": codes}, arrays) == pytest.approx(0.8)


def test_runtime_metadata_is_enough_to_encode_texts():
    metadata = Sparo(TINY).runtime_metadata()
    tokens = encode_texts(metadata, ["a red circle", "a purple square"])
    assert tokens.tolist() == [[1, 4, 5, 8, 2, 0, 0, 0], [1, 4, 3, 9, 2, 0, 0, 0]]
    assert metadata["logit_scale"] == pytest.approx(1 / 0.07)
    with pytest.raises(SaccadeError, match="has no text tower"):
        encode_texts(Sparo(FORMS["images alone"]).runtime_metadata(), ["a"])


def test_a_component_becomes_a_graph():
    import onnxruntime as ort

    tracing = pytest.importorskip("saccade.exporter.graph.tracing")
    model = Sparo(FORMS["codebook"]).eval()
    folded = model.fold()
    inputs, component = inputs_of(model.config, 7)["text"], component_named(folded, "text")
    arrays = {name: value.numpy() for name, value in inputs.items()}
    names = (*component.outputs, *component.optional)
    proto = tracing.trace_component(folded, component, arrays, names)
    assert "Sparsemax" in {node.op_type for node in proto.graph.node}
    session = ort.InferenceSession(proto.SerializeToString())
    with torch.no_grad():
        expected = component_named(model, "text").run(**inputs)
    for count in (1, 7):
        actual = session.run(names, {name: array[:count] for name, array in arrays.items()})
        for name, value in zip(names, actual, strict=True):
            assert np.abs(value - expected[name][:count].numpy()).max() < 1e-5, name
