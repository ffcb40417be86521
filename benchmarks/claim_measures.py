# SPDX-License-Identifier: Apache-2.0
"""Measures of claims that no task of `saccade evaluate` has."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from claim_data import made_data
from shipped_card import links_of

from saccade.models.checkpoint import load
from saccade.models.data.scene_texts import Phrase, read_statement
from saccade.models.data.shapes import Scenes
from saccade.models.data.shapes import scenes as drawn_scenes
from saccade.models.nac.generator import CircuitInputs, generate
from saccade.models.nac.kernel import signature_distance

Scores = dict[str, float]


def links(path: Path) -> Scores:
    """Return the mean probability of a NAC's links, and the share of likely ones."""
    model = load(path).build()
    if model.config.connectivity == "dense":
        return {"mean": 1.0, "likely": 1.0}
    mean, _, _, likely = links_of(model)
    return {"mean": mean / (model.config.modules - 1), "likely": likely}


def named_objects(path: Path, *, scenes: int) -> Scores:
    """Return the share of the objects that captions name, and where attention is at these words.

    The second is the share of a word's attention on the mask of the object that it describes, the
    mean over the words of all phrases that fit exactly one object. People judged this in the paper.
    """
    model = load(path).build().eval()
    drawn = drawn_scenes("test", scenes, side_px=model.config.height_px)
    captions = model.caption(drawn.images)
    named, shares = 0, []
    for index, (text, caption) in enumerate(zip(model.texts(captions), captions, strict=True)):
        for owner, words in described(drawn, index, text):
            named += 1
            on_mask = attention_on(drawn.masks[index] == owner + 1, caption.attention[words])
            shares.append(float(on_mask.mean()))
    total = sum(map(len, drawn.objects))
    return {"named": named / total, "attention on the object": float(np.mean(shares or [0.0]))}


def described(drawn: Scenes, index: int, text: str) -> Iterator[tuple[int, slice]]:
    """Yield each object that a phrase of the text describes and no other, and the phrase's words.

    An object is described once at most.
    """
    statement, seen = read_statement(text), set()
    words = text.split()
    starts = [place for place, word in enumerate(words) if word == "a"]
    phrases: Sequence[Phrase] = statement.phrases if statement else ()
    for phrase, start in zip(phrases, starts, strict=True) if statement else ():
        fitting = [i for i, thing in enumerate(drawn.objects[index]) if phrase.fits(thing)]
        if len(fitting) == 1 and fitting[0] not in seen:
            seen.add(fitting[0])
            # Without the article, which says nothing about the object.
            yield fitting[0], slice(start + 1, start + 1 + len(str(phrase).split()))


def circuits(path: Path, *, samples: int) -> Scores:
    """Return how often the most similar circuit is one of the same kind of statement.

    Circuits are compared by their probabilities of links, on test samples of `made:statements`.
    """
    model = load(path).build().eval()
    with np.load(made_data("made:statements")) as arrays:
        condition = arrays["condition"][arrays["split"] == "test"][:samples]
    kind = condition.argmax(2).min(1) // 2  # words of fillers come after those of kinds
    with torch.inference_mode():
        given = CircuitInputs(torch.zeros(0), None, torch.from_numpy(condition), None)
        signatures = generate(model.generator, model.config, given).signatures
        distance = signature_distance(signatures, signatures)
    link = np.exp(-distance.flatten(1).double().numpy() / model.config.epsilon)
    apart = ((link[:, None] - link[None]) ** 2).sum(2) + np.diag(np.full(len(link), np.inf))
    return {"same kind": float((kind[apart.argmin(1)] == kind).mean())}


def attention_on(mask: np.ndarray, attention: np.ndarray) -> np.ndarray:
    """Return the share of each map's weight on a mask.

    Shapes: mask [h w], attention [t a b] with a and b divisors of h and w -> [t].
    """
    t, a, b = attention.shape
    cells = mask.reshape(a, mask.shape[0] // a, b, mask.shape[1] // b).mean((1, 3))
    return np.asarray((attention * cells).reshape(t, -1).sum(1) / attention.reshape(t, -1).sum(1))


MEASURES: dict[str, Callable[..., Scores]] = {
    "links": links,
    "circuits": circuits,
    "named_objects": named_objects,
}
