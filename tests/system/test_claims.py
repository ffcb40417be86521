# SPDX-License-Identifier: Apache-2.0
"""The claims of the papers: verdicts follow from intervals, and the page from recipes and runs."""

import sys
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from places import ROOT

from saccade.models.data.shapes import scenes
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.models.sparo.config import PRESETS
from saccade.models.sparo.model import Sparo
from saccade.models.training.options import TrainOptions, check_fields

with mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):
    recipes, page, claims, measures, data, heads = (
        import_module(f"claim{name}")
        for name in ("_recipes", "_page", "s", "_measures", "_data", "_heads")
    )

AROUND_TWO = (1.0, 2.0, 3.0, 2.0, 2.0)  # the interval is 2 +- 0.88


def claim(**fields):
    usual = {"text": "A beats B", "place": "table 1", "experiment": "pair", "first": "a"}
    return recipes.Claim(**usual | {"score": "test: top-1"} | fields)


def paper(runs=(), **fields):
    experiment = recipes.Experiment(
        "nac", "small", {"a": {"steps": 2}, "b": {}}, {"test": {"task": "top1"}}, {"data": "digits"}
    )
    found = recipes.Paper("p", "P", {"pair": experiment}, (claim(**fields),), {})
    for arm, seed, score in runs:
        scores = {"test: top-1": score, "half: top-1": score / 2}
        origin = {"device": "a machine", "date": "2026-11-29", "commit": "0123456789"}
        known = {"settings": experiment.settings(arm), "scores": scores} | origin
        found.runs[f"pair/{arm}/{seed}"] = known
    return found


@pytest.mark.parametrize(
    ("bound", "verdict"),
    [
        ({"above": 0.0}, "shown"),
        ({"above": 1.5}, "not shown"),
        ({"above": 3.0}, "opposite"),
        ({"above": -0.5}, "shown"),
        ({"below": 0.0}, "opposite"),
        ({"below": 2.5}, "not shown"),
        ({"below": 3.0}, "shown"),
    ],
)
def test_the_interval_decides_the_verdict(bound, verdict):
    assert claim(**bound).verdict(AROUND_TWO) == verdict


def test_the_interval_is_students():
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(0).normal(size=5)
    expected = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))
    np.testing.assert_allclose(recipes.interval(values), expected, rtol=1e-3)


def test_differences_are_paired_by_seed():
    runs = [("a", seed, 0.1 * seed + 0.02) for seed in range(5)]
    runs += [("b", seed, 0.1 * seed) for seed in reversed(range(5))]
    tried = paper(runs, second="b", above=0.0)
    np.testing.assert_allclose(tried.values(tried.claims[0]), [0.02] * 5)
    assert tried.verdict(tried.claims[0]) == "shown"


def test_a_change_is_a_score_minus_another_of_the_same_run():
    tried = paper([("a", 0, 0.8), ("b", 0, 0.4)], second="b", minus="half: top-1", above=0.0)
    np.testing.assert_allclose(tried.values(tried.claims[0]), [0.4 - 0.2])


def test_a_claim_has_no_verdict_before_all_seeds_are_finished():
    tried = paper([("a", seed, 0.9) for seed in range(4)], above=0.0)
    assert tried.verdict(tried.claims[0]) == recipes.NOT_RUN
    assert "| 4 of 5 | not run |" in page.section(tried)


def test_what_a_recipe_changes_runs_again():
    tried = paper([("a", seed, 0.9) for seed in range(5)], above=0.0)
    assert list(tried.missing("pair")) == [("b", seed) for seed in range(5)]
    assert list(tried.missing("pair", "a")) == []
    tried.experiments["pair"].train["data"] = "digits-sum"
    assert len(list(tried.missing("pair", "a"))) == 5


def test_a_start_is_part_of_the_settings_and_not_scored():
    arms = {"start": {"steps": 3}, "tuned": {"init": "start"}}
    tried = recipes.Experiment("nac", "small", arms, {})
    before = tried.settings("tuned")
    assert tried.scored == ("tuned",)
    arms["start"]["steps"] = 4
    assert tried.settings("tuned") != before


def test_a_shipped_checkpoint_is_a_start_too(tmp_path, monkeypatch):
    arms = {"tuned": {"init": "shipped:digits-sum"}}
    tried = recipes.Experiment("nac", "small", arms, {})
    given = []
    monkeypatch.setattr(claims, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(claims, "train", lambda family, options, progress: given.append(options))
    claims.checkpoint(tried, "tuned", 3)
    assert [(str(one.init), one.seed) for one in given] == [("shipped:digits-sum", 3)]
    assert tried.scored == ("tuned",)


def test_an_interrupted_run_keeps_what_is_finished(tmp_path, monkeypatch):
    tried = paper(above=0.0)
    out = tmp_path / "claims_p.json"

    def scores(experiment, arm, seed):
        if seed == 2:
            raise KeyboardInterrupt
        return {"test: top-1": 0.5 + seed}

    monkeypatch.setattr(claims, "scores", scores)
    monkeypatch.setattr(claims, "result_path", lambda name: out)
    with pytest.raises(KeyboardInterrupt):
        for arm, seed in tried.missing("pair", "a"):
            claims.run(tried, "pair", arm, seed)
    kept = recipes.parse_runs(out)
    assert sorted(kept) == ["pair/a/0", "pair/a/1"]
    assert {"commit", "date", "device", "load_average", "settings"} <= set(kept["pair/a/0"])
    assert list(tried.missing("pair", "a")) == [("a", 2), ("a", 3), ("a", 4)]


def test_small_digits_are_in_one_quadrant_and_large_ones_fill_the_canvas():
    small, large = (data._single_digits(large=large)["test_images"] for large in (False, True))
    assert small.shape == large.shape == (len(small), 24, 24, 1)
    inked = small.reshape(-1, 2, 12, 2, 12).any((2, 4)).sum((1, 2))
    assert (inked == 1).all()
    blocks = large.reshape(-1, 8, 3, 8, 3)
    assert (blocks == blocks[:, :, :1, :, :1]).all()


def test_reviews_say_what_their_labels_say():
    made = data._reviews()
    judged = dict.fromkeys(("good", "fine", "great", "warm"), 1)
    for row in range(50):
        text = bytes(made["bytes"][row, : made["lengths"][row]]).decode()
        good = [judged.get(part.split()[-1], 0) ^ (" not " in part) for part in text.split("; ")]
        assert len(good) == 3
        assert (sum(good) > 1) == made["labels"][row]


def test_circuits_are_compared_by_kind(tmp_path, monkeypatch):
    path = tmp_path / "statements.npz"
    condition = data._statements()["condition"][:40]
    np.savez(path, condition=condition, split=np.full(40, "test"))
    model = mock.MagicMock(config=SimpleNamespace(epsilon=0.25))
    model.build.return_value.eval.return_value = model
    monkeypatch.setattr(measures, "load", lambda path: model)
    monkeypatch.setattr(measures, "made_data", lambda name: path)
    kind = torch.from_numpy(condition).amax(1)[:, :8].argmax(1) // 2

    def signatures(angle):
        return torch.stack([torch.ones(40), angle.float()], 1).unflatten(1, (1, 2)).repeat(1, 2, 1)

    for angle, expected in ((kind, 1.0), (torch.arange(40) / 40, None)):  # neighbors of any kind
        rows = signatures(angle)
        rows[:, 1] = torch.tensor([1.0, 0.0])  # what the other module's is compared with
        monkeypatch.setattr(
            measures, "generate", lambda *given, rows=rows: SimpleNamespace(signatures=rows)
        )
        found = measures.circuits(path, samples=40)["same kind"]
        assert found == expected if expected else found < 0.6


def test_the_page_is_what_the_command_writes():
    """Fails after a run or a change of a recipe: `python benchmarks/claims.py page` then."""
    text = page.PAGE.read_text()
    assert page.filled(text, recipes.papers()) == text


@pytest.mark.parametrize("name", recipes.papers())
def test_recipes_name_fields_and_scores(name):
    tried = recipes.papers()[name]
    for key, experiment in tried.experiments.items():
        entry = entry_of(experiment.family)
        config = type(next(iter(imported(entry.presets).values())))
        for arm in experiment.arms:
            given = experiment.training(arm)
            if experiment.trainer:
                signature(claims.TRAINERS[experiment.trainer]).bind(ROOT / "x", seed=0, **given)
            else:
                TrainOptions(out=ROOT / "x", **given)
            check_fields(config, given["set"], (*entry.settings, "positions", "side_px"))
            known = tried.finished(key, arm, 0)
            asked = {c.score for c in tried.claims if c.experiment == key and arm in c.arms}
            assert known is None or asked <= set(known["scores"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "bound"),
        ({"above": 0.0, "below": 1.0}, "bound"),
        ({"above": 0.0, "second": "c"}, "unknown arm c"),
        ({"above": 0.0, "needs": "ImageNet"}, "reason"),
        ({"experiment": "", "first": ""}, "reason"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        recipes.check(SimpleNamespace(), claim(**fields), paper(above=0.0).experiments)


def test_words_belong_to_the_one_object_that_they_describe():
    drawn = scenes("test", 60, side_px=48)
    things = drawn.objects[0]
    one = next(i for i, thing in enumerate(things) if sum(t == thing for t in things) == 1)
    said = f"{things[one].size} {things[one].texture} {things[one].colour} {things[one].shape}"
    found = list(measures.described(drawn, 0, f"a {said} and a {said}"))
    assert found == [(one, slice(1, 5))]
    assert list(measures.described(drawn, 0, "a object above a object")) == []
    assert list(measures.described(drawn, 0, "a red")) == []


def test_attention_on_an_object_counts_its_pixels():
    rng = np.random.default_rng(0)
    mask, maps = rng.random((12, 8)) < 0.4, rng.random((3, 4, 2))
    pixels = maps.repeat(3, axis=1).repeat(4, axis=2)
    expected = (pixels * mask).sum((1, 2)) / pixels.sum((1, 2))
    np.testing.assert_allclose(measures.attention_on(mask, maps), expected)


def test_made_digits_share_no_image_between_splits():
    made = data._digits_of(6, 9)
    assert set(np.unique(made["train_labels"])) == {0, 1, 2, 3}
    train = {image.tobytes() for image in made["train_images"]}
    assert not train & {image.tobytes() for image in made["test_images"]}
    shifted = data._shifted_digits()
    assert (shifted["images"][-599:] == 255 - np.asarray(data.digits("test")[0])).all()


@pytest.mark.parametrize(
    ("arm", "changed"),
    [
        (("separate", "slot", "slot"), 1),
        (("multi", "slot", "slot"), 8),
        (("separate", "whole", "slot"), 8),
        (("separate", "slot", "whole"), 8),
    ],
)
def test_only_separate_heads_with_slot_wise_layers_keep_slots_apart(arm, changed):
    with heads.read_out(dict(zip(("heads", "norm", "projection"), arm, strict=True))):
        model = Sparo(PRESETS["sparo-tiny"]).eval()
        folded = model.fold()
    image = torch.rand(2, 16, 16, 3, generator=torch.Generator().manual_seed(0)) * 255
    with torch.no_grad():
        before = model.encode_image(image).slots
        assert torch.allclose(before, folded.encode_image(image).slots, atol=1e-5)
        model.image_pool.read_out.read_out.query[3] *= -5
        after = model.encode_image(image).slots
    assert int(((before - after).abs().amax((0, 2)) > 1e-5).sum()) == changed
    assert not hasattr(Sparo(PRESETS["sparo-tiny"]).image_pool.read_out, "mix")


def test_a_read_out_is_part_of_the_settings():
    arms = {"a": {"read_out": {"heads": "multi"}}, "b": {}}
    tried = recipes.Experiment("sparo", "small", arms, {})
    assert tried.settings("a") != tried.settings("b")
    assert tried.training("a") == tried.training("b")


def test_a_slot_leads_where_it_attends_to_the_object_that_it_attends_to_in_the_sentence(
    monkeypatch,
):
    config = SimpleNamespace(height_px=40, pooling="sparo")
    model = SimpleNamespace(config=config)
    model.build = model.eval = lambda: model

    def attention(model, images, texts):
        drawn = scenes("test", len(images), side_px=40)
        maps, words = np.zeros((len(images), 4, 40, 40)), np.zeros((len(images), 4, 30))
        for index, text in enumerate(texts):
            for owner, said in measures.described(drawn, index, text):
                maps[index] += drawn.masks[index] == owner + 1
                words[index, :, said] += 0.5
            maps[index, 3] = 1 - maps[index, 3]  # looks elsewhere
        words[:, 1] = 0  # reads none of the words
        cosines = np.full(maps.shape[:2], 0.9)
        cosines[:, 2] = 0.7
        return maps + 1e-9, words, cosines

    monkeypatch.setattr(measures, "load", lambda path: model)
    monkeypatch.setattr(measures, "slot_attention", attention)
    scores = measures.concepts("x", scenes=64)
    assert scores["aligned"] == 0.5  # the first slot, and the last one
    assert scores["lead of all slots"] > 0
    monkeypatch.setattr(measures, "ALIKE", 0.95)
    assert measures.concepts("x", scenes=64) == {
        "aligned": 0.0,
        "lead of aligned slots": 0.0,
        "lead of all slots": scores["lead of all slots"],
    }


def test_shapes_of_a_size_are_separate():
    for least, most in ((1.1, 1.6), (1.6, 2.6), (2.8, 3.5)):
        made = data._sized_scenes(least, most, train=8)
        masks = made["test_masks"]
        assert {tuple(np.unique(mask)) for mask in masks} == {(0, 1, 2, 3)}
        for axis in (1, 2):
            one, other = np.moveaxis(masks, axis, 0)[:-1], np.moveaxis(masks, axis, 0)[1:]
            assert not ((one != other) & (one > 0) & (other > 0)).any()
        sizes = np.sqrt([(masks == i).sum((1, 2)) for i in (1, 2, 3)])
        assert least < sizes.mean() < 2 * most
