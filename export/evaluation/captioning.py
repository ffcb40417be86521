# SPDX-License-Identifier: Apache-2.0
"""What captions are worth: against five true sentences a scene, and how they were looked for."""

from collections.abc import Sequence

import numpy as np

from saccade.export.artefact.variant_files import VariantParts
from saccade.export.evaluation.load_inputs import Inputs, images_of
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.scenes import (
    CAPTIONED_SCENES,
    REFERENCES,
    drawn_scenes,
    references,
    scenes_sha256,
)
from saccade.export.evaluation.subject import Subject
from saccade.models.captioner.caption_search import Caption, best_captions, step_of
from saccade.models.data.scene_statements import is_true
from saccade.models.scores.attention import jensen_shannon, repetition, zero_share
from saccade.models.scores.captions import bleu4, cider, rouge_l
from saccade.models.scores.intervals import bootstrap_of
from saccade.models.scores.results import Found, Score, mean, proportion
from saccade.models.word_tokens import WordVocabulary

_CHUNK = 50  # images searched at once
_RESAMPLES = 200  # of the corpus: its figures are computed anew each time


def caption(subject: Subject, options: EvaluateOptions) -> Found:
    """CIDEr-D, BLEU-4, ROUGE-L, REP and truth; of the attention JS and the share of zeros.

    Captions are those that a request gets which names no beam.

    Raises: SaccadeError if the data has no sentences, or the model takes no image.
    """
    drawn = drawn_scenes(subject.images(), options, CAPTIONED_SCENES)
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
        proportion("true", np.array(list(map(is_true, texts, drawn.objects)))),
        *_attention_scores(captions),
    )
    sha256 = scenes_sha256(drawn, [text for each in truth for text in each])
    protocol = f"beam {subject.facts['beam']}, {REFERENCES} references a scene"
    return Found(subject.name, "caption", "shapes", sha256, scores, per_caption, protocol)


def _captions(subject: Subject, images: np.ndarray) -> list[Caption]:
    encode, facts = subject.part("encode"), subject.facts
    step = step_of(subject.part("step"))
    found = []
    for start in range(0, len(images), _CHUNK):
        state = encode({"image": images[start : start + _CHUNK]})
        found += best_captions(
            step,
            state,
            beam=int(facts["beam"]),
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
    """What captions with words show; a model that says nothing looks nowhere."""
    maps = [each.attention for each in captions if len(each.attention)]
    moving = [jensen_shannon(each) for each in maps if len(each) > 1]
    zeros = [share for each in maps for share in zero_share(each)]
    found = [mean("JS", moving, unit="nats")] if moving else []
    return found + ([mean("zero attention", zeros)] if zeros else [])


def load_inputs(variant: VariantParts, data: str, count: int) -> Inputs:
    """The first scenes.

    Shapes: image [n h w c], n at most `count`.
    Raises: SaccadeError if the model takes no image.
    """
    drawn = drawn_scenes(images_of(variant), EvaluateOptions(limit=count), count)
    return {"encode": {"image": drawn.images}}
