# SPDX-License-Identifier: Apache-2.0
"""Scores of captions, classes and retrieval, against values worked out by hand."""

import math

import numpy as np
import pytest

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.scores.attention import repetition
from saccade.models.scores.captions import bleu4, cider, rouge_l
from saccade.models.scores.classification import (
    correct,
    dino_probe_predict,
    knn_predict,
    probe_predict,
)
from saccade.models.scores.results import bootstrap, bootstrap_of, paired_bootstrap, wilson
from saccade.models.scores.retrieval import cosines, ranks, recalls

CAPTIONS = ["a red circle", "a blue square left of a cross", "two birds"]
REFERENCES = [
    ["a red circle", "a circle"],
    ["a blue square left of a red cross", "a cross right of a blue square"],
    ["a green triangle"],
]


def test_bleu_4_by_hand():
    actual, known = "the cat sat on the mat", ["the cat sat on a mat", "the cat is on the mat"]
    # 1-grams 6/6 (the: at most 2), 2-grams 5/5, 3-grams the cat sat, cat sat on, on the mat of 4,
    # 4-grams the cat sat on of 3; the lengths agree.
    expected = (1 * 1 * 3 / 4 * 1 / 3) ** 0.25
    assert bleu4([actual], [known]) == pytest.approx(expected)
    # A word said twice counts once where no reference has it twice, however many have it.
    twice = bleu4(["a b c d a"], [["a b c d e", "a x y z w"]])
    assert twice == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    shorter = bleu4(["the cat sat on"], [["the cat sat on the mat"]])
    assert shorter == pytest.approx(math.exp(1 - 6 / 4))
    assert bleu4(["a b c"], [["a b c"]]) == 0, "there is no 4-gram, and nothing is smoothed"


def test_cider_d_by_hand():
    captions, references = ["a b", "c d"], [["a b"], ["c e f"]]
    # Every n-gram is in one image of two. First: the same text; it has no 3- and 4-grams, which
    # count 0. Second: one word of two against one of three, one word less.
    first = 10 * (1 + 1) / 4
    second = 10 * (1 / (math.sqrt(2) * math.sqrt(3))) * math.exp(-1 / 72) / 4
    np.testing.assert_allclose(cider(captions, references), (first, second))
    # Clipping: a word said three times counts once where the reference has it once.
    repeated = cider(["a a a", "c"], [["a"], ["d"]])[0]
    assert repeated == pytest.approx(10 * (1 / 3) * math.exp(-4 / 72) / 4)


def test_repetition_is_free_as_often_as_in_the_reference_that_has_it_most():
    said = ["a", "b", "a", "b"]
    assert repetition(said, [["a", "b"], ["a", "b"]]) == pytest.approx(100 * 1 / 2)
    doubled = ["a", "red", "red"]
    assert repetition(doubled, [doubled]) == 0
    assert repetition(doubled, [["a", "red", "b"]]) == pytest.approx(100 * 2 / 3)


def test_foreground_index_by_hand():
    true, actual = np.array([[0, 1, 1, 2, 2]]), np.array([[7, 1, 3, 2, 2]])
    # Of 12 ordered pairs the objects join 4, the segments 2, both 2; 4 * 2 / 12 by chance.
    expected = (2 - 2 / 3) / (3 - 2 / 3)
    assert adjusted_rand_index(true, actual, foreground=True)[0] == pytest.approx(expected)


def test_rouge_l_by_hand():
    (score,) = rouge_l(["a b c d"], [["a c d e f", "x b"]])
    precision, recall = 3 / 4, 3 / 5
    assert score == pytest.approx(2.44 * precision * recall / (recall + 1.44 * precision))
    assert rouge_l(["x"], [["y"]])[0] == 0


def test_caption_scores_agree_with_the_fields_own_code():
    theirs = pytest.importorskip("pycocoevalcap.cider.cider", reason="pip install pycocoevalcap")
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.rouge.rouge import Rouge

    truth, said = dict(enumerate(REFERENCES)), {i: [text] for i, text in enumerate(CAPTIONS)}
    np.testing.assert_allclose(
        cider(CAPTIONS, REFERENCES), theirs.Cider().compute_score(truth, said)[1]
    )
    np.testing.assert_allclose(rouge_l(CAPTIONS, REFERENCES), Rouge().compute_score(truth, said)[1])
    corpus = Bleu(4).compute_score(truth, said, verbose=0)[0][3]
    assert bleu4(CAPTIONS, REFERENCES) == pytest.approx(corpus)


def test_caption_scores_do_not_see_case_and_punctuation():
    assert bleu4(["A red circle, left."], [["a red circle left"]]) == 1
    for score in (bleu4, cider, rouge_l):
        with pytest.raises(SaccadeError, match="1 of them empty"):
            score(["a"], [[]])


def test_top_k_counts_equal_logits_against_the_label():
    logits = np.array([[3.0, 2, 1], [1, 1, 0], [0, np.nan, 2]])
    labels = np.array([1, 0, 1])
    assert correct(logits, labels).tolist() == [False, False, False]
    assert correct(logits, labels, top=2).tolist() == [True, True, False]
    with pytest.raises(ShapeError, match="one row"):
        correct(logits, labels[:2])


def test_nearest_neighbours_vote_with_their_similarity():
    known = np.array([[1.0, 0], [0.8, 0.6], [0.8, -0.6]])
    labels = np.array([0, 1, 1])
    asked = np.array([[2.0, 0]])
    # exp(1 / 0.07) is 17 times exp(0.8 / 0.07); at temperature 1 the two of class 1 win.
    assert knn_predict(known, labels, asked).tolist() == [0]
    assert knn_predict(known, labels, asked, temperature=1).tolist() == [1]
    assert knn_predict(known, labels, asked, k=1, temperature=1).tolist() == [0]


def test_nearest_neighbours_are_twenty_at_temperature_0_07_unless_told():
    def turned(angles):
        return np.stack([np.cos(angles), np.sin(angles)], 1)

    asked, steps = turned([0.0]), 1e-3 * np.arange(1, 41)
    labels = np.repeat([0, 1, 0], [9, 11, 20])
    assert knn_predict(turned(steps), labels, asked).tolist() == [1], "11 of the first 20"
    # One at cosine 1 against twelve at 0.8: exp(0.2 / 0.07) is 17.4, exp(0.2 / 0.1) only 7.4.
    known = turned(np.arccos([1.0] + [0.8] * 12))
    assert knn_predict(known, np.array([0] + [1] * 12), asked).tolist() == [0]


@pytest.mark.parametrize("method", ["logistic", "adamw"])
def test_linear_probe_separates_what_is_linear(method):
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((300, 5)) * (1, 10, 1e-3, 1, 0)
    labels = (codes[:, 1] > 0).astype(np.int64)
    parts = codes[:150], labels[:150], codes[150:200], labels[150:200]
    predicted, penalty = probe_predict(*parts, codes[200:], method=method)
    assert np.mean(predicted == labels[200:]) > 0.95 and 1e-6 <= penalty < 1e6
    with pytest.raises(SaccadeError, match="one class"):
        probe_predict(codes, np.zeros(300, np.int64), codes, labels, codes, method=method)


def test_linear_probes_take_the_steps_of_their_papers(monkeypatch):
    import torch

    seen = []

    def counted(kind):
        class StepCounter(kind):
            def step(self):
                (group,) = self.param_groups
                seen.append((group["lr"], group["weight_decay"], group.get("momentum")))
                super().step()

        return StepCounter

    for name in ("AdamW", "SGD"):
        monkeypatch.setattr(torch.optim, name, counted(getattr(torch.optim, name)))
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((150, 4))
    labels = (codes[:, 1] > 0).astype(np.int64)
    probe_predict(codes, labels, codes[:20], labels[:20], codes, method="adamw")
    # Three batches of 64 in each of 10 epochs, the rate along half a cosine; 170 codes at the end.
    rates = [rate for rate, _, _ in seen[:30]]
    np.testing.assert_allclose(rates, 0.05 * (1 + np.cos(np.pi * np.arange(30) / 30)))
    assert len(seen) % 30 == 0 and len(seen) <= 30 * (7 + 8 + 1)
    assert [seen[30 * trial][1] for trial in range(7)] == pytest.approx(np.logspace(-6, 2, 7))
    seen.clear()
    found = dino_probe_predict(codes, labels, codes)
    rates = 0.00025 * (1 + np.cos(np.pi * np.arange(100) / 100))
    np.testing.assert_allclose(seen, [(rate, 0, 0.9) for rate in rates for _ in range(2)])
    assert np.mean(found == labels) > 0.7


def test_retrieval_both_ways():
    images = np.eye(3)
    texts = np.array([[1.0, 0, 0], [0.9, 0.1, 0], [0.6, 0.5, 0], [0, 0, 1]])
    image_of = np.array([0, 0, 1, 2])
    similarity = cosines(images, texts)
    assert ranks(similarity, [{0, 1}, {2}, {3}]).tolist() == [1, 1, 1]
    assert ranks(similarity.T, image_of).tolist() == [1, 1, 2, 1]
    assert recalls(images, texts, image_of)["image_r1"] == 0.75
    # Four texts of another image go before the right one, which is fifth.
    fifth = recalls(np.eye(2), np.array([[1, 0.1]] * 4 + [[1, 0.5]]), np.array([1] * 4 + [0]))
    assert (fifth["text_r1"], fifth["text_r5"]) == (0, 1)
    same = recalls(np.ones((8, 2)), np.ones((8, 2)))
    assert set(same.values()) == {0.0}, "codes that are all equal find nothing"
    assert (ranks(np.full((2, 2), np.nan), np.array([0, 1])) > 1).all()
    assert ranks(similarity, [{0}, set(), {3}])[1] == 5
    with pytest.raises(ShapeError, match="one answer"):
        ranks(similarity, image_of)
    with pytest.raises(SaccadeError, match="columns"):
        ranks(similarity, np.array([0, 1, 4]))


def test_wilson_interval():
    # The example of the literature: 81 of 263, 0.2553 to 0.3662.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 10)[0] == 0
    with pytest.raises(SaccadeError, match="3 of 2"):
        wilson(3, 2)


def test_bootstrap_intervals():
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = bootstrap(values, 0)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)
    assert bootstrap(values, 0) == (low, high) != bootstrap(values, 1)
    other = values + 0.1 + 0.01 * np.sin(np.arange(400))
    low, high = paired_bootstrap(other, values)
    assert 0.09 < low < 0.1 < high < 0.11, "the pairs' common noise is gone"
    assert bootstrap_of(lambda rows: float(values[rows].mean()), 400, samples=500) == pytest.approx(
        bootstrap(values), abs=0.05
    )
    with pytest.raises(ShapeError, match="equal length"):
        paired_bootstrap(values, values[:3])
    with pytest.raises(ShapeError, match="finite"):
        bootstrap(np.array([1.0, np.nan]))
