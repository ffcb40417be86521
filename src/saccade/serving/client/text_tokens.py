# SPDX-License-Identifier: Apache-2.0
"""Texts to the token ids that a model takes, by what its runtime metadata says of them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saccade.errors import SaccadeError

LOGGER = logging.getLogger("saccade.texts")


def text_tokens(
    texts: Sequence[str], metadata: Mapping[str, Any], *, truncate: bool = False
) -> np.ndarray:
    """Each text as the text component takes it; says how many were cut.

    Shapes: -> [n context_length] int64.
    Raises: SaccadeError if the model takes no text, or a text is too long and may not be
        truncated.
    """
    from saccade.models.sparo.text_tokens import encode_texts

    check_texts(texts)
    if "context_length" not in metadata:
        raise SaccadeError("This model takes no text: it has no text component. Name another one.")
    rows = encode_texts(metadata, texts, truncate=truncate)
    full = [text for text, row in zip(texts, rows, strict=True) if truncate and row[-1]]
    _say_cut(
        sum(_is_too_long(text, metadata) for text in full), len(texts), metadata["context_length"]
    )
    return rows


def _say_cut(cut: int, texts: int, length: int) -> None:
    if cut:
        LOGGER.warning("%d of %d texts cut to %d tokens, as asked.", cut, texts, length)


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
    """Each question as a network that answers takes it; says how many were cut.

    Shapes: -> [n question_length] int64.
    Raises: SaccadeError if a question is too long and may not be truncated, or the model has no
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


def check_texts(texts: Sequence[str]) -> None:
    """A list of texts that say something.

    Raises: SaccadeError for a single text, none, or an empty one.
    """
    if isinstance(texts, str):
        raise SaccadeError("Expected a list of texts, found a single one. Write [text].")
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise SaccadeError(f"Expected one or more texts, found {list(texts)!r:.80}.")
