# SPDX-License-Identifier: Apache-2.0
"""Texts about generated scenes: statements, true or false; captions, hard negatives; questions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, permutations

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.shapes import COLOURS, SHAPES, SIZES, TEXTURES, Object, Scenes

ATTRIBUTES = {"size": SIZES, "texture": TEXTURES, "colour": COLOURS, "shape": SHAPES}
SCENE_LABELS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
RELATIONS = ("left of", "right of", "above", "below")
OPPOSITE = dict(zip(RELATIONS, ("right of", "left of", "below", "above"), strict=True))
# A relation is stated if the centers differ by at least CLEARLY, and denied if they differ the
# other way by more than -BARELY. Objects that are nearly level are neither.
CLEARLY, BARELY = 0.2, -0.1


@dataclass(frozen=True)
class Phrase:
    """The mention of an object; attributes that are not mentioned are empty."""

    size: str = ""
    texture: str = ""
    colour: str = ""
    shape: str = ""

    def __str__(self) -> str:
        said = (self.size, self.texture, self.colour, self.shape or "object")
        return " ".join(word for word in said if word)

    @property
    def plural(self) -> str:
        """The phrase for several objects."""
        return f"{self}es" if self.shape == "cross" else f"{self}s"

    def fits(self, thing: Object) -> bool:
        """Return True if every mentioned attribute is true of the object."""
        return all(
            not getattr(self, field.name) or getattr(self, field.name) == getattr(thing, field.name)
            for field in fields(self)
        )


@dataclass(frozen=True)
class Statement:
    """Different objects in a scene, the first two in a relation if one is named."""

    phrases: tuple[Phrase, ...]
    relation: str = ""

    def __str__(self) -> str:
        words = [f"a {phrase}" for phrase in self.phrases]
        if self.relation:
            words[:2] = [f"{words[0]} {self.relation} {words[1]}"]
        return " and ".join(words)

    def holds(self, objects: Sequence[Object], margin: float) -> bool:
        """Return True if different objects fit the phrases, and the relation by `margin`."""
        return any(
            all(phrase.fits(thing) for phrase, thing in zip(self.phrases, chosen, strict=True))
            and (not self.relation or related(self.relation, chosen[0], chosen[1], margin))
            for chosen in permutations(objects, len(self.phrases))
        )

    def denied(self, objects: Sequence[Object]) -> bool:
        """Return True if the statement is clearly false."""
        return not self.holds(objects, BARELY)

    def with_phrase(self, place: int, phrase: Phrase) -> "Statement":
        """Return the same statement with another phrase at that place."""
        return replace(self, phrases=(*self.phrases[:place], phrase, *self.phrases[place + 1 :]))


def read_statement(text: str) -> Statement | None:
    """Return the statement that a sentence makes, or None if it does not have that form."""
    clauses = text.split(" and ")
    relation = next((relation for relation in RELATIONS if f" {relation} " in clauses[0]), "")
    if relation:
        clauses[:1] = clauses[0].split(f" {relation} ", 1)
    phrases = [_read_phrase(clause) for clause in clauses]
    whole = tuple(phrase for phrase in phrases if phrase is not None)
    return Statement(whole, relation) if len(whole) == len(phrases) else None


def is_true(text: str, objects: Sequence[Object]) -> bool:
    """Return True if the sentence is a statement that is true of the scene, even if barely."""
    said = read_statement(text)
    return said is not None and said.holds(objects, 0.0)


def _read_phrase(clause: str) -> Phrase | None:
    article, *words = clause.split()[:6] or [""]
    said = {name: word for name in ATTRIBUTES for word in words if word in ATTRIBUTES[name]}
    phrase = Phrase(**said)
    return phrase if article == "a" and clause == f"a {phrase}" else None


def related(relation: str, one: Object, other: Object, margin: float = CLEARLY) -> bool:
    """Return True if `one` has the relation to `other`, by at least `margin` between centers."""
    ahead = {
        "left of": other.column - one.column,
        "right of": one.column - other.column,
        "above": other.row - one.row,
        "below": one.row - other.row,
    }
    return ahead[relation] >= margin


def describe(thing: Object, said: Sequence[str]) -> Phrase:
    """Return the phrase that mentions those attributes of the object."""
    return Phrase(**{name: getattr(thing, name) for name in said})


def pick(rng: np.random.Generator, choices: Sequence[str]) -> str:
    """Draw one of the choices."""
    return choices[int(rng.integers(len(choices)))]


def other_word(rng: np.random.Generator, attribute: str, word: str) -> str:
    """Draw a different word for the same attribute."""
    return pick(rng, [other for other in ATTRIBUTES[attribute] if other != word])


def scene_label(objects: Sequence[Object]) -> int:
    """Return the class of a scene: its index in SCENE_LABELS.

    Raises: SaccadeError unless there is exactly one object.
    """
    if len(objects) != 1:
        raise SaccadeError(
            f"scene label: found {len(objects)} objects, expected exactly one. "
            "Draw scenes with objects=(1, 1)."
        )
    return SCENE_LABELS.index(f"{objects[0].colour} {objects[0].shape}")


CAPTION_WORDS = (
    *("a", "and", "left", "right", "of", "above", "below"),
    *SIZES,
    *TEXTURES,
    *COLOURS,
    *SHAPES,
)
CAPTION_TOKENS = 20  # with start and end; every caption and negative fits
NEGATIVE_KINDS = (
    "swap-attribute",  # two objects swap a color, size or texture
    "swap-object",  # the two sides of a relation swap
    "replace-attribute",
    "replace-object",  # another shape
    "replace-relation",
    "add-attribute",  # a wrong one that was not mentioned
    "add-object",  # an object that is not in the scene
)
_SAID = 0.4  # probability that a size, and that a texture, is mentioned
_RELATED = 0.6  # probability that two objects are mentioned with a relation
_TRIES = 8


def caption(objects: Sequence[Object], rng: np.random.Generator) -> str:
    """Draw one true sentence about a scene.

    A single object is described by color and shape, and by size and texture with probability 0.4
    each. Of several objects, two in a clear relation are mentioned (probability 0.6), or two or
    three in any order: "a small red circle left of a striped blue square", "a red circle and a
    blue square".
    Raises: SaccadeError if there is no object.
    """
    return str(_statement(objects, rng))


def caption_with_negatives(
    objects: Sequence[Object], rng: np.random.Generator
) -> tuple[str, dict[str, str]]:
    """Draw a true sentence, as `caption` does, and the false sentences made from it, by kind.

    The kinds are NEGATIVE_KINDS; a kind that cannot be made false for this scene is absent.
    Raises: SaccadeError if there is no object.
    """
    true = _statement(objects, rng)
    negatives = {}
    for kind, change in _CHANGES.items():
        for _ in range(_TRIES):
            changed = change(true, rng)
            if changed is not None and changed.denied(objects):
                negatives[kind] = str(changed)
                break
    return str(true), negatives


@dataclass(frozen=True)
class CaptionedScenes:
    """Scenes with one true sentence each, and false sentences.

    Shapes: images [n s s 3] uint8; negative i is about image `owner[i]`.
    """

    images: np.ndarray
    captions: list[str]
    owner: np.ndarray
    negatives: list[str]
    kinds: list[str]


def captioned(drawn: Scenes, seed: int = 0) -> CaptionedScenes:
    """Return the sentences of scenes, the same on every call."""
    rng = np.random.default_rng(seed)
    pairs = [caption_with_negatives(objects, rng) for objects in drawn.objects]
    rows = [(i, kind, text) for i, pair in enumerate(pairs) for kind, text in pair[1].items()]
    return CaptionedScenes(
        drawn.images,
        [pair[0] for pair in pairs],
        np.array([row[0] for row in rows]),
        [row[2] for row in rows],
        [row[1] for row in rows],
    )


def _statement(objects: Sequence[Object], rng: np.random.Generator) -> Statement:
    if not objects:
        raise SaccadeError("caption: found no object, expected at least one. Draw other scenes.")
    order = [objects[index] for index in rng.permutation(len(objects))]
    if len(order) > 1 and rng.random() < _RELATED:
        clear = [
            relation for relation in RELATIONS if related(relation, order[0], order[1], CLEARLY)
        ]
        if clear:
            phrases = tuple(_mention(thing, rng) for thing in order[:2])
            return Statement(phrases, pick(rng, clear))
    kept = order[: 1 + int(rng.integers(1, 3))]
    if len(kept) < 3:
        return Statement(tuple(_mention(thing, rng) for thing in kept))
    return Statement(tuple(describe(thing, ("colour", "shape")) for thing in kept))


def _mention(thing: Object, rng: np.random.Generator) -> Phrase:
    said = [name for name in ("size", "texture") if rng.random() < _SAID]
    return describe(thing, (*said, "colour", "shape"))


def _swap_attribute(true: Statement, rng: np.random.Generator) -> Statement | None:
    if len(true.phrases) < 2:
        return None
    one, other = (int(place) for place in rng.permutation(len(true.phrases))[:2])
    first, second = true.phrases[one], true.phrases[other]
    name = pick(rng, _said(first, second))
    word = getattr(first, name)
    changed = true.with_phrase(one, replace(first, **{name: getattr(second, name)}))
    return changed.with_phrase(other, replace(second, **{name: word}))


def _said(*phrases: Phrase) -> list[str]:
    names = ("size", "texture", "colour")
    return [name for name in names if all(getattr(phrase, name) for phrase in phrases)]


def _swap_object(true: Statement, rng: np.random.Generator) -> Statement | None:
    if not true.relation:
        return None
    return replace(true, phrases=true.phrases[1::-1])


def _replace_attribute(true: Statement, rng: np.random.Generator) -> Statement:
    place = int(rng.integers(len(true.phrases)))
    phrase = true.phrases[place]
    name = pick(rng, _said(phrase))
    word = other_word(rng, name, getattr(phrase, name))
    return true.with_phrase(place, replace(phrase, **{name: word}))


def _replace_object(true: Statement, rng: np.random.Generator) -> Statement:
    place = int(rng.integers(len(true.phrases)))
    phrase = true.phrases[place]
    return true.with_phrase(place, replace(phrase, shape=other_word(rng, "shape", phrase.shape)))


def _replace_relation(true: Statement, rng: np.random.Generator) -> Statement | None:
    if not true.relation:
        return None
    return replace(
        true, relation=pick(rng, [relation for relation in RELATIONS if relation != true.relation])
    )


def _add_attribute(true: Statement, rng: np.random.Generator) -> Statement | None:
    place = int(rng.integers(len(true.phrases)))
    phrase = true.phrases[place]
    silent = [name for name in ("size", "texture") if not getattr(phrase, name)]
    if not silent:
        return None
    name = pick(rng, silent)
    word = pick(rng, SIZES if name == "size" else TEXTURES)
    return true.with_phrase(place, replace(phrase, **{name: word}))


def _add_object(true: Statement, rng: np.random.Generator) -> Statement:
    more = Phrase(colour=pick(rng, COLOURS), shape=pick(rng, SHAPES))
    return replace(true, phrases=(*true.phrases, more))


_CHANGES: dict[str, Callable[[Statement, np.random.Generator], Statement | None]] = dict(
    zip(
        NEGATIVE_KINDS,
        (
            *(_swap_attribute, _swap_object),
            *(_replace_attribute, _replace_object, _replace_relation),
            *(_add_attribute, _add_object),
        ),
        strict=True,
    )
)


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
_QUESTION_TRIES = 12


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
    for _ in range(_QUESTION_TRIES * count):
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
    for _ in range(_QUESTION_TRIES):
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
    for _ in range(_QUESTION_TRIES):
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
