# SPDX-License-Identifier: Apache-2.0
"""ListOps: its grammar, its answers, its splits, and a NAC that starts to learn it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.runs import losses_of

from saccade.core.errors import SaccadeError
from saccade.models.data.listops import (
    VOCABULARY,
    Grammar,
    draw,
    listops,
    split_of,
    values_of,
)
from saccade.models.nac.training.listops import task
from saccade.models.training.options import TrainOptions

ANSWERS = {
    "[MAX 2 9 [MIN 4 7 ] 0 ]": 9,
    "[MIN 5 [SM 7 8 ] 6 ]": 5,
    "[SM 9 9 [MAX 1 4 ] ]": 2,
    "[MED 1 8 3 ]": 3,
    "[MED 4 5 4 5 ]": 4,
    "[MED [MED 0 9 ] [MED 0 1 ] 7 2 ]": 3,
}


def by_hand(words: list[str]) -> int:
    """The answer by recursion and numpy, another way than the one tested."""
    operator, arguments, rest = words.pop(0), [], words
    while rest[0] != "]":
        arguments.append(by_hand(rest) if rest[0].startswith("[") else int(rest.pop(0)))
    rest.pop(0)
    rules = {"[MIN": min, "[MAX": max, "[SM": lambda v: sum(v) % 10}
    return rules[operator](arguments) if operator in rules else int(np.median(arguments))


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(word) for word in text.replace("]", " ] ").split()]


def decode(tokens: list[int]) -> str:
    return " ".join(VOCABULARY[token] for token in tokens)


def test_answers_are_those_of_the_language() -> None:
    for text, answer in ANSWERS.items():
        assert values_of(encode(text))[-1] == answer and decode(encode(text)) == text
    drawn = listops("train", 200)
    for row, length, label in zip(drawn.characters, drawn.length, drawn.labels, strict=True):
        tokens = row[:length].tolist()
        assert by_hand(decode(tokens).split()) == label == values_of(tokens)[-1]
        assert not row[length:].any()
    assert drawn.values[0, drawn.length[0] - 1] == drawn.labels[0]
    assert ((drawn.values >= 0) == (drawn.characters == len(VOCABULARY) - 1)).all()


def depth_of(tokens: list[int]) -> int:
    inside = np.cumsum([(10 <= token < 14) - (token == 14) for token in tokens])
    return int(inside.max())


def test_expressions_keep_to_their_grammar() -> None:
    grammar = Grammar(max_tokens=40, depth=3, arguments=4)
    drawn = draw(np.random.default_rng(0), 300, grammar=grammar)
    rows = [row[:n].tolist() for row, n in zip(drawn.characters, drawn.length, strict=True)]
    assert max(map(len, rows)) <= 40 and drawn.length.min() >= 4
    assert max(map(depth_of, rows)) == 3
    assert np.ptp(np.bincount(drawn.characters[:, 0] - 10, minlength=4)) < 60
    lengths = listops("validation", 1000).length
    assert lengths.max() > 95 and 45 < lengths.mean() < 58


def test_splits_are_seeded_and_share_nothing() -> None:
    assert listops("test", 50).sha256 == listops("test", 50).sha256
    assert listops("test", 50).sha256 != listops("test", 50, seed=1).sha256
    small = Grammar(max_tokens=6, arguments=3)  # few expressions exist, so draws repeat
    seen = {}
    for split in ("train", "validation", "test"):
        drawn = listops(split, 400, grammar=small)
        rows = [row[:n].tolist() for row, n in zip(drawn.characters, drawn.length, strict=True)]
        assert all(split_of(row) == split for row in rows)
        seen[split] = {tuple(row) for row in rows}
        assert len(seen[split]) < 400
    assert not seen["train"] & seen["test"] and not seen["validation"] & seen["test"]
    assert not seen["train"] & seen["validation"]


@pytest.mark.parametrize("text", ("", "3", "[MAX 2 9", "[MAX ] ", "2 ]", "[MAX 1 ] [MIN 2 ]"))
def test_broken_expressions_are_refused(text: str) -> None:
    with pytest.raises(SaccadeError, match="listops:"):
        values_of(encode(text))


def test_what_is_no_listops_is_refused() -> None:
    with pytest.raises(SaccadeError, match="arguments is 11, expected at least 2 and at most 10"):
        Grammar(arguments=11)
    with pytest.raises(SaccadeError, match="split is 'all'"):
        listops("all")


def test_a_nac_learns_short_lists(tmp_path: Path) -> None:
    small = {"max_tokens": 8, "depth": 1, "arguments": 3, "modules": 8, "dim": 32, "ffn_dim": 48}
    options = TrainOptions(
        tmp_path / "listops.safetensors", data="listops", steps=60, batch=64, set=small
    )
    torch.manual_seed(0)
    learner = task(options)
    losses = losses_of(learner, 60, 3e-3)
    learner.finish()
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    majority = learner.card["majority"]
    assert learner.scores([1.0], most=500)["1"] > majority + 0.1
    saved = learner.saved()
    assert saved["calibration"]["characters"].shape == (512, 8)
    assert set(saved["calibration"]) == {"characters", "length", "labels"}
