# SPDX-License-Identifier: Apache-2.0
"""Questions about scenes, each with one right answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.scene_statements import (
    ATTRIBUTES,
    CLEARLY,
    OPPOSITE,
    RELATIONS,
    Phrase,
    Statement,
    describe,
    other_word,
    pick,
    related,
)
from saccade.models.data.shapes import COLOURS, SHAPES, SIZES, TEXTURES, Object

MOST_COUNTED = 6
SIDES = ("left", "right", "top", "bottom")
ANSWERS = (
    *("yes", "no"),
    *(str(count) for count in range(MOST_COUNTED + 1)),
    *COLOURS,
    *SHAPES,
    *SIZES,
    *TEXTURES,
    *SIDES,
)
QUESTION_WORDS = (
    *("is", "there", "a", "the", "what", "how", "many", "are", "or", "on", "at", "of", "?"),
    *("colour", "shape", "size", "texture", "object", "objects", "above", "below"),
    *SIDES,
    *SIZES,
    *TEXTURES,
    *COLOURS,
    *SHAPES,
    *(Phrase(shape=shape).plural for shape in SHAPES),
)
QUESTION_TOKENS = 20  # with start and end; every question fits
_MIDDLE = 0.15  # an object this close to the middle is on neither side
_TRIES = 12


@dataclass(frozen=True)
class Question:
    """A question, its answer (one of ANSWERS) and its kind (one of QUESTION_KINDS)."""

    text: str
    answer: str
    kind: str


def questions(objects: Sequence[Object], rng: np.random.Generator, count: int) -> list[Question]:
    """Draw different questions about a scene, of each possible kind with equal probability.

    The answers to `exists` and `relation` are yes and no equally often, and a false statement
    differs from a true one in one word. `count` first draws its number, from those that phrases of
    one or two attributes give. `colour`, `shape`, `size`, `texture` and `position` ask about one
    object, the only one that their phrase fits.
    Raises: SaccadeError if there is no object.
    """
    if not objects:
        raise SaccadeError("questions: found no object, expected at least one. Draw other scenes.")
    questions_by_text: dict[str, Question] = {}
    for _ in range(_TRIES * count):
        if len(questions_by_text) == count:
            break
        kind = pick(rng, QUESTION_KINDS)
        asked = _KINDS[kind](objects, rng)
        if asked is not None and asked[0] not in questions_by_text:
            questions_by_text[asked[0]] = Question(*asked, kind)
    return list(questions_by_text.values())


QuestionAnswer = tuple[str, str] | None


def _attribute(name: str) -> Callable[[Sequence[Object], np.random.Generator], QuestionAnswer]:
    def ask(objects: Sequence[Object], rng: np.random.Generator) -> QuestionAnswer:
        thing = objects[int(rng.integers(len(objects)))]
        phrase = _alone(
            thing, objects, rng, [attribute for attribute in ATTRIBUTES if attribute != name]
        )
        if phrase is None:
            return None
        return f"what {name} is the {phrase} ?", getattr(thing, name)

    return ask


def _alone(
    thing: Object, objects: Sequence[Object], rng: np.random.Generator, names: Sequence[str]
) -> Phrase | None:
    """Draw a phrase that fits only this object: one of the shortest, or one attribute longer."""
    candidates: list[Phrase] = []
    shortest = 0
    for length in range(1, len(names) + 1):
        phrases = [describe(thing, said) for said in combinations(names, length)]
        candidates += [phrase for phrase in phrases if sum(map(phrase.fits, objects)) == 1]
        shortest = shortest or (length if candidates else 0)
        if shortest and length > shortest:
            break
    return candidates[int(rng.integers(len(candidates)))] if candidates else None


def _position(objects: Sequence[Object], rng: np.random.Generator) -> QuestionAnswer:
    thing = objects[int(rng.integers(len(objects)))]
    phrase = _alone(thing, objects, rng, list(ATTRIBUTES))
    across = rng.random() < 0.5
    where = thing.column if across else thing.row
    if phrase is None or abs(where) < _MIDDLE:
        return None
    first, second = SIDES[:2] if across else SIDES[2:]
    place = "on" if across else "at"
    text = f"is the {phrase} {place} the {first} or {place} the {second} ?"
    return text, first if where < 0 else second


def _count(objects: Sequence[Object], rng: np.random.Generator) -> QuestionAnswer:
    by_count: dict[int, list[Phrase]] = {}
    for _ in range(_TRIES):
        names = rng.permutation(list(ATTRIBUTES))[: int(rng.integers(1, 3))]
        phrase = Phrase(**{str(name): pick(rng, ATTRIBUTES[str(name)]) for name in names})
        by_count.setdefault(sum(map(phrase.fits, objects)), []).append(phrase)
    number = list(by_count)[int(rng.integers(len(by_count)))]
    if number > MOST_COUNTED:
        return None
    return f"how many {by_count[number][0].plural} are there ?", str(number)


def _exists(objects: Sequence[Object], rng: np.random.Generator) -> QuestionAnswer:
    thing = objects[int(rng.integers(len(objects)))]
    names = rng.permutation(list(ATTRIBUTES))[: int(rng.integers(2, 4))]
    true = Statement((describe(thing, [str(name) for name in names]),))
    return _yes_or_no(true, objects, rng)


def _relation(objects: Sequence[Object], rng: np.random.Generator) -> QuestionAnswer:
    if len(objects) < 2:
        return None
    one, other = (objects[index] for index in rng.permutation(len(objects))[:2])
    clear = [relation for relation in RELATIONS if related(relation, one, other, CLEARLY)]
    if not clear:
        return None
    phrases = tuple(describe(thing, ("colour", "shape")) for thing in (one, other))
    return _yes_or_no(Statement(phrases, pick(rng, clear)), objects, rng)


def _yes_or_no(
    true: Statement, objects: Sequence[Object], rng: np.random.Generator
) -> QuestionAnswer:
    if rng.random() < 0.5:
        return f"is there {true} ?", "yes"
    for _ in range(_TRIES):
        false = _changed(true, rng)
        if false.denied(objects):
            return f"is there {false} ?", "no"
    return None


def _changed(true: Statement, rng: np.random.Generator) -> Statement:
    if true.relation and rng.random() < 0.5:
        return replace(true, relation=OPPOSITE[true.relation])
    place = int(rng.integers(len(true.phrases)))
    phrase = true.phrases[place]
    name = pick(rng, [attribute for attribute in ATTRIBUTES if getattr(phrase, attribute)])
    word = other_word(rng, name, getattr(phrase, name))
    return true.with_phrase(place, replace(phrase, **{name: word}))


_KINDS: dict[str, Callable[[Sequence[Object], np.random.Generator], QuestionAnswer]] = {
    "exists": _exists,
    "relation": _relation,
    "count": _count,
    "colour": _attribute("colour"),
    "shape": _attribute("shape"),
    "size": _attribute("size"),
    "texture": _attribute("texture"),
    "position": _position,
}
QUESTION_KINDS = tuple(_KINDS)
