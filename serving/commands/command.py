# SPDX-License-Identifier: Apache-2.0
"""Verbs as commands: options become flags; results become text, JSON and an exit code.

A verb is a function that takes its inputs and an options dataclass. Its docstring is the command's
help, whose first line is the summary and whose end are two examples. The fields of the options are
its flags. Every command also has `--json`, `-q` and `-v`.
"""

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, get_type_hints

from tyro.conf import Positional, arg

from saccade.core.errors import SaccadeError
from saccade.core.verbosity import log_shown, verbosity
from saccade.serving.commands.closings import Closing

LOGGER = logging.getLogger("saccade.commands")
_EXAMPLES = "Examples:\n"  # the heading in a docstring


class Result(Protocol):
    """Result of a verb. A result that can mean failure also has an `exit_code`."""

    def to_dict(self) -> Any:
        """Return plain values for JSON."""

    def to_text(self) -> Any:
        """Return text for the terminal, something that rich prints, or None to print nothing."""


Verb = Callable[..., Result]


@dataclass(frozen=True)
class Answer:
    """Result that consists of plain data and, optionally, text and an exit code."""

    data: Any
    text: Any = None
    exit_code: int = 0

    def to_dict(self) -> Any:
        """Return plain values for JSON."""
        return self.data

    def to_text(self) -> Any:
        """Return the text for the terminal."""
        return self.text


@dataclass(frozen=True)
class Outcome:
    """A result, whether to print it as JSON, and the notes to print after it."""

    result: Result
    as_json: bool = False
    closing: tuple[str, ...] = ()


_Quiet = Annotated[bool, arg(aliases=("-q",), help_behavior_hint="")]
_Verbose = Annotated[bool, arg(aliases=("-v",), help_behavior_hint="")]


@dataclass(frozen=True)
class CommonOptions:
    """Options of every command."""

    # print machine-readable output on standard output
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    quiet: _Quiet = False  # print no progress and no notes
    verbose: _Verbose = False  # print more logs on standard error


Checkpoint = Annotated[
    Positional[Path], arg(help="a .safetensors file written by saccade, or shipped:NAME")
]
Artefacts = Annotated[Positional[Path], arg(help="artefact folder written by `saccade export`")]
Repository = Annotated[
    Positional[Path], arg(help="model repository written by `saccade repository`")
]
Image = Annotated[Positional[Path], arg(help="a PNG, JPEG or WebP file")]
Images = Annotated[
    Positional[tuple[Path, ...]],
    arg(help="PNG, JPEG or WebP files, or folders that contain them", help_behavior_hint=""),
]


@dataclass(frozen=True)
class Command:
    """A verb on the command line: all that the command line and its documents know of it."""

    verb: Verb
    group: str  # its heading in the overview
    extra: str = ""  # the extra whose packages it needs on any input
    closing: Callable[[Mapping[str, Any], Any], Closing | None] | None = None
    # values for its arguments that a file among the words gives
    defaults: Callable[[Sequence[str]], Mapping[str, Any]] | None = None

    @property
    def name(self) -> str:
        """The word after `saccade`."""
        return self.verb.__name__

    @property
    def help(self) -> str:
        """The verb's docstring without the examples."""
        return (inspect.getdoc(self.verb) or "").partition(_EXAMPLES)[0].rstrip()

    @property
    def summary(self) -> str:
        """The first line of the help."""
        return self.help.partition("\n")[0]

    @property
    def examples(self) -> str:
        """The examples, each a comment and a line to type."""
        return inspect.cleandoc((inspect.getdoc(self.verb) or "").partition(_EXAMPLES)[2])

    @property
    def example(self) -> str:
        """The line to type of the first example."""
        return next((line for line in self.examples.splitlines() if line[0] != "#"), "")

    def callable(self, words: Sequence[str] = ()) -> Callable[..., Outcome]:
        """Return the function that the parser calls; its signature is the command's syntax."""
        defaults = self.defaults(words) if self.defaults else {}
        signature = inspect.signature(self.verb)
        hints = get_type_hints(self.verb, include_extras=True)
        own = [
            parameter.replace(
                annotation=_flat(hints[parameter.name], parameter.default),
                default=defaults.get(parameter.name, parameter.default),
            )
            for parameter in signature.parameters.values()
        ]
        common = inspect.Parameter(
            "common",
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[CommonOptions, arg(name="common")],
        )

        def call(*values: Any, common: CommonOptions, **named: Any) -> Outcome:
            with verbosity(quiet=common.quiet, verbose=common.verbose):
                # `serve` prints its own log, as text or as JSON.
                with log_shown() if common.verbose and self.name != "serve" else nullcontext():
                    given = signature.bind(*values, **named)
                    return self._outcome(given, common.json, common.quiet)

        call.__signature__ = inspect.Signature([*own, common])  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in (*own, common)}
        call.__doc__ = self.help
        return call

    def _outcome(self, given: inspect.BoundArguments, as_json: bool, quiet: bool) -> Outcome:
        began = time.monotonic()
        try:
            result = self.verb(*given.args, **given.kwargs)
        except SaccadeError as failed:
            LOGGER.debug("refused", exc_info=True)
            # With --json, a failure that has a report is printed as JSON too.
            if not as_json or (report := getattr(failed, "report", None)) is None:
                raise
            result = Answer(report.to_dict(), exit_code=failed.exit_code)
        if as_json or quiet or self.closing is None:
            return Outcome(result, as_json)
        given.apply_defaults()
        closing = self.closing(given.arguments, result)
        seconds = time.monotonic() - began
        return Outcome(result, closing=closing.lines(seconds) if closing is not None else ())


def _flat(kind: Any, default: Any) -> Any:
    """Make the fields of an options dataclass flags of the command itself."""
    if is_dataclass(kind):
        return Annotated[kind, arg(name="")]
    nothing = default is None or default is False or default == ()
    return Annotated[kind, arg(help_behavior_hint="")] if nothing else kind
