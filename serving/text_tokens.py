# SPDX-License-Identifier: Apache-2.0
"""Texts to the token ids that a model takes, by what its facts say of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.models.word_tokens import WordVocabulary
from saccade.plugins.errors import SaccadeError


def text_tokens(
    texts: Sequence[str],
    facts: Mapping[str, Any],
    *,
    merges: Path | None = None,
    truncate: bool = False,
) -> np.ndarray:
    """Each text as the text part takes it.

    Shapes: -> [n context_length] int64.
    Raises: SaccadeError if the model takes no text, a text is too long and may not be
        truncated, or the model's own merges file is wanted.
    """
    _check_texts(texts)
    if "context_length" not in facts:
        raise SaccadeError("This model takes no text: it has no text part. Name another one.")
    length, kind = int(facts["context_length"]), facts["tokenizer"]
    if kind == "words":
        words = WordVocabulary(facts["words"])
        return np.stack([words.encode(text, length, truncate=truncate) for text in texts])
    from saccade.models.clip_tokens import ClipTokenizer

    if kind == "custom" and merges is None:
        raise SaccadeError(
            "This model was trained with a tokenizer of its own. Pass its merges file."
        )
    tokenizer = ClipTokenizer(merges) if merges else ClipTokenizer()
    return np.asarray(tokenizer.encode(list(texts), length, truncate=truncate), np.int64)


def question_tokens(questions: Sequence[str], facts: Mapping[str, Any]) -> np.ndarray:
    """Each question as a VQA network takes it.

    Shapes: -> [n question_length] int64.
    Raises: SaccadeError if the model takes no question, or one is too long.
    """
    _check_texts(questions)
    if "question_length" not in facts:
        raise SaccadeError("This model takes no question. Name a model of family vqa.")
    words, length = WordVocabulary(facts["words"]), int(facts["question_length"])
    return np.stack([words.encode(question, length) for question in questions])


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise SaccadeError("Expected a list of texts, found a single one. Write [text].")
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise SaccadeError(f"Expected one or more texts, found {list(texts)!r:.80}.")
