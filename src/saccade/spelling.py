# SPDX-License-Identifier: Apache-2.0
"""The known name that somebody probably meant."""

import difflib
from collections.abc import Iterable

_LONGEST = 100  # characters compared: the cost grows with their square


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name most like a word, if one is alike enough."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word[:_LONGEST].lower(), names, n=1)
    return names[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question to put behind a refusal, with a blank in front; nothing if no name is alike."""
    close = nearest(word, known)
    return f" Did you mean {close}?" if close is not None and close != word else ""
