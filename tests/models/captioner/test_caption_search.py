# SPDX-License-Identifier: Apache-2.0
"""Greedy and beam search on languages small enough to list every sentence."""

from itertools import product

import numpy as np
import pytest

from saccade.models.captioner.caption_search import (
    WrongSearch,
    beam_search,
    best_captions,
    check_search,
    greedy_search,
)


def table_step(rows):
    """A language whose next word depends on the last one: log-probabilities by token."""
    logs = np.log(np.array(rows))

    def step(token, state):
        return logs[token], np.zeros((len(token), 1, 1)), {"last": token}

    return step


def every_caption(rows, end, start, length):
    by_tokens = {}
    for count in range(length):
        for words in product([i for i in range(len(rows)) if i != end], repeat=count):
            steps = list(zip((start, *words), (*words, end), strict=True))
            by_tokens[words] = sum(np.log(rows[a][b]) for a, b in steps)
    return by_tokens


def test_a_wide_beam_finds_the_likeliest_captions():
    rng = np.random.default_rng(3)
    rows = rng.dirichlet((0.5, 0.5, 0.5, 0.8), 4)
    known = every_caption(rows, end=3, start=0, length=5)
    best = max(known.values())
    state = {"last": np.zeros(1, np.int64)}
    captions = beam_search(table_step(rows), state, start=0, end=3, beam=60, max_length=5)
    assert captions[0].score == pytest.approx(best) and captions[0].ended
    assert captions[0].tokens == max(known, key=known.get)
    for caption in captions:
        assert caption.score == pytest.approx(known[caption.tokens])
    assert [caption.score for caption in captions] == sorted(
        (e.score for e in captions), reverse=True
    )


def test_beam_beats_greedy_where_the_first_word_misleads():
    rows = [[0.0001, 0.55, 0.4499], [0.4, 0.3, 0.3], [0.001, 0.001, 0.998]]
    step, state = table_step([*rows]), {"last": np.zeros(1, np.int64)}
    # Start 0, end 2 from 0 has 0.4499; through 1 it has at most 0.55 * 0.3.
    options = {"start": 0, "end": 2, "max_length": 4}
    (greedy,) = greedy_search(step, state, **options)
    (one,) = beam_search(step, state, beam=1, **options)
    assert greedy.tokens == one.tokens and greedy.tokens[0] == 1
    assert greedy.score == pytest.approx(one.score)
    best = beam_search(step, state, beam=2, **options)[0]
    assert best.tokens == () and best.score == pytest.approx(np.log(0.4499))
    assert best.attention.shape == (0, 1, 1)


def test_ties_and_the_length_limit_are_deterministic():
    step, state = table_step(np.full((4, 4), 0.25)), {"last": np.zeros(2, np.int64)}
    options = {"start": 3, "end": 3, "max_length": 3}
    captions = greedy_search(step, state, **options)
    assert [caption.tokens for caption in captions] == [(0, 0, 0)] * 2 and not captions[0].ended
    state = {"last": np.zeros(1, np.int64)}
    found = beam_search(step, state, beam=2, **options)
    assert [each.tokens for each in found] == [(0, 0, 0), (0, 0, 1)] and not found[0].ended


def test_wrong_searches_are_refused():
    fits = {"beam": 1, "max_length": 5, "end": 2, "longest": 8, "vocabulary": 4}
    check_search(**fits)
    for wrong in ({"beam": 0}, {"beam": 1.5}, {"beam": True}, {"max_length": 9}, {"end": 4}):
        with pytest.raises(WrongSearch, match=f"{next(iter(wrong))} is "):
            check_search(**fits | wrong)
    with pytest.raises(WrongSearch, match="NaN"):
        greedy_search(
            table_step([[np.nan]]), {"last": np.zeros(1, int)}, start=0, end=0, max_length=1
        )


def test_images_searched_together_end_one_by_one():
    rows = np.log([[[0.1, 0.1, 0.8]] * 3, [[0.1, 0.8, 0.1], [0.05, 0.05, 0.9], [0.3, 0.4, 0.3]]])

    def step(token, state):
        return rows[state["image"], token], np.ones((len(token), 1, 1)), state

    options = {"start": 0, "end": 2, "max_length": 5}
    state = {"image": np.arange(2)}
    for captions in (
        greedy_search(step, state, **options),
        best_captions(step, state, beam=2, **options),
    ):
        assert [caption.tokens for caption in captions] == [(), (1,)]
        assert [caption.score for caption in captions] == pytest.approx(np.log([0.8, 0.8 * 0.9]))
        assert [len(caption.attention) for caption in captions] == [0, 1]


def test_a_hypothesis_that_ends_leaves_its_place_to_the_next_one():
    # Start 0, end 3: ending at once is the second best, and 2 the third and sure to end.
    rows = [[0.001, 0.4, 0.298, 0.301], [0.3, 0.2, 0.0, 0.5], [0.0, 0.0, 0.001, 0.999], [0.25] * 4]
    step, state = table_step(np.maximum(rows, 1e-9)), {"last": np.zeros(1, np.int64)}
    captions = beam_search(step, state, start=0, end=3, beam=2, max_length=4)
    assert [caption.tokens for caption in captions] == [(), (2,)]
    assert [caption.score for caption in captions] == pytest.approx(np.log([0.301, 0.298 * 0.999]))
