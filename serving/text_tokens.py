# SPDX-License-Identifier: Apache-2.0
"""Texts to the token ids that a model takes, by what its facts say of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
    check_texts(texts)
    if "context_length" not in facts:
        raise SaccadeError("This model takes no text: it has no text part. Name another one.")
    from saccade.models.clip_tokens import CLIP_VOCABULARY, TextEncoder

    encoder = TextEncoder(
        facts["tokenizer"],
        int(facts["context_length"]),
        words=facts["words"],
        merges=merges,
        vocabulary=int(facts.get("vocabulary", CLIP_VOCABULARY)),
    )
    return encoder(list(texts), truncate=truncate)


def check_texts(texts: Sequence[str]) -> None:
    """A list of texts that say something.

    Raises: SaccadeError for a single text, none, or an empty one.
    """
    if isinstance(texts, str):
        raise SaccadeError("Expected a list of texts, found a single one. Write [text].")
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise SaccadeError(f"Expected one or more texts, found {list(texts)!r:.80}.")
