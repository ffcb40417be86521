# SPDX-License-Identifier: Apache-2.0
"""Score captions against five true sentences per scene."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.evaluated_model import DataSplit, EvaluatedModel, chunks, origin
from saccade.exporter.evaluation.examples import ExampleAnswers, ExampleSamples, VariantAnswer
from saccade.exporter.evaluation.scenes import (
    CAPTIONED_SCENES,
    drawn_scenes,
    references,
    scenes_sha256,
)
from saccade.exporter.evaluation.tasks import EvaluateOptions, Inputs
from saccade.models.captioner.caption_search import SearchedCaption, best_captions, step_of
from saccade.models.data.datasets import HELD_OUT
from saccade.models.data.image_texts import own_captions
from saccade.models.data.scene_texts import is_true
from saccade.models.data.shapes import Object
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.attention import jensen_shannon, repetition, zero_share
from saccade.models.scores.captions import bleu4, cider, rouge_l
from saccade.models.scores.results import EvaluationResult, Score, bootstrap_of, mean, proportion
from saccade.models.word_tokens import WordVocabulary

_CHUNK = 50  # images captioned at the same time
_RESAMPLES = 200  # of the corpus, each with its own score


@dataclass(frozen=True)
class CaptionData(DataSplit):
    """Images of one split with their captions.

    Shapes: images [n h w c] uint8, an array or `samples.images.Images`.
    """

    images: np.ndarray
    references: Sequence[Sequence[str]]
    objects: Sequence[Sequence[Object]] = ()  # of scenes, which tell whether a sentence is true


def captioned_of(preprocessing: Preprocessing, options: EvaluateOptions) -> CaptionData:
    """Return scenes with true sentences, or the user's images with their captions.

    Raises: SaccadeError if the data has no sentences, or does not fit the model.
    """
    if options.data in (None, "shapes"):
        drawn = drawn_scenes(preprocessing, options, CAPTIONED_SCENES)
        rng = np.random.default_rng(options.seed)
        truth = [references(objects, rng) for objects in drawn.objects]
        texts = [text for group in truth for text in group]
        sha256 = scenes_sha256(drawn, texts)
        given = drawn.images, truth, drawn.objects
        return CaptionData(*given, name="shapes", digest=lambda: sha256)
    own = own_captions(str(options.data), options.split or HELD_OUT, preprocessing, options.asked)
    most = slice(options.limit)
    return CaptionData(own.images[most], own.captions[most], **origin(own))


def caption(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score CIDEr-D, BLEU-4, ROUGE-L, REP and truth, and of attention JS and the share of zeros.

    Captions are generated with the default beam size. Only of scenes is it known which are true.

    Raises: SaccadeError if the data has no sentences, or the model takes no image.
    """
    drawn = captioned_of(model.images(), options)
    truth = drawn.references
    captions = _captions(model, drawn.images)
    words = WordVocabulary(model.runtime_metadata["words"])
    texts = [words.decode(caption.tokens) for caption in captions]
    per_caption = cider(texts, truth)
    scores = [
        mean("CIDEr-D", per_caption, unit="CIDEr-D"),
        _bleu(texts, truth),
        mean("ROUGE-L", rouge_l(texts, truth)),
        mean("REP", _repetition(texts, truth), unit="per 100 words", higher=False),
    ]
    if drawn.objects:
        scores.append(proportion("true", np.array(list(map(is_true, texts, drawn.objects)))))
    scores += _attention_scores(captions)
    fewest, most = min(map(len, truth)), max(map(len, truth))
    count = f"{most}" if fewest == most else f"{fewest} to {most}"
    count += " reference" if most == 1 else " references"
    what = "a scene" if drawn.objects else "an image"
    protocol = f"beam {model.runtime_metadata['beam']}, {count} {what}"
    return model.result("caption", drawn, scores, per_caption, protocol)


def _captions(model: EvaluatedModel, images: np.ndarray) -> list[SearchedCaption]:
    """Generate captions with the default beam size.

    Shapes: images uint8 [n h w c].
    """
    encode, metadata = model.component("encode"), model.runtime_metadata
    step = step_of(model.component("step"))
    captions = []
    for rows in chunks(len(images), _CHUNK):
        state = encode({"image": images[rows]})
        captions += best_captions(
            step,
            state,
            beam=int(metadata["beam"]),
            start=int(metadata["start"]),
            end=int(metadata["end"]),
            max_length=int(metadata["max_length"]),
        )
    return captions


def _bleu(texts: Sequence[str], truth: Sequence[Sequence[str]]) -> Score:
    """Score the whole corpus, with an interval from resampled corpora."""

    def of(chosen: np.ndarray) -> float:
        return bleu4([texts[index] for index in chosen], [truth[index] for index in chosen])

    interval = bootstrap_of(of, len(texts), samples=_RESAMPLES)
    return Score("BLEU-4", bleu4(texts, truth), interval, len(texts))


def _repetition(texts: Sequence[str], truth: Sequence[Sequence[str]]) -> list[float]:
    return [
        repetition(text.split(), [text.split() for text in others])
        for text, others in zip(texts, truth, strict=True)
    ]


def _attention_scores(captions: list[SearchedCaption]) -> list[Score]:
    """Score the attention of captions with at least one word; others have no attention."""
    maps = [caption.attention for caption in captions if len(caption.attention)]
    moving = [jensen_shannon(weights) for weights in maps if len(weights) > 1]
    zeros = [share for weights in maps for share in zero_share(weights)]
    scores = [mean("JS", moving, unit="nats")] if moving else []
    return scores + ([mean("zero attention", zeros)] if zeros else [])


def load_inputs(variant: VariantFiles, data: str, count: int, skip_bad: int = 0) -> Inputs:
    """Return the first images.

    Shapes: image [n h w c], n at most `count`.
    Raises: SaccadeError if the model takes no image.
    """
    options = EvaluateOptions(data=data or None, limit=count, skip_bad=skip_bad)
    drawn = captioned_of(variant.images(), options)
    return {"encode": {"image": np.asarray(drawn.images[np.arange(len(drawn.images))])}}


def caption_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> ExampleAnswers:
    """Return captions, with the mean attention map over their words."""
    drawn = captioned_of(models[0].images(), options)
    truths = [known[0] for known in drawn.references]
    images = drawn.images[chosen]
    answers = []
    for model in models:
        words = WordVocabulary(model.runtime_metadata["words"])
        answers.append(
            [
                VariantAnswer(
                    words.decode(caption.tokens),
                    focus=caption.attention.mean(0) if len(caption.attention) else None,
                )
                for caption in _captions(model, images)
            ]
        )
    return ExampleSamples(images, (), [truths[index] for index in chosen]), answers
