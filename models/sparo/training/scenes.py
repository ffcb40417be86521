# SPDX-License-Identifier: Apache-2.0
"""Scenes with sentences for models of two towers: batches to learn from, sets to score on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from saccade.models.data.captions import caption, caption_with_negatives
from saccade.models.data.scene_labels import scene_label
from saccade.models.data.shapes import Scenes, scenes
from saccade.models.scores.retrieval import recalls
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.zero_shot import encode_classes, zero_shot_logits

TEMPLATES = ("a {}",)
_CHUNK = 200


@dataclass(frozen=True)
class Told:
    """Scenes with one true sentence each, and false ones.

    Shapes: images [n s s 3] uint8; false sentence i is about image `owner[i]`.
    """

    images: np.ndarray
    sentences: list[str]
    owner: np.ndarray
    false: list[str]
    kinds: list[str]


def told(drawn: Scenes, seed: int = 0) -> Told:
    """The sentences of scenes, the same on every call."""
    rng = np.random.default_rng(seed)
    pairs = [caption_with_negatives(objects, rng) for objects in drawn.objects]
    rows = [(i, kind, text) for i, pair in enumerate(pairs) for kind, text in pair[1].items()]
    return Told(
        drawn.images,
        [pair[0] for pair in pairs],
        np.array([row[0] for row in rows]),
        [row[2] for row in rows],
        [row[1] for row in rows],
    )


def sha256_of_scenes(drawn: Scenes) -> str:
    """Of the pixels and of everything that is said about them."""
    digest = hashlib.sha256(np.ascontiguousarray(drawn.images).tobytes())
    digest.update(repr(drawn.objects).encode())
    return digest.hexdigest()


def sentences(drawn: Scenes, chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
    """A new true sentence for each chosen scene."""
    return [caption(drawn.objects[index], rng) for index in chosen]


@torch.no_grad()
def image_slots(model: Sparo, images: np.ndarray) -> np.ndarray:
    """Codes of images, by slot where there are slots.

    Shapes: images [n h w c] uint8 -> [n l v], or [n 1 e] of a baseline.
    """
    device = model.image.position.device
    parts = [torch.from_numpy(images[i : i + _CHUNK]) for i in range(0, len(images), _CHUNK)]
    return _gathered([model.encode_image(part.to(device)) for part in parts])


@torch.no_grad()
def text_slots(model: Sparo, texts: Sequence[str]) -> np.ndarray:
    """Codes of texts, by slot where there are slots.

    Shapes: -> [len(texts) l v], or [len(texts) 1 e] of a baseline.
    """
    device = model.image.position.device
    tokens = torch.from_numpy(encode_texts(model.facts(), texts))
    return _gathered([model.encode_text(part.to(device)) for part in tokens.split(_CHUNK)])


def _gathered(pooled: Sequence[object]) -> np.ndarray:
    found: list[Tensor] = []
    for each in pooled:
        slots = getattr(each, "slots", None)
        found.append(getattr(each, "code").unsqueeze(1) if slots is None else slots)  # noqa: B009
    return torch.cat(found).float().cpu().numpy()


def matching_scores(model: Sparo, data: Told) -> dict[str, float]:
    """R@1 and R@5 both ways over different sentences, and how often the true one is nearer.

    `r1` is the mean of R@1 both ways.
    """
    images = image_slots(model, data.images).reshape(len(data.images), -1)
    first = {text: i for i, text in reversed(list(enumerate(data.sentences)))}
    kept = np.array(sorted(first.values()))
    texts = text_slots(model, data.sentences).reshape(len(images), -1)
    scores = recalls(images[kept], texts[kept])
    false = text_slots(model, data.false).reshape(len(data.false), -1)
    images_of = images[data.owner]
    right = (images_of * texts[data.owner]).sum(1) > (images_of * false).sum(1)
    by_kind = {
        f"hard_negatives_{kind}": float(right[np.array(data.kinds) == kind].mean())
        for kind in sorted(set(data.kinds))
    }
    r1 = (scores["text_r1"] + scores["image_r1"]) / 2
    return {"r1": r1, **scores, "hard_negatives": float(right.mean()), **by_kind}


def labelled(split: str, count: int, side_px: int) -> tuple[np.ndarray, np.ndarray]:
    """Scenes of one object and their class.

    Shapes: -> images [count side side 3] uint8, labels [count] int64.
    """
    drawn = scenes(split, count, side_px=side_px, objects=(1, 1))
    return drawn.images, np.array([scene_label(each) for each in drawn.objects], np.int64)


def zero_shot_top1(
    model: Sparo, images: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> float:
    """Share of images whose class has the nearest prompt.

    Shapes: images [n h w c] uint8, labels [n].
    """
    classes = encode_classes(
        lambda texts: text_slots(model, texts).reshape(len(texts), -1), names, TEMPLATES
    )
    codes = image_slots(model, images).reshape(len(images), -1)
    return float((zero_shot_logits(codes, classes, 1.0).argmax(1) == labels).mean())
