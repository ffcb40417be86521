# SPDX-License-Identifier: Apache-2.0
"""Statements about a scene, and whether they are true, and the label of one object."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.shapes import COLOURS, SHAPES, SIZES, TEXTURES, Object

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
