# SPDX-License-Identifier: Apache-2.0
"""Score images against texts: zero-shot classification, retrieval, hard negatives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import read_lines
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.classification import labelled_images
from saccade.exporter.evaluation.decisions import Decider, Run
from saccade.exporter.evaluation.evaluated_model import DataSplit, EvaluatedModel, origin
from saccade.exporter.evaluation.examples import ExampleAnswers, ExampleSamples, labelled_answers
from saccade.exporter.evaluation.scenes import SceneCaptions, described_scenes
from saccade.exporter.evaluation.tasks import EvaluateOptions, Inputs
from saccade.models.data.datasets import (
    HELD_OUT,
    Dataset,
    is_unlabelled,
    load_data,
    unlabelled_images,
)
from saccade.models.data.image_texts import Contrasts, has_sentences, load_contrasts, load_pairs
from saccade.models.data.options import DataOptions
from saccade.models.data.samples.images import pixels_sha256
from saccade.models.scores.classification import correct
from saccade.models.scores.results import EvaluationResult, proportion
from saccade.models.scores.retrieval import ranks_of_pairs
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.zero_shot import (
    default_templates,
    encode_classes,
    prompts,
    zero_shot_logits,
)

_SCENES = (None, "shapes")  # data that is generated, with sentences


def zero_shot(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score top-1 (and top-5) of labels that are given only as words."""
    decider = decide(model, options, options.split or HELD_OUT)
    if decider.labels is None:
        raise SaccadeError(
            f"{decider.name}: has no labels, expected one folder of images per class. Sort the "
            "images into folders, or pass other data with --data."
        )
    logits, labels = decider.logits(), decider.labels
    right = correct(logits, labels)
    scores = (
        proportion("zero-shot top-1", right),
        proportion("zero-shot top-5", correct(logits, labels, top=5)),
    )
    return model.result("zero-shot", decider, scores, right)


def decide(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Decider:
    """Return the model as a classifier into the data's class names, given as words.

    The classes of images without labels are those that `options.labels` names.

    Raises: SaccadeError if nothing names the classes, or the data does not fit the model.
    """
    data = _images_alone(model, options) or labelled_images(model, options, split)

    def of(variant: EvaluatedModel) -> Run:
        classify = _classifier(variant, options, data.class_names)
        image = variant.component("image")
        return lambda inputs: classify(image.run(inputs)["embedding"])

    return Decider(
        of(model),
        of,
        {"image": data.images},
        data.labels if isinstance(data, Dataset) else None,
        labelling=(tuple(data.class_names), _templates(model, options)),
        **origin(data),
    )


@dataclass(frozen=True)
class _ImagesAlone(DataSplit):
    """Images without labels, and the classes to choose among.

    Shapes: images uint8 [n h w c].
    """

    images: np.ndarray
    class_names: tuple[str, ...]


def _images_alone(model: EvaluatedModel, options: EvaluateOptions) -> _ImagesAlone | None:
    """Return the data if it has no labels, with the classes that a file names.

    Raises: SaccadeError without such a file.
    """
    if options.data is None or not is_unlabelled(path := Path(options.data)):
        return None
    if options.labels is None:
        raise SaccadeError(
            f"{path}: has images without labels, which name no classes for {model.name} to choose "
            "among. Name the classes with --labels FILE, one per line, or sort the images into one "
            "folder per class."
        )
    images = unlabelled_images(path, model.images())
    if options.limit is not None:
        images = images[: options.limit]
    names, digest = read_lines(options.labels, "label"), partial(pixels_sha256, images)
    return _ImagesAlone(images, names, name=path.name, digest=digest)


def _classifier(
    model: EvaluatedModel, options: EvaluateOptions, names: Sequence[str]
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from images to logits of classes that are given only as words.

    Shapes: images [n e], embeddings -> [n names].
    """
    classes = encode_classes(
        lambda texts: _text_codes(model, texts, truncate=False),
        names,
        _templates(model, options),
    )
    scale = float(model.runtime_metadata["logit_scale"])
    return lambda images: zero_shot_logits(images, classes, scale)


@dataclass(frozen=True)
class _SentenceData(DataSplit):
    """Images and sentences about them: generated scenes, or the user's.

    Shapes: images [n h w c] uint8, owner [m], the place of the image of each sentence.
    """

    images: np.ndarray
    sentences: list[str]
    owner: np.ndarray


def _said(model: EvaluatedModel, options: EvaluateOptions) -> _SentenceData:
    if options.data in _SCENES:
        drawn = described_scenes(model.images(), options)
        owner = np.arange(len(drawn.images))
        given = drawn.images, drawn.captions, owner
        return _SentenceData(*given, name=drawn.data, digest=lambda: drawn.sha256)
    split = options.split or HELD_OUT
    pairs = load_pairs(options.data or "", split, options.asked, model.images())
    pairs = pairs.first(options.limit)
    return _SentenceData(pairs.images, *pairs.spread(), **origin(pairs))


def retrieval(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score R@1, R@5 and R@10, from images to texts and from texts to images.

    If a sentence is about several images, each of them counts as correct.
    """
    said = _said(model, options)
    images = model.component("image")({"image": said.images})["embedding"]
    texts = _text_codes(model, said.sentences)
    of_texts, of_images = ranks_of_pairs(images, texts, said.sentences, said.owner)
    scores = [
        proportion(f"{wanted} R@{top}", ranks <= top)
        for wanted, ranks in (("text", of_texts), ("image", of_images))
        for top in (1, 5, 10)
    ]
    return model.result("retrieval", said, scores, of_texts <= 1)


def hard_negatives(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score the share of false sentences less similar to the image than the true one, by kind."""
    told: SceneCaptions | Contrasts
    if options.data in _SCENES:
        told = described_scenes(model.images(), options)
        captions = [told.captions[owner] for owner in told.owner]
        data = DataSplit(name=told.data, digest=lambda: told.sha256)
    else:
        given = options.data or "", options.split, options.asked
        told = load_contrasts(*given, model.images(), options.limit)
        captions, data = told.captions, DataSplit(**origin(told))
    images = model.component("image")({"image": told.images})["embedding"][told.owner]
    true, false = (_text_codes(model, texts) for texts in (captions, told.negatives))
    right = (images * true).sum(-1) > (images * false).sum(-1)
    kinds = np.array(told.kinds)
    scores = [proportion("hard-negative accuracy", right)]
    scores += [proportion(kind, right[kinds == kind]) for kind in sorted(set(told.kinds))]
    return model.result("hard-negatives", data, scores, right)


def _text_codes(
    model: EvaluatedModel, texts: Sequence[str], *, truncate: bool = True
) -> np.ndarray:
    """Compute the embeddings of texts, of each only once; long ones are cut, as in CLIP.

    Shapes: -> [texts e].
    """
    place = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    tokens = encode_texts(model.runtime_metadata, list(place), truncate=truncate)
    codes = model.component("text")({"tokens": tokens})["embedding"]
    return codes[[place[text] for text in texts]]


def _templates(model: EvaluatedModel, options: EvaluateOptions) -> tuple[str, ...]:
    if options.templates is None:
        return default_templates(model.runtime_metadata["tokenizer"])
    return read_lines(options.templates, "template")


def load_inputs(variant: VariantFiles, data: str, count: int, skip_bad: int = 0) -> Inputs:
    """Return the first images, and their sentences or prompts of their labels if it takes text.

    Shapes: image [n h w c], n at most `count`; tokens [prompts t].
    Raises: SaccadeError if the model takes no image.
    """
    preprocessing, metadata = variant.images(), variant.runtime_metadata
    role, asked = variant.main.variant.role, DataOptions(skip_bad=skip_bad)
    if has_sentences(data):
        pairs = load_pairs(data, HELD_OUT, asked, preprocessing).first(count)
        tokens = encode_texts(metadata, pairs.spread()[0][:count], truncate=True)
        return {role: {"image": np.asarray(pairs.images)}, "text": {"tokens": tokens}}
    dataset = load_data(data, HELD_OUT, preprocessing=preprocessing, asked=asked)
    inputs = {role: {"image": dataset.images[:count]}}
    if "text" in variant.components:
        written = prompts(dataset.class_names, default_templates(metadata["tokenizer"]))
        tokens = encode_texts(metadata, [text for sentences in written for text in sentences])
        inputs["text"] = {"tokens": tokens}
    return inputs


def zero_shot_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> ExampleAnswers:
    """Return the label whose words are nearest to each chosen image."""
    data = labelled_images(models[0], options, options.split or HELD_OUT)
    images, names = data.images[chosen], data.class_names
    taken, answers = {models[0].preprocessing: images}, []
    for model in models:
        if (own := model.preprocessing) not in taken:
            more = labelled_images(model, options, options.split or HELD_OUT)
            taken[own] = more.images[chosen]
        outputs = model.component("image")({"image": taken[own]})
        logits = _classifier(model, options, names)(outputs["embedding"])
        answers.append(labelled_answers(model, names, {**outputs, "logits": logits}))
    return ExampleSamples(images, (), [names[label] for label in data.labels[chosen]]), answers
