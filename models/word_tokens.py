# SPDX-License-Identifier: Apache-2.0
"""Words as token ids: the vocabulary of small models, stored in their checkpoints."""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from saccade.core.errors import SaccadeError

PAD, START, END, UNKNOWN = range(4)
SPECIAL = 4  # ids before the first word
_WORD = re.compile(r"\w+|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Split text into lower-case words and single punctuation marks."""
    return _WORD.findall(text.lower())


class WordVocabulary:
    """Words by id: 0 is padding, 1 start, 2 end, 3 any unknown word; the words follow.

    Raises: SaccadeError if a word occurs twice or is not a single word of `split_words`.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        wrong = [word for word in self.words if split_words(word) != [word]]
        if wrong or len(set(self.words)) != len(self.words):
            twice = sorted({word for word in self.words if self.words.count(word) > 1})
            raise SaccadeError(
                f"vocabulary: found {wrong[:3]} that are not single lower-case words and "
                f"{twice[:3]} more than once, expected distinct words. Correct the list."
            )
        self._ids = {word: SPECIAL + index for index, word in enumerate(self.words)}

    def __len__(self) -> int:
        return SPECIAL + len(self.words)

    def encode(self, text: str, length: int, *, truncate: bool = False) -> np.ndarray:
        """Return start, words, end and padding; with `truncate`, a long text keeps its first words.

        Shapes: -> [length] int64.
        Raises: SaccadeError if the text is too long and may not be truncated.
        """
        ids = [self._ids.get(word, UNKNOWN) for word in split_words(text)]
        if length < 2 or (len(ids) > length - 2 and not truncate):
            raise SaccadeError(
                f"text {text!r:.60} has {len(ids)} words, expected at most {max(length - 2, 0)}: "
                f"{length} tokens minus start and end. Shorten it, or request truncation."
            )
        tokens = np.full(length, PAD, dtype=np.int64)
        kept = [START, *ids[: length - 2], END]
        tokens[: len(kept)] = kept
        return tokens

    def decode(self, ids: Iterable[int]) -> str:
        """Join the words before the first end token with spaces; an unknown word is `?`.

        Raises: SaccadeError if an id is outside the vocabulary.
        """
        words = []
        for number in (int(value) for value in ids):
            if not 0 <= number < len(self):
                raise SaccadeError(
                    f"token {number} is outside the vocabulary of {len(self)} tokens. "
                    "Use the vocabulary of the model that produced it."
                )
            if number == END:
                break
            if number >= UNKNOWN:
                words.append("?" if number == UNKNOWN else self.words[number - SPECIAL])
        return " ".join(words)


def frequent_words(texts: Iterable[str], *, most: int, least_count: int = 1) -> tuple[str, ...]:
    """Return the most frequent words of texts, in the order of their frequency, then of letters.

    `most` limits their number, and `least_count` is how often a word has to occur.
    """
    counted = Counter(word for text in texts for word in split_words(text))
    kept = [(-count, word) for word, count in counted.items() if count >= least_count]
    return tuple(word for _, word in sorted(kept)[:most])
