# SPDX-License-Identifier: Apache-2.0
"""Scores of captions against five true sentences a scene, by the way they were searched."""

from collections.abc import Sequence

import numpy as np

from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.load_inputs import Inputs, images_of
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.scenes import (
    CAPTIONED_SCENES,
    REFERENCES,
    drawn_scenes,
    references,
    scenes_sha256,
)
from saccade.models.captioner.caption_search import Caption, best_captions, step_of
from saccade.models.data.scene_statements import is_true
from saccade.models.scores.attention import jensen_shannon, repetition, zero_share
from saccade.models.scores.captions import bleu4, cider, rouge_l
from saccade.models.scores.intervals import bootstrap_of
from saccade.models.scores.results import EvaluationResult, Score, mean, proportion
from saccade.models.word_tokens import WordVocabulary

_CHUNK = 50  # images searched at once
_RESAMPLES = 200  # of the corpus: its figures are computed anew each time


def caption(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """CIDEr-D, BLEU-4, ROUGE-L, REP and truth; of the attention JS and the share of zeros.

    Captions are those that a request gets which names no beam.

    Raises: SaccadeError if the data has no sentences, or the model takes no image.
    """
    drawn = drawn_scenes(model.images(), options, CAPTIONED_SCENES)
    rng = np.random.default_rng(options.seed)
    truth = [references(objects, rng) for objects in drawn.objects]
    captions = _captions(model, drawn.images)
    words = WordVocabulary(model.runtime_metadata["words"])
    texts = [words.decode(caption.tokens) for caption in captions]
    per_caption = cider(texts, truth)
    scores = (
        mean("CIDEr-D", per_caption, unit="CIDEr-D"),
        _bleu(texts, truth),
        mean("ROUGE-L", rouge_l(texts, truth)),
        mean("REP", _repetition(texts, truth), unit="per 100 words", higher=False),
        proportion("true", np.array(list(map(is_true, texts, drawn.objects)))),
        *_attention_scores(captions),
    )
    sha256 = scenes_sha256(drawn, [text for caption_set in truth for text in caption_set])
    protocol = f"beam {model.runtime_metadata['beam']}, {REFERENCES} references a scene"
    return EvaluationResult(model.name, "caption", "shapes", sha256, scores, per_caption, protocol)


def _captions(model: EvaluatedModel, images: np.ndarray) -> list[Caption]:
    encode, metadata = model.component("encode"), model.runtime_metadata
    step = step_of(model.component("step"))
    captions = []
    for start in range(0, len(images), _CHUNK):
        state = encode({"image": images[start : start + _CHUNK]})
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
    """A figure of the whole corpus, with the interval of resampled corpora."""

    def of(chosen: np.ndarray) -> float:
        return bleu4([texts[index] for index in chosen], [truth[index] for index in chosen])

    interval = bootstrap_of(of, len(texts), samples=_RESAMPLES)
    return Score("BLEU-4", bleu4(texts, truth), interval, len(texts))


def _repetition(texts: Sequence[str], truth: Sequence[Sequence[str]]) -> list[float]:
    return [
        repetition(text.split(), [text.split() for text in others])
        for text, others in zip(texts, truth, strict=True)
    ]


def _attention_scores(captions: list[Caption]) -> list[Score]:
    """Scores of the attention of captions that have words; without words there is no attention."""
    maps = [caption.attention for caption in captions if len(caption.attention)]
    moving = [jensen_shannon(weights) for weights in maps if len(weights) > 1]
    zeros = [share for weights in maps for share in zero_share(weights)]
    scores = [mean("JS", moving, unit="nats")] if moving else []
    return scores + ([mean("zero attention", zeros)] if zeros else [])


def load_inputs(variant: VariantFiles, data: str, count: int) -> Inputs:
    """The first scenes.

    Shapes: image [n h w c], n at most `count`.
    Raises: SaccadeError if the model takes no image.
    """
    drawn = drawn_scenes(images_of(variant), EvaluateOptions(limit=count), count)
    return {"encode": {"image": drawn.images}}
