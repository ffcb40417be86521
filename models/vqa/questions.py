# SPDX-License-Identifier: Apache-2.0
"""Questions in words, converted to a model's tokens."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.word_tokens import WordVocabulary, split_words

_DROPPED = re.compile(r"[.,'!?\"()*#:;]")
_LISTED_UNKNOWN = 1  # the id of any other word in the authors' vocabularies


def unknown_words(metadata: Mapping[str, Any], text: str) -> tuple[str, ...]:
    """Return the distinct words of a question that the model does not know and reads all alike."""
    known = set(metadata["words"] or ())
    if metadata["vocabulary"] == "words":
        words = [word for word in split_words(text) if word[0].isalnum()]
    else:
        words = _words_of(text)
    return tuple(dict.fromkeys(word for word in words if known and word not in known))


def _words_of(text: str) -> list[str]:
    return _DROPPED.sub("", text.lower()).replace("-", " ").replace("/", " ").split()


def question_tokens(
    metadata: Mapping[str, Any], text: str, *, truncate: bool = False
) -> np.ndarray:
    """Return a question as tokens; `metadata` is that of `VQA.runtime_metadata`.

    Shapes: -> [question_length] int64.
    Raises: SaccadeError if there is no vocabulary, no word, or more words than fit.
    """
    words, length = metadata["words"], metadata["question_length"]
    if not words:
        raise SaccadeError(
            "question: this model has no vocabulary and takes token ids. "
            "Convert it with --vocabulary FILE, or send the ids."
        )
    if metadata["vocabulary"] == "words":
        return WordVocabulary(words).encode(text, length, truncate=truncate)
    place = {word: index for index, word in enumerate(words)}
    spelled = _words_of(text)
    if not spelled or (len(spelled) > length and not truncate):
        raise SaccadeError(
            f"question {text!r:.60} has {len(spelled)} words, expected 1 to {length}. "
            "Shorten it, or request truncation."
        )
    tokens = np.zeros(length, dtype=np.int64)
    ids = [place.get(word, _LISTED_UNKNOWN) for word in spelled[:length]]
    tokens[: len(ids)] = ids
    return tokens
