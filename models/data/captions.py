# SPDX-License-Identifier: Apache-2.0
"""Captions of scenes, and hard negatives: false sentences with nearly the same words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.scene_statements import (
    CLEARLY,
    RELATIONS,
    Phrase,
    Statement,
    describe,
    other_word,
    pick,
    related,
)
from saccade.models.data.shapes import COLOURS, SHAPES, SIZES, TEXTURES, Object, Scenes

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
