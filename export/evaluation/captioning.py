# SPDX-License-Identifier: Apache-2.0
"""What captions are worth: against five true sentences a scene, and how they were looked for."""

from collections.abc import Sequence

import numpy as np

from saccade.export.evaluation.found import Found, Score, mean
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.scenes import (
    CAPTIONED_SCENES,
    drawn_scenes,
    references,
    scenes_sha256,
)
from saccade.export.evaluation.subject import Subject
from saccade.models.caption_search import Caption, greedy_search, step_of
from saccade.models.scores.attention import jensen_shannon, repetition, zero_share
from saccade.models.scores.captions import bleu4, cider, rouge_l
from saccade.models.scores.intervals import bootstrap_of
from saccade.models.word_tokens import WordVocabulary
from saccade.plugins.errors import SaccadeError

_CHUNK = 50  # images searched at once
_RESAMPLES = 200  # of the corpus: its figures are computed anew each time


def caption(subject: Subject, options: EvaluateOptions) -> Found:
    """CIDEr-D, BLEU-4, ROUGE-L, and of the attention: REP, JS and the share of zeros.

    Captions are the greedy ones.

    Raises: SaccadeError if the data has no sentences, or the model takes no image.
    """
    if subject.preprocessing is None:
        raise SaccadeError(f"{subject.name}: takes no image. Choose another --task.")
    drawn = drawn_scenes(subject.preprocessing, options, CAPTIONED_SCENES)
    rng = np.random.default_rng(options.seed)
    truth = [references(objects, rng) for objects in drawn.objects]
    captions = _captions(subject, drawn.images)
    words = WordVocabulary(subject.facts["words"])
    texts = [words.decode(each.tokens) for each in captions]
    per_caption = cider(texts, truth)
    scores = (
        mean("CIDEr-D", per_caption, unit="CIDEr-D"),
        _bleu(texts, truth),
        mean("ROUGE-L", rouge_l(texts, truth)),
        mean("REP", _repetition(texts, truth), unit="per 100 words", higher=False),
        *_attention_scores(captions),
    )
    sha256 = scenes_sha256(drawn, [text for each in truth for text in each])
    return Found(subject.name, "caption", "shapes", sha256, scores, per_caption)


def _captions(subject: Subject, images: np.ndarray) -> list[Caption]:
    encode, facts = subject.part("encode"), subject.facts
    step = step_of(subject.part("step"))
    found = []
    for start in range(0, len(images), _CHUNK):
        state = encode({"image": images[start : start + _CHUNK]})
        found += greedy_search(
            step,
            state,
            start=int(facts["start"]),
            end=int(facts["end"]),
            max_length=int(facts["max_length"]),
        )
    return found


def _bleu(texts: Sequence[str], truth: Sequence[Sequence[str]]) -> Score:
    """A figure of the whole corpus, with the interval of resampled corpora."""

    def of(chosen: np.ndarray) -> float:
        return bleu4([texts[index] for index in chosen], [truth[index] for index in chosen])

    interval = bootstrap_of(of, len(texts), samples=_RESAMPLES)
    return Score("BLEU-4", bleu4(texts, truth), interval, len(texts))


def _repetition(texts: Sequence[str], truth: Sequence[Sequence[str]]) -> list[float]:
    return [
        repetition(text.split(), [each.split() for each in others])
        for text, others in zip(texts, truth, strict=True)
    ]


def _attention_scores(captions: list[Caption]) -> list[Score]:
    maps = [each.attention for each in captions if len(each.attention)]
    zeros = np.concatenate([zero_share(each) for each in maps])
    moving = [jensen_shannon(each) for each in maps if len(each) > 1]
    return [
        mean("JS", moving, unit="nats"),
        mean("zero attention", zeros),
    ]
