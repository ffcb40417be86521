# SPDX-License-Identifier: Apache-2.0
"""Verbosity of a command on standard error: `-q`, the default, or `-v`."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from saccade.core.escaping import escaped_message

_LEVEL = ContextVar("saccade_verbosity", default=logging.INFO)


def level() -> int:
    """Return the lowest log level to show: WARNING with `-q`, DEBUG with `-v`."""
    return _LEVEL.get()


def is_quiet() -> bool:
    """Return True if neither progress nor notes are shown."""
    return level() > logging.INFO


def note(text: str) -> None:
    """Print a note on standard error, unless `-q` is given."""
    if not is_quiet():
        print(escaped_message(text), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a line of the program on standard error, also with `-q`."""
    print(escaped_message(f"saccade: {text}"), file=sys.stderr, flush=True)


_NOTED: set[str] = set()


def note_once(text: str) -> None:
    """Print a note that this process has not printed yet."""
    if text not in _NOTED:
        _NOTED.add(text)
        note(text)


@contextmanager
def verbosity(*, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Set the verbosity inside the block."""
    chosen = logging.WARNING if quiet else logging.DEBUG if verbose else level()
    token = _LEVEL.set(chosen)
    try:
        yield
    finally:
        _LEVEL.reset(token)


@contextmanager
def log_shown(
    formatter: logging.Formatter | None = None, least: int = logging.DEBUG
) -> Iterator[None]:
    """Show the log on standard error at this level and above, as text without a formatter."""
    logger = logging.getLogger("saccade")
    handler = logging.StreamHandler()
    text = EscapedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(formatter or text)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(least)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class EscapedFormatter(logging.Formatter):
    """Formatter that escapes foreign text, which could forge log lines or control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, with further lines indented."""
        return escaped_message(super().format(record))
