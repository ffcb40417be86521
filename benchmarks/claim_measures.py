# SPDX-License-Identifier: Apache-2.0
"""Measures of claims that no task of `saccade evaluate` has."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from claim_boxes import box_answers
from claim_data import made_data
from shipped_card import links_of
from torch import Tensor

from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import load
from saccade.models.data.scene_texts import (
    SCENE_LABELS,
    Phrase,
    captioned,
    read_statement,
    scene_label,
)
from saccade.models.data.shapes import Scenes
from saccade.models.data.shapes import scenes as drawn_scenes
from saccade.models.nac.generator import CircuitInputs, generate
from saccade.models.nac.kernel import signature_distance
from saccade.models.sot.model import SoT
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.ranking import image_slots, text_slots, train_masks
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.training import TEMPLATES
from saccade.models.sparo.zero_shot import encode_classes

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


def masks(path: Path, *, scenes: int, parts: int) -> Scores:
    """Return what masks of the image code change that were trained to tell false sentences.

    A mask has a number for each of `parts` equal parts of the code, which are the slots if there
    are some, or for each dimension. Its `gain` is the relative change of the score that it was
    trained for (on validation scenes), the `change` that of the zero-shot accuracy (on test scenes
    of one object), and `normalized` is their quotient.
    Source: Vani et al. 2024, section 5.2, table 5.
    """
    model = load(path).build().eval()
    told = captioned(drawn_scenes("validation", scenes, side_px=model.config.height_px))
    ones = drawn_scenes("test", objects=(1, 1), side_px=model.config.height_px)
    labels = np.array([scene_label(objects) for objects in ones.objects])

    def in_parts(codes: np.ndarray) -> np.ndarray:
        return codes.reshape(len(codes), parts, -1)

    images = in_parts(image_slots(model, told.images))[told.owner]
    texts = [np.array(told.captions)[told.owner].tolist(), told.negatives]
    samples = [images, *(in_parts(text_slots(model, some)) for some in texts)]
    classes = encode_classes(
        lambda some: text_slots(model, some).reshape(len(some), -1), SCENE_LABELS, TEMPLATES
    )
    codes, scores = in_parts(image_slots(model, ones.images)), {}

    def top1(mask: np.ndarray) -> float:
        masked = codes * mask.reshape(parts, -1)
        return float(np.mean((masked.reshape(len(codes), -1) @ classes.T).argmax(1) == labels))

    for kind in ("slot", "dimension"):
        halves, before = train_masks(*samples, kind=kind, epochs=0)
        mask, after = train_masks(*samples, kind=kind)
        # A mask without any gain counts as one that gains a sample.
        gain = max(after - before, 1 / len(images)) / before
        change = top1(mask) / top1(halves) - 1
        scores |= {f"{kind} gain": gain, f"{kind} change": change}
        scores[f"{kind} normalized"] = change / gain
    return scores


def half(path: Path) -> Scores:
    """Return the share of true sentences found with all slots and with the best half of them.

    They are ordered as training left them, by the zero-shot accuracy of each alone on validation
    scenes. A model without slots has no such scores.
    """
    if load(path).config["pooling"] != "sparo":
        return {}
    options = EvaluateOptions(data="shapes", task="hard-negatives", budget=("1", "0.5"))
    results = evaluate(path, options, progress=None).results
    return {name: one.scores[0].value for name, one in zip(("all", "half"), results, strict=True)}


SHARP = 0.5  # the least share of a slot's attention in a sentence that is on one phrase; our choice
ALIKE = 0.75  # the least cosine of a slot's codes of image and text, as in section 5.5


@torch.no_grad()
def slot_attention(
    model: Sparo, images: np.ndarray, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where slots attend in images and in their texts, and the cosines of their codes.

    Shapes: images [n h w c], n texts -> [n k rows columns], [n k words], [n k]. The words begin
            with the first one of a sentence.
    """
    tokens = encode_texts(model.runtime_metadata(), texts)
    image = model.encode_image(torch.from_numpy(images))
    text = model.encode_text(torch.from_numpy(tokens))
    rows = model.config.height_px // model.config.patch_px
    maps = image.attention[..., model.config.first_tokens :].unflatten(-1, (rows, -1))
    cosines = torch.cosine_similarity(image.slots, text.slots, dim=-1)
    return maps.numpy(), text.attention[..., 1:].numpy(), cosines.numpy()


def concepts(path: Path, *, scenes: int) -> Scores:
    """Return whether slots attend to the object in an image that they attend to in its sentence.

    A slot is `aligned` with a phrase that describes exactly one object if enough of its attention
    is on the phrase's words, and its codes of image and text are alike. Its lead is the share of
    its attention on the mask of that object, minus the mean share on another object of the scene.
    A model without slots has no such scores.
    Source: Vani et al. 2024, section 5.5, figures 4 and B.1, which show maps.
    """
    model = load(path).build().eval()
    if model.config.pooling != "sparo":
        return {}
    drawn = drawn_scenes("test", scenes, side_px=model.config.height_px)
    texts = captioned(drawn).captions
    of_image, of_text, cosines = slot_attention(model, drawn.images, texts)
    leads: list[np.ndarray] = []
    aligned: list[np.ndarray] = []
    for index, text in enumerate(texts):
        count = len(drawn.objects[index])
        on = np.stack(
            [attention_on(drawn.masks[index] == i + 1, of_image[index]) for i in range(count)]
        )
        for owner, words in described(drawn, index, text):
            leads.append(on[owner] - np.delete(on, owner, 0).mean(0))
            aligned.append((of_text[index][:, words].sum(1) >= SHARP) & (cosines[index] > ALIKE))
    lead, kept = np.stack(leads), np.stack(aligned)
    return {
        "aligned": float(kept.mean()),
        "lead of aligned slots": float(lead[kept].mean()) if kept.any() else 0.0,
        "lead of all slots": float(lead.mean()),
    }


def grad_cams(model: SoT, images: np.ndarray) -> np.ndarray:
    """Return which word tokens the predicted class depends on: Grad-CAM before the last block.

    A word's weight is that of its channels, each by the mean slope of the class's logit over the
    words, where it is positive.

    Shapes: images [n h w c] -> [n rows columns].
    Source: Selvaraju et al. 2017, eq. 1 and 2; in Xie et al. 2021 figure S-4.
    """
    entering: list[Tensor] = []
    # In evaluation the norm runs twice; the logits use its second result.
    hook = model.trunk.blocks[-1].norm_attention.register_forward_hook(
        lambda module, given, normed: entering.append(normed)
    )
    logits = model(torch.from_numpy(images))
    hook.remove()
    (slopes,) = torch.autograd.grad(logits.max(1).values.sum(), entering[-1])
    words, slopes = (x[:, model.trunk.words_from :].detach() for x in (entering[-1], slopes))
    maps = (words * slopes.mean(1, keepdim=True)).sum(-1).relu()
    return maps.unflatten(1, model.config.grid).numpy()


def cam(path: Path, *, scenes: int) -> Scores:
    """Return the share of Grad-CAM on the one object of a scene, where a map is not empty."""
    model = load(path).build().eval()
    drawn = drawn_scenes("test", scenes, side_px=model.config.height_px, objects=(1, 1))
    maps = grad_cams(model, drawn.images)
    pairs = [(own, mask == 1) for own, mask in zip(maps, drawn.masks, strict=True) if own.any()]
    shares = [attention_on(mask, own[None])[0] for own, mask in pairs]
    return {"on the object": float(np.mean(shares)), "not empty": len(pairs) / scenes}


MEASURES: dict[str, Callable[..., Scores]] = {
    "links": links,
    "circuits": circuits,
    "named_objects": named_objects,
    "masks": masks,
    "half": half,
    "concepts": concepts,
    "cam": cam,
    "box_answers": box_answers,
}
