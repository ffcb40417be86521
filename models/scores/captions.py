# SPDX-License-Identifier: Apache-2.0
"""Closeness of captions to what people wrote: CIDEr-D, BLEU-4, ROUGE-L.

attention.py measures how much captions repeat. Texts are split into lower-case words without
punctuation; the field's usual tokenizer (PTB, in Java) does the same for texts without apostrophes
and hyphens.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.word_tokens import split_words

_LENGTHS = (1, 2, 3, 4)
_SIGMA = 6.0  # words; for CIDEr-D's penalty on a different length
_BETA = 1.2  # for ROUGE-L: recall counts more
Grams = Counter[tuple[str, ...]]


def cider(captions: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
    """Return CIDEr-D, the variant reported as CIDEr, of each caption; the score is the mean.

    Counts are clipped to those of the reference, a difference d in length costs exp(-d^2 / 72),
    the weight of an n-gram is log(images / images whose references have it), and words are not
    stemmed.
    Units:  0 to 10; papers print it times 100.
    Shapes: captions n, references n times at least one -> [n].
    Raises: SaccadeError if the lengths differ or a caption has no reference.
    Source: Vedantam et al. 2015, section 4 and the extension CIDEr-D.
    """
    _check(captions, references)
    words = [[_words(text) for text in reference] for reference in references]
    documents: Grams = Counter()
    for word in words:
        documents.update({gram for text in word for n in _LENGTHS for gram in _grams(text, n)})
    total = math.log(len(captions))
    scores = []
    for text, others in zip(captions, words, strict=True):
        candidate = _words(text)
        against = [_similarity(candidate, other, documents, total) for other in others]
        scores.append(10 * sum(against) / len(against))
    return np.array(scores)


def _similarity(candidate: list[str], other: list[str], documents: Grams, total: float) -> float:
    penalty = math.exp(-((len(candidate) - len(other)) ** 2) / (2 * _SIGMA**2))
    similar = 0.0
    for n in _LENGTHS:
        first = _weighted(_grams(candidate, n), documents, total)
        second = _weighted(_grams(other, n), documents, total)
        norms = math.hypot(*first.values()) * math.hypot(*second.values())
        if norms > 0:
            both = sum(
                min(value, second[gram]) * second[gram]
                for gram, value in first.items()
                if gram in second
            )
            similar += penalty * both / norms
    return similar / len(_LENGTHS)


def _weighted(grams: Grams, documents: Grams, total: float) -> dict[tuple[str, ...], float]:
    return {
        gram: count * (total - math.log(max(1, documents[gram]))) for gram, count in grams.items()
    }


def bleu4(captions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return unsmoothed BLEU of n-grams of one to four words over the whole corpus.

    The brevity penalty uses the reference of the closest length; of two, the shorter one.
    Units:  0 to 1.
    Raises: SaccadeError if the lengths differ or a caption has no reference.
    Source: Papineni et al. 2002, section 2.
    """
    _check(captions, references)
    right, counts = np.zeros(4), np.zeros(4)
    length = reference_length = 0
    for text, others in zip(captions, references, strict=True):
        candidate, known = _words(text), [_words(other) for other in others]
        length += len(candidate)
        reference_length += min(
            (abs(len(reference) - len(candidate)), len(reference)) for reference in known
        )[1]
        for n in _LENGTHS:
            allowed: Grams = Counter()
            for reference in known:
                allowed |= _grams(reference, n)
            right[n - 1] += (_grams(candidate, n) & allowed).total()
            counts[n - 1] += max(0, len(candidate) - n + 1)
    if not right.all():
        return 0.0
    brevity = 1.0 if length >= reference_length else math.exp(1 - reference_length / length)
    return float(brevity * math.exp(np.log(right / counts).mean()))


def rouge_l(captions: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
    """Return each caption's ROUGE-L: the F-measure (beta 1.2) of the longest common subsequence.

    Precision and recall are each the best over the references.
    Units:  0 to 1.
    Shapes: captions n -> [n].
    Raises: SaccadeError if the lengths differ or a caption has no reference.
    Source: Lin 2004, section 3; beta as usual for captions.
    """
    _check(captions, references)
    scores = []
    for text, others in zip(captions, references, strict=True):
        candidate, known = _words(text), [_words(other) for other in others]
        common = [_common(candidate, reference) for reference in known]
        precision = max(common) / max(1, len(candidate))
        recall = max(
            many / max(1, len(reference)) for many, reference in zip(common, known, strict=True)
        )
        below = recall + _BETA**2 * precision
        scores.append((1 + _BETA**2) * precision * recall / below if below else 0.0)
    return np.array(scores)


def _words(text: str) -> list[str]:
    return [word for word in split_words(text) if word[0].isalnum()]


def _grams(words: list[str], n: int) -> Grams:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _common(words: list[str], other: list[str]) -> int:
    row = [0] * (len(other) + 1)
    for word in words:
        before = 0
        for place, theirs in enumerate(other, start=1):
            above = row[place]
            row[place] = before + 1 if theirs == word else max(above, row[place - 1])
            before = above
    return row[-1]


def _check(captions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if len(captions) != len(references) or not captions or not all(references):
        empty = sum(not reference for reference in references)
        raise SaccadeError(
            f"captions: found {len(captions)} captions and {len(references)} sets of references, "
            f"{empty} of them empty. Expected at least one caption, and at least one reference "
            "for each caption."
        )
