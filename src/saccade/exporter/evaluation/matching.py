# SPDX-License-Identifier: Apache-2.0
"""Score images against texts: zero-shot classification, retrieval, hard negatives."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.classification import labelled_images
from saccade.exporter.evaluation.decisions import Decider
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.examples import Asked, Samples, labelled_answers
from saccade.exporter.evaluation.load_inputs import Inputs, images_of
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.scenes import described_scenes
from saccade.files import read_lines
from saccade.models.data.datasets import HELD_OUT, load_data
from saccade.models.interface import Arrays
from saccade.models.scores.classification import correct
from saccade.models.scores.results import EvaluationResult, proportion
from saccade.models.scores.retrieval import cosines, ranks
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.zero_shot import (
    default_templates,
    encode_classes,
    prompts,
    zero_shot_logits,
)


def zero_shot(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score top-1 (and top-5) of labels that are given only as words."""
    decider = decide(model, options, options.split or HELD_OUT)
    logits, labels = decider.logits(), decider.labels
    assert labels is not None
    right = correct(logits, labels)
    scores = (
        proportion("zero-shot top-1", right),
        proportion("zero-shot top-5", correct(logits, labels, top=5)),
    )
    samples = right.astype(np.float64)
    return EvaluationResult(
        model.name,
        "zero-shot",
        decider.data,
        decider.data_sha256,
        scores,
        samples,
        split=decider.split,
        skipped=decider.skipped,
    )


def decide(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Decider:
    """Return the model as a classifier into the data's class names, given as words."""
    data = labelled_images(model, options, split)
    classify = _classifier(model, options, data.class_names)

    def run(inputs: Arrays) -> np.ndarray:
        return classify(model.component("image").run(inputs)["embedding"])

    labelling = (tuple(data.class_names), _templates(model, options))
    images = {"image": data.images}
    return Decider(
        run,
        images,
        data.labels,
        data.name,
        data.sha256,
        labelling=labelling,
        split=data.split,
        skipped=data.skipped,
    )


def _classifier(
    model: EvaluatedModel, options: EvaluateOptions, names: Sequence[str]
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from images to logits of classes that are given only as words.

    Shapes: images [n e], embeddings -> [n names].
    """
    classes = encode_classes(
        lambda texts: _text_codes(model, texts), names, _templates(model, options)
    )
    scale = float(model.runtime_metadata["logit_scale"])
    return lambda images: zero_shot_logits(images, classes, scale)


def retrieval(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score R@1 and R@5, from images to texts and from texts to images.

    If a sentence is true of several scenes, each of them counts as correct.
    """
    scenes = described_scenes(model.images(), options)
    images = model.component("image")({"image": scenes.images})["embedding"]
    similarity = cosines(images, _text_codes(model, scenes.captions))
    saying: dict[str, set[int]] = defaultdict(set)
    for index, text in enumerate(scenes.captions):
        saying[text].add(index)
    truth = [saying[text] for text in scenes.captions]
    of_texts, of_images = ranks(similarity, truth), ranks(similarity.T, truth)
    scores = [
        proportion(f"{wanted} R@{top}", ranks <= top)
        for wanted, ranks in (("text", of_texts), ("image", of_images))
        for top in (1, 5)
    ]
    samples = (of_texts <= 1).astype(np.float64)
    return EvaluationResult(
        model.name, "retrieval", scenes.data, scenes.sha256, tuple(scores), samples
    )


def hard_negatives(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score the share of false sentences less similar to the image than the true one, by kind."""
    scenes = described_scenes(model.images(), options)
    images = model.component("image")({"image": scenes.images})["embedding"]
    truth = (images * _text_codes(model, scenes.captions)).sum(-1)
    codes = _text_codes(model, scenes.negatives)
    right = truth[scenes.owner] > (images[scenes.owner] * codes).sum(-1)
    kinds = np.array(scenes.kinds)
    scores = [proportion("hard-negative accuracy", right)]
    scores += [proportion(kind, right[kinds == kind]) for kind in sorted(set(kinds))]
    return EvaluationResult(
        model.name,
        "hard-negatives",
        scenes.data,
        scenes.sha256,
        tuple(scores),
        right.astype(np.float64),
    )


def _text_codes(model: EvaluatedModel, texts: Sequence[str]) -> np.ndarray:
    """Compute the embeddings of texts.

    Shapes: -> [texts e].
    """
    tokens = encode_texts(model.runtime_metadata, texts)
    return model.component("text")({"tokens": tokens})["embedding"]


def _templates(model: EvaluatedModel, options: EvaluateOptions) -> tuple[str, ...]:
    if options.templates is None:
        return default_templates(model.runtime_metadata["tokenizer"])
    return read_lines(options.templates, "template")


def load_inputs(variant: VariantFiles, data: str, count: int) -> Inputs:
    """Return the first labeled images, and prompts of the labels if the model takes text.

    Shapes: image [n h w c], n at most `count`; tokens [prompts t].
    Raises: SaccadeError if the model takes no image.
    """
    dataset = load_data(data, HELD_OUT, preprocessing=images_of(variant))
    inputs = {variant.main.variant.role: {"image": dataset.images[:count]}}
    if "text" in variant.components:
        metadata = variant.runtime_metadata
        written = prompts(dataset.class_names, default_templates(metadata["tokenizer"]))
        tokens = encode_texts(metadata, [text for sentences in written for text in sentences])
        inputs["text"] = {"tokens": tokens}
    return inputs


def zero_shot_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> Asked:
    """Return the label whose words are nearest to each chosen image."""
    data = labelled_images(models[0], options, options.split or HELD_OUT)
    images, names = data.images[chosen], data.class_names
    answers = []
    for model in models:
        outputs = model.component("image")({"image": images})
        logits = _classifier(model, options, names)(outputs["embedding"])
        answers.append(labelled_answers(model, names, {**outputs, "logits": logits}))
    return Samples(images, (), [names[label] for label in data.labels[chosen]]), answers
