# SPDX-License-Identifier: Apache-2.0
"""Conversion of text to a model's token ids, as its runtime metadata describes."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError

LOGGER = logging.getLogger("saccade.texts")


def text_tokens(
    texts: Sequence[str], metadata: Mapping[str, Any], *, truncate: bool = False
) -> np.ndarray:
    """Return the token ids of each text for the text component; log how many texts were cut.

    Shapes: -> [n context_length] int64.
    Raises: SaccadeError if the model takes no text, or if one of the texts is too long and
        `truncate` is false.
    """
    from saccade.models.sparo.text_tokens import encode_texts

    check_texts(texts)
    if "context_length" not in metadata:
        raise SaccadeError(
            "This model takes no text: it has no text component. Choose another model."
        )
    rows = encode_texts(metadata, texts, truncate=truncate)
    full = [text for text, row in zip(texts, rows, strict=True) if truncate and row[-1]]
    _say_cut(
        sum(_is_too_long(text, metadata) for text in full), len(texts), metadata["context_length"]
    )
    return rows


def _say_cut(cut: int, texts: int, length: int) -> None:
    if cut:
        LOGGER.warning("%d of %d texts were cut to %d tokens, as requested.", cut, texts, length)


def _is_too_long(text: str, metadata: Mapping[str, Any]) -> bool:
    from saccade.models.sparo.text_tokens import encode_texts

    try:
        encode_texts(metadata, [text])
    except SaccadeError:
        return True
    return False


def question_tokens(
    questions: Sequence[str], metadata: Mapping[str, Any], *, truncate: bool = False
) -> np.ndarray:
    """Return the token ids of each question; log how many questions were cut.

    Shapes: -> [n question_length] int64.
    Raises: SaccadeError if a question is too long and `truncate` is false, or if the model has no
        vocabulary.
    """
    from saccade.models.vqa.questions import question_tokens as tokens_of

    check_texts(questions)
    rows, cut = [], 0
    for question in questions:
        try:
            rows.append(tokens_of(metadata, question))
        except SaccadeError:
            if not truncate:
                raise
            rows.append(tokens_of(metadata, question, truncate=True))
            cut += 1
    _say_cut(cut, len(questions), metadata["question_length"])
    return np.stack(rows)


def check_words(questions: Sequence[str], metadata: Mapping[str, Any]) -> None:
    """Check that the model knows every word of the questions.

    Raises: SaccadeError that lists the unknown words.
    """
    for question in questions:
        if unknown := ", ".join(map(repr, unknown_words(question, metadata))):
            raise SaccadeError(
                f"question {question!r:.60}: the model does not know {unknown}. Use other words, "
                "or drop `strict` to have them treated as unknown words."
            )


def unknown_words(question: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a question that the model does not know, each once."""
    from saccade.models.vqa.questions import unknown_words as words_of

    return words_of(metadata, question)


def check_texts(texts: Sequence[str]) -> None:
    """Check that `texts` is a list of non-empty strings.

    Raises: SaccadeError for a single string, an empty list, or an empty string.
    """
    if isinstance(texts, str):
        raise SaccadeError("Found a single text, expected a list of texts. Pass [text].")
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise SaccadeError(f"Found {list(texts)!r:.80}, expected one or more non-empty texts.")
