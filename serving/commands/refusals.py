# SPDX-License-Identifier: Apache-2.0
"""Messages for command lines that the parser refuses: found, expected, what to do."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_type_hints

from saccade.core.checks import did_you_mean
from saccade.core.errors import SaccadeError
from saccade.models.families import FAMILIES, entries
from saccade.serving.commands.command import Command

_OF_ALL = ("--help", "--json", "--quiet", "--verbose")


def known_command(word: str, commands: Iterable[str]) -> str:
    """Return the word if it is a command.

    Raises: SaccadeError if it is not.
    """
    if word in (commands := tuple(commands)):
        return word
    if word.startswith("-"):
        raise SaccadeError(
            f"found {word!r:.60}, expected a command first, as in `saccade export --help`. "
            "`saccade --help` lists the commands."
        )
    raise SaccadeError(
        f"{word!r:.60} is not a command.{did_you_mean(word, commands)} "
        "`saccade --help` lists the commands."
    )


def _flags(command: Command) -> tuple[str, ...]:
    """Return every option of a command as the user types it."""
    hints = get_type_hints(command.verb)
    names = []
    for parameter in inspect.signature(command.verb).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            names += [(field.name, field.default is True) for field in fields(kind)]
        elif parameter.default is not inspect.Parameter.empty:
            names.append((parameter.name, parameter.default is True))
    flags = (f"--{'no-' if on else ''}{name.replace('_', '-')}" for name, on in names)
    return tuple(dict.fromkeys((*flags, *_OF_ALL)))


@contextmanager
def in_words(command: Command, given: Sequence[str]) -> Iterator[None]:
    """Raise what the parser refuses inside the block as a SaccadeError.

    `given` is the command line. Versions of the parser that do not report what they refuse print
    their own message.
    """
    hook: Any = None
    with suppress(ImportError):
        hook = getattr(import_module("tyro._errors"), "on_parse_error", None)
    if hook is None:
        yield
        return
    words = _Words(command, given)

    def refuse(event: Any) -> None:
        if (words_of := words.known.get(type(event).__name__)) is not None:
            raise SaccadeError(words_of(event))

    with hook(refuse):
        yield


class _Words:
    """The messages of one command, by kind of refusal."""

    def __init__(self, command: Command, given: Sequence[str]) -> None:
        self._called, self._given = f"saccade {command.name}", given
        self._flags = _flags(command)
        self._example = f"For example: {command.example}"
        self.known: Mapping[str, Callable[[Any], str]] = {
            "UnrecognizedArgs": lambda event: self._unknown(event.tokens),
            "MissingArgs": self._missing,
            "InvalidChoice": self._choice,
            "BadValue": self._value,
            "InstantiationFailure": self._unread,
        }

    def _unknown(self, words: list[str]) -> str:
        options = [word for word in words if word.startswith("-") and word != "-"]
        if not options:
            return (
                f"{self._called}: found {words[0]!r:.60} after the last argument it takes. "
                f"Quote paths that contain spaces. See: {self._called} --help"
            )
        option = options[0].partition("=")[0]
        close = did_you_mean(option.replace("_", "-"), self._flags)
        return (
            f"{self._called} has no option {option:.60}.{close} "
            f"List its options with: {self._called} --help"
        )

    def _missing(self, event: Any) -> str:
        # A misspelt option leaves the right one missing.
        if any(word.startswith("-") for word in event.unrecognized_tokens):
            return self._unknown(event.unrecognized_tokens)
        wanted = [_described(each.arg) for each in event.missing_arguments]
        return f"{self._called} needs {' and '.join(wanted)}. {self._example}"

    def _choice(self, event: Any) -> str:
        # The parser gives the choices of an optional option in no particular order.
        choices = sorted(choice for choice in event.choices if choice != "None")
        return (
            f"{_name(event.argument)}: found {event.value!r:.60}, expected one of "
            f"{', '.join(choices)}.{did_you_mean(event.value, choices)}"
            f"{_families_with(event.value, choices)}"
        )

    def _value(self, event: Any) -> str:
        argument = event.argument
        # An unknown option may come before the one whose value is missing.
        known = {_positive(flag) for flag in self._flags}
        options = [word for word in self._given if word.startswith("--") and len(word) > 2]
        if unknown := [word for word in options if _positive(word) not in known]:
            return self._unknown(unknown)
        metavar = argument.lowered.metavar
        return f"{_name(argument)}: found no value, expected {metavar}. {self._example}"

    def _unread(self, event: Any) -> str:
        if event.argument is None:
            return f"{self._called}: {event.message}. {self._example}"
        return f"{_name(event.argument)}: {event.message}. {self._example}"


def _positive(word: str) -> str:
    """Return the bare name of an option: `option` for `--no-option=value`."""
    return word.partition("=")[0].replace("_", "-").removeprefix("--").removeprefix("no-")


def _families_with(trunk: str, choices: Sequence[str]) -> str:
    """Return a hint for the name of an architecture where a family is expected."""
    if set(choices) != set(FAMILIES):
        return ""
    known = sorted(family for family, entry in entries() if trunk.lower() in entry.architectures)
    return (
        f" Models with a {trunk.lower()} trunk are of family {' or '.join(known)}." if known else ""
    )


def _name(argument: Any) -> str:
    if argument.is_positional():
        return str(argument.field.intern_name).replace("_", " ")
    return str(argument.lowered.name_or_flags[-1])


def _described(argument: Any) -> str:
    text = argument.field.helptext
    text = (text() if callable(text) else text) or ""
    written = "" if argument.is_positional() else f" {argument.lowered.metavar}"
    return f"{_name(argument)}{written}" + (f" ({text.rstrip('.')})" if text else "")
