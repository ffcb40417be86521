# SPDX-License-Identifier: Apache-2.0
"""How much a command says on standard error beside its answer: `-q`, nothing, or `-v`."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from saccade.escaped import escaped_message

_LEVEL = ContextVar("saccade_verbosity", default=logging.INFO)


def level() -> int:
    """The least level of the log that is shown: WARNING with `-q`, DEBUG with `-v`."""
    return _LEVEL.get()


def is_quiet() -> bool:
    """True if neither progress nor notes are shown."""
    return level() > logging.INFO


def note(text: str) -> None:
    """Print what helps a reader and is no answer; nothing with `-q`."""
    if not is_quiet():
        print(escaped_message(text), file=sys.stderr, flush=True)


@contextmanager
def verbosity(*, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Say less, or more, for as long as the block runs."""
    chosen = logging.WARNING if quiet else logging.DEBUG if verbose else level()
    token = _LEVEL.set(chosen)
    try:
        yield
    finally:
        _LEVEL.reset(token)


@contextmanager
def log_shown() -> Iterator[None]:
    """Show the log on standard error, down to its smallest steps."""
    logger = logging.getLogger("saccade")
    handler = logging.StreamHandler()
    handler.setFormatter(_Escaped("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _Escaped(logging.Formatter):
    """What others wrote cannot forge a line of the log, or a command to the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped_message(super().format(record))
