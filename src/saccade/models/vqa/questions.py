# SPDX-License-Identifier: Apache-2.0
"""A question in words as the tokens that a model was taught to read."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.word_tokens import WordVocabulary

_DROPPED = re.compile(r"[.,'!?\"()*#:;]")
_LISTED_UNKNOWN = 1  # the id that the authors' vocabularies give to any other word


def question_tokens(
    metadata: Mapping[str, Any], text: str, *, truncate: bool = False
) -> np.ndarray:
    """A question as the model was taught to read it; `facts` are those of `VQA.facts`.

    Shapes: -> [question_length] int64.
    Raises: SaccadeError if there is no vocabulary, no word, or more words than fit.
    """
    words, length = metadata["words"], metadata["question_length"]
    if not words:
        raise SaccadeError(
            "question: this model has no vocabulary, it takes token ids. "
            "Convert it with --vocabulary FILE, or send the ids."
        )
    if metadata["vocabulary"] == "words":
        return WordVocabulary(words).encode(text, length, truncate=truncate)
    place = {word: index for index, word in enumerate(words)}
    asked = _DROPPED.sub("", text.lower()).replace("-", " ").replace("/", " ").split()
    if not asked or (len(asked) > length and not truncate):
        raise SaccadeError(
            f"question {text!r:.60} has {len(asked)} words, expected 1 to {length}. "
            "Shorten it, or ask for truncation."
        )
    tokens = np.zeros(length, dtype=np.int64)
    ids = [place.get(word, _LISTED_UNKNOWN) for word in asked[:length]]
    tokens[: len(ids)] = ids
    return tokens
