# SPDX-License-Identifier: Apache-2.0
"""Texts as token ids: with CLIP's vocabulary, a user's merges, or a small model's words."""

import html
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, require
from saccade.models.word_tokens import WordVocabulary

CLIP_VOCABULARY = 49408
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_QUOTES = {
    **dict.fromkeys([0x02BC, *range(0x2018, 0x201C)], "'"),
    **dict.fromkeys(range(0x201C, 0x2020), '"'),
}
# Ligatures, full-width letters, and other letters that stand for two.
_COMPATIBLE = re.compile("[\ufb00-\ufb06\uff01-\uffef\u0132\u0133\u01c4-\u01cc\u01f1-\u01f3]")
BYTES = 512  # every byte, inside and at the end of a word


class TextEncoder:
    """Encodes texts as ids of one model; `merges` are pairs of letters separated by a space.

    Raises: SaccadeError if the tokenizer is unknown, or lacks its words or merges.
    """

    def __init__(
        self,
        tokenizer: str,
        context_length: int,
        *,
        words: Sequence[str] = (),
        merges: Sequence[str] = (),
        vocabulary: int = CLIP_VOCABULARY,
    ) -> None:
        self.context_length = context_length
        self._words = WordVocabulary(words) if tokenizer == "words" else None
        self._ids = _encoder(tokenizer, tuple(merges), vocabulary)
        self._start, self._end = vocabulary - 2, vocabulary - 1

    def __call__(self, texts: Sequence[str], *, truncate: bool = False) -> np.ndarray:
        """Return the ids of each text between start and end, followed by zeros.

        With `truncate`, a long text keeps its first tokens and its end.

        Shapes: -> [len(texts) context_length] int64.
        Raises: SaccadeError if a text is too long and may not be truncated.
        """
        rows = [self._row(text, truncate) for text in texts]
        return np.stack(rows) if rows else np.zeros((0, self.context_length), np.int64)

    def _row(self, text: str, truncate: bool) -> np.ndarray:
        if self._words is not None:
            return self._words.encode(text, self.context_length, truncate=truncate)
        ids, room = self._ids(clean(text)), self.context_length - 2
        if len(ids) > room and not truncate:
            raise SaccadeError(
                f"text {text!r:.60} has {len(ids)} tokens, expected at most {room} between start "
                "and end. Shorten it, or request truncation."
            )
        row = np.zeros(self.context_length, np.int64)
        kept = [self._start, *ids[:room], self._end]
        row[: len(kept)] = kept
        return row


def text_encoder(metadata: Mapping[str, Any]) -> TextEncoder:
    """Return the encoder of the model with this runtime metadata (`Sparo.runtime_metadata`).

    Raises: SaccadeError if the model has no text tower, or as TextEncoder.
    """
    if "tokenizer" not in metadata:
        raise SaccadeError(
            "this model has no text tower. Use one that has, such as CLIP with SPARO."
        )
    return TextEncoder(
        metadata["tokenizer"],
        metadata["context_length"],
        words=metadata["words"],
        merges=metadata["merges"],
        vocabulary=metadata["vocabulary"],
    )


def encode_texts(
    metadata: Mapping[str, Any], texts: Sequence[str], *, truncate: bool = False
) -> np.ndarray:
    """Return the ids of texts for the model with this runtime metadata.

    Shapes: -> [len(texts) context_length] int64.
    Raises: as `text_encoder` and TextEncoder.
    """
    return text_encoder(metadata)(texts, truncate=truncate)


def clean(text: str) -> str:
    """Return straight quotes, plain letters for ligatures and full-width ones, no HTML entities.

    Case is left to the tokenizer. CLIP's own code also repairs texts that were decoded with a
    wrong encoding; here such texts stay as they are.
    """
    text = _COMPATIBLE.sub(lambda match: unicodedata.normalize("NFKC", match.group()), text)
    text = unicodedata.normalize("NFC", text.translate(_QUOTES))
    return " ".join(html.unescape(html.unescape(text)).split())


@lru_cache(maxsize=4)
def _encoder(
    tokenizer: str, merges: tuple[str, ...], vocabulary: int
) -> Callable[[str], list[int]]:
    if tokenizer == "words":
        return lambda text: []
    if tokenizer == "clip":
        clip: Any = require("instant_clip_tokenizer", extra="text")
        return clip.Tokenizer().encode
    if tokenizer != "custom":
        raise SaccadeError(f"tokenizer {tokenizer!r} is unknown. Choose clip, words or custom.")
    if not merges:
        raise SaccadeError(
            "this model has a custom vocabulary, but its checkpoint contains no merges. "
            "Convert it again with --vocabulary and the merges file that it was trained with."
        )
    return _own([(first, second) for first, second in (merge.split() for merge in merges)])


def checked_merges(lines: Sequence[str], vocabulary: int) -> tuple[str, ...]:
    """Return the merges in a file's lines, as many as the vocabulary has room for.

    Raises: SaccadeError if there are fewer.
    """
    room = vocabulary - BYTES - 2
    pairs = [line.strip() for line in lines if "#version" not in line and len(line.split()) == 2]
    if not 0 <= room <= len(pairs):
        raise SaccadeError(
            f"the --vocabulary file has {len(pairs)} merges (lines of two words), expected "
            f"{room}: {vocabulary} tokens minus {BYTES} bytes, start and end. "
            "Pass the merges file that the model was trained with."
        )
    return tuple(pairs[:room])


def byte_letters() -> list[str]:
    """Return a visible letter for every byte, in the order of the first ids."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) for byte in visible] + [chr(256 + i) for i in range(len(others))]


def _own(merges: list[tuple[str, str]]) -> Callable[[str], list[int]]:
    package: Any = require("tokenizers", extra="text")
    letters = byte_letters()
    ends = [f"{letter}</w>" for letter in letters]
    entries = [*letters, *ends, *("".join(pair) for pair in merges)]
    ids = {entry: index for index, entry in enumerate(entries)}
    model = package.models.BPE(ids, merges, end_of_word_suffix="</w>", unk_token=None)
    tokenizer = package.Tokenizer(model)
    tokenizer.normalizer = package.normalizers.Lowercase()
    words = package.pre_tokenizers.Split(package.Regex(_WORDS), behavior="removed", invert=True)
    letters_of = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence([words, letters_of])
    return lambda text: tokenizer.encode(text).ids
