# SPDX-License-Identifier: Apache-2.0
"""Greedy and beam search over a captioner's step (numpy only; the router runs this file)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

State = dict[str, np.ndarray]
# Tokens [n] int64 and the state of n hypotheses -> log-probabilities [n v], attention [n h w], and
# the next state. The first axis of every state array counts the hypotheses.
Step = Callable[[np.ndarray, State], tuple[np.ndarray, np.ndarray, State]]

MOST_BEAMS = 64
SPECIAL = 4  # tokens before the first word: padding, start, end, unknown


class WrongSearch(ValueError):
    """A search was requested with unusable values; the message names them."""


@dataclass(frozen=True)
class SearchedCaption:
    """A caption: its words as tokens, without start and end.

    Shapes: attention [t h w], the map at each word.
    Units:  score is the sum of the natural log-probabilities, including the end token's.
    """

    tokens: tuple[int, ...]
    score: float
    ended: bool  # False: cut at the length limit
    attention: np.ndarray


def sentence(caption: SearchedCaption, words: Sequence[str]) -> str:
    """Join the words of a caption with spaces; tokens that are not words become `?`."""
    tokens = [token - SPECIAL for token in caption.tokens]
    return " ".join(words[token] if token >= 0 else "?" for token in tokens)


def check_search(*, beam: int, max_length: int, end: int, longest: int, vocabulary: int) -> None:
    """Check that the search settings are in the model's range.

    Units:  max_length and longest in words; `longest` is the longest caption in training.
    Raises: WrongSearch if one is not.
    """
    limits = {
        "beam": (beam, 1, MOST_BEAMS, "The beam is the number of hypotheses to keep."),
        "max_length": (max_length, 1, longest, "The model was not trained on longer captions."),
        "end": (end, 0, vocabulary - 1, "It has to be a token of the vocabulary."),
    }
    for name, (value, low, high, reason) in limits.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or not low <= value <= high:
            raise WrongSearch(
                f"{name} is {value!r}, expected a whole number from {low} to {high}. {reason}"
            )


def step_of(run: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> Step:
    """Return a step that calls a captioner's `step` component with named arrays."""

    def step(token: np.ndarray, state: State) -> tuple[np.ndarray, np.ndarray, State]:
        answer = run({**state, "token": token})
        following = {**state, "h": answer["next_h"], "c": answer["next_c"]}
        return answer["log_probabilities"], answer["attention"], following

    return step


def best_captions(
    step: Step, state: State, *, beam: int, start: int, end: int, max_length: int
) -> list[SearchedCaption]:
    """Return the best caption of each image; a beam of 1 is the greedy search over all images.

    Shapes: state arrays [n ...], one row per image -> n captions.
    Raises: WrongSearch if a log-probability is not a number.
    """
    if beam == 1:
        return greedy_search(step, state, start=start, end=end, max_length=max_length)
    rows = range(len(next(iter(state.values()))))
    images = [{name: value[row : row + 1] for name, value in state.items()} for row in rows]
    tokens = {"start": start, "end": end, "max_length": max_length}
    return [beam_search(step, image, beam=beam, **tokens)[0] for image in images]


def greedy_search(
    step: Step, state: State, *, start: int, end: int, max_length: int
) -> list[SearchedCaption]:
    """Choose the likeliest token at each position, for many images; ties go to the lowest token.

    Shapes: state arrays [n ...], one row per image -> n captions.
    Raises: WrongSearch if a log-probability is not a number.
    """
    count = len(next(iter(state.values())))
    token = np.full(count, start, dtype=np.int64)
    words, maps = [], []
    scores, lengths = np.zeros(count), np.full(count, max_length)
    going = np.ones(count, dtype=bool)
    for place in range(max_length):
        logs, attention, state = step(token, state)
        token = _checked(logs).argmax(1).astype(np.int64)
        scores += np.where(going, logs[np.arange(count), token], 0.0)
        lengths[going & (token == end)] = place
        going &= token != end
        words.append(token)
        maps.append(attention)
        if not going.any():
            break
    tokens, attentions = np.stack(words, 1), np.stack(maps, 1)
    return [
        SearchedCaption(
            tuple(int(token) for token in tokens[i, : lengths[i]]),
            float(scores[i]),
            not going[i],
            attentions[i, : lengths[i]],
        )
        for i in range(count)
    ]


def beam_search(
    step: Step, state: State, *, start: int, end: int, beam: int, max_length: int
) -> list[SearchedCaption]:
    """Return the likeliest captions of one image that a beam finds, best first, at most `beam`.

    Each round keeps the `beam` best unfinished hypotheses. A hypothesis may only end among the
    `beam` best continuations, so a beam of 1 is the greedy search. The search stops when no
    hypothesis can still beat the best finished one, or at the length limit. Only if nothing has
    finished, the cut hypotheses are returned. Ties go to the better earlier hypothesis, then to
    the lower token.
    Shapes: state arrays [1 ...].
    Raises: WrongSearch if a log-probability is not a number.
    """
    live: list[dict[str, Any]] = [{"tokens": (), "score": 0.0, "maps": ()}]
    finished: list[dict[str, Any]] = []
    token = np.full(1, start, dtype=np.int64)
    for _ in range(max_length):
        logs, attention, state = step(token, state)
        totals = np.array([beam_state["score"] for beam_state in live])[:, None] + _checked(logs)
        following: list[dict[str, Any]] = []
        parents: list[int] = []
        for rank, flat in enumerate(_best(totals.ravel(), 2 * beam)):
            parent, word = divmod(int(flat), totals.shape[1])
            score = float(totals[parent, word])
            if word == end:
                finished += [{**live[parent], "score": score}] if rank < beam else []
            elif len(following) < beam:
                maps = (*live[parent]["maps"], attention[parent])
                tokens = (*live[parent]["tokens"], word)
                following.append({"tokens": tokens, "score": score, "maps": maps})
                parents.append(parent)
        live = following
        best = max((beam_state["score"] for beam_state in finished), default=-np.inf)
        if not live or best >= live[0]["score"]:
            break
        state = {name: value[parents] for name, value in state.items()}
        token = np.array([beam_state["tokens"][-1] for beam_state in live], dtype=np.int64)
    grid = attention.shape[1:]
    ranked = sorted(finished, key=lambda beam_state: -beam_state["score"])
    return [_caption(beam_state, bool(finished), grid) for beam_state in (ranked or live)[:beam]]


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the largest values, largest first, ties in their order."""
    count = min(count, len(values))
    least = np.partition(values, -count)[-count]
    places = np.flatnonzero(values >= least)
    return places[np.argsort(-values[places], kind="stable")][:count]


def _caption(hypothesis: dict[str, Any], ended: bool, grid: tuple[int, ...]) -> SearchedCaption:
    maps = hypothesis["maps"]
    attention = np.stack(maps) if maps else np.zeros((0, *grid), np.float32)
    return SearchedCaption(hypothesis["tokens"], hypothesis["score"], ended, attention)


def _checked(logs: np.ndarray) -> np.ndarray:
    if np.isnan(logs).any():
        raise WrongSearch(
            "log_probabilities: found NaN, expected numbers. The model's weights or its input "
            "are not finite. Check the checkpoint."
        )
    return logs.astype(np.float64)
