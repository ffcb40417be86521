# SPDX-License-Identifier: Apache-2.0
"""VQA's normalization of answers, and its accuracy of ten, by hand."""

from itertools import combinations

import pytest

from saccade.models.scores.answers import kind_of, normalized, soft_scores, usual_answer


@pytest.mark.parametrize(
    ("answer", "form"),
    {
        "Yes.": "yes",
        "the Red  car": "red car",
        "A dog": "dog",
        "an": "",
        "Three": "3",
        "none": "0",
        "ten o'clock": "10 o'clock",
        "eleven": "eleven",
        "dont": "don't",
        "couldntve": "couldn't've",
        "couldn'tve": "couldn't've",
        "shed": "shed",
        "well": "well",
        "twas": "'twas",
        "1,000": "1000",
        "1,000 (about)": "1000 about",
        "black/white": "black white",
        "black / white": "black white",
        "black/ white": "black white",
        "t-shirt": "t shirt",
        "really?": "really",
        "2.5": "2.5",
        "2.": "2",
        "St. Paul": "st paul",
        "red\nblue\t": "red blue",
    }.items(),
)
def test_answers_are_compared_in_one_form(answer, form):
    assert normalized(answer) == form


@pytest.mark.parametrize(("same", "score"), ((1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)))
def test_accuracy_of_ten_is_the_mean_over_nine_of_them(same, score):
    said = ["red"] * same + [f"other {number}" for number in range(10 - same)]
    nine = [min(chosen.count("red") / 3, 1) for chosen in combinations(said, 9)]
    assert soft_scores(said)["red"] == pytest.approx(score) == pytest.approx(sum(nine) / 10)


@pytest.mark.parametrize(
    ("said", "scores"),
    (
        (["A red one"], {"red 1": 1}),
        (["red", "red"], {"red": 1}),
        (["red", "blue"], {"red": 0.5, "blue": 0.5}),
        (["red", "red", "blue"], {"red": 2 / 3, "blue": 1 / 3}),
    ),
)
def test_of_fewer_people_all_others_must_agree(said, scores):
    assert soft_scores(said) == pytest.approx(scores)


def test_forms_of_one_answer_count_together():
    assert soft_scores(["2", "two", "Two."] + ["3"] * 7)["2"] == pytest.approx(0.9)
    assert usual_answer(["three", "2", "two"]) == "2"


def test_kinds():
    assert [kind_of([text]) for text in ("Yes", "no.", "two", "2.5", "red", "2 dogs")] == [
        *("yes/no", "yes/no", "number", "number", "other", "other")
    ]
