# SPDX-License-Identifier: Apache-2.0
"""Images against texts: zero-shot classes, retrieval both ways, hard negatives."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from saccade.export.artefact.variant_files import VariantParts
from saccade.export.evaluation.classification import labelled_images
from saccade.export.evaluation.load_inputs import Inputs, images_of
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.scenes import described_scenes
from saccade.export.evaluation.subject import Subject
from saccade.files import read_lines
from saccade.models.data.datasets import load_data
from saccade.models.scores.classification import correct
from saccade.models.scores.results import Found, proportion
from saccade.models.scores.retrieval import cosines, ranks
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.zero_shot import (
    default_templates,
    encode_classes,
    prompts,
    zero_shot_logits,
)


def zero_shot(subject: Subject, options: EvaluateOptions) -> Found:
    """Top-1 of labels that are only given as words."""
    data = labelled_images(subject, options, "test")
    classes = encode_classes(
        lambda texts: _text_codes(subject, texts), data.class_names, _templates(subject, options)
    )
    images = subject.part("image")({"image": data.images})["embedding"]
    logits = zero_shot_logits(images, classes, float(subject.facts["logit_scale"]))
    right = correct(logits, data.labels)
    scores = (
        proportion("zero-shot top-1", right),
        proportion("zero-shot top-5", correct(logits, data.labels, top=5)),
    )
    samples = right.astype(np.float64)
    return Found(subject.name, "zero-shot", data.name, data.sha256, scores, samples)


def retrieval(subject: Subject, options: EvaluateOptions) -> Found:
    """R@1 and R@5, texts of an image and images of a text.

    A sentence may be said of several scenes: each of them is right for it.
    """
    found = described_scenes(subject.images(), options)
    images = subject.part("image")({"image": found.images})["embedding"]
    similarity = cosines(images, _text_codes(subject, found.captions))
    saying: dict[str, set[int]] = defaultdict(set)
    for index, text in enumerate(found.captions):
        saying[text].add(index)
    truth = [saying[text] for text in found.captions]
    of_texts, of_images = ranks(similarity, truth), ranks(similarity.T, truth)
    scores = [
        proportion(f"{wanted} R@{top}", each <= top)
        for wanted, each in (("text", of_texts), ("image", of_images))
        for top in (1, 5)
    ]
    samples = (of_texts <= 1).astype(np.float64)
    return Found(subject.name, "retrieval", found.data, found.sha256, tuple(scores), samples)


def hard_negatives(subject: Subject, options: EvaluateOptions) -> Found:
    """Share of false sentences that are less similar to the image than the true one, by kind."""
    found = described_scenes(subject.images(), options)
    images = subject.part("image")({"image": found.images})["embedding"]
    truth = (images * _text_codes(subject, found.captions)).sum(-1)
    codes = _text_codes(subject, found.negatives)
    right = truth[found.owner] > (images[found.owner] * codes).sum(-1)
    kinds = np.array(found.kinds)
    scores = [proportion("hard-negative accuracy", right)]
    scores += [proportion(kind, right[kinds == kind]) for kind in sorted(set(kinds))]
    return Found(
        subject.name,
        "hard-negatives",
        found.data,
        found.sha256,
        tuple(scores),
        right.astype(np.float64),
    )


def _text_codes(subject: Subject, texts: Sequence[str]) -> np.ndarray:
    tokens = encode_texts(subject.facts, texts)
    return subject.part("text")({"tokens": tokens})["embedding"]


def _templates(subject: Subject, options: EvaluateOptions) -> tuple[str, ...]:
    if options.templates is None:
        return default_templates(subject.facts["tokenizer"])
    return read_lines(options.templates, "template")


def load_inputs(variant: VariantParts, data: str, count: int) -> Inputs:
    """The first labelled images, and where there is a part for texts, the prompts of the labels.

    Shapes: image [n h w c], n at most `count`; tokens [prompts t].
    Raises: SaccadeError if the model takes no image.
    """
    found = load_data(data, "test", preprocessing=images_of(variant))
    inputs = {variant.main.variant.role: {"image": found.images[:count]}}
    if "text" in variant.parts:
        facts = variant.facts
        written = prompts(found.class_names, default_templates(facts["tokenizer"]))
        tokens = encode_texts(facts, [text for each in written for text in each])
        inputs["text"] = {"tokens": tokens}
    return inputs
