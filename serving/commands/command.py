# SPDX-License-Identifier: Apache-2.0
"""Verbs as commands: options become flags; results become text, JSON and an exit code.

A verb is a function that takes its inputs and an options dataclass. The first line of its
docstring is the command's help, and the fields of the options are its flags. Every command also
has `--json`, `-q` and `-v`.
"""

import inspect
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, get_type_hints

from tyro.conf import Positional, arg

from saccade.core.errors import SaccadeError
from saccade.core.verbosity import log_shown, verbosity
from saccade.serving.commands.closings import closing_of

LOGGER = logging.getLogger("saccade.commands")


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


Json = Annotated[
    bool, arg(help="print machine-readable output on standard output", help_behavior_hint="")
]
Quiet = Annotated[
    bool, arg(aliases=("-q",), help="print no progress and no notes", help_behavior_hint="")
]
Verbose = Annotated[
    bool, arg(aliases=("-v",), help="print more logs on standard error", help_behavior_hint="")
]
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


def as_command(verb: Verb, defaults: Mapping[str, Any] | None = None) -> Callable[..., Outcome]:
    """Wrap a verb into the function that the parser calls; `defaults` replace its arguments'."""

    def command(
        *values: Any, json: bool = False, quiet: bool = False, verbose: bool = False, **named: Any
    ) -> Outcome:
        began = time.monotonic()
        with verbosity(quiet=quiet, verbose=verbose):
            # `serve` prints its own log, as text or as JSON.
            with log_shown() if verbose and verb.__name__ != "serve" else nullcontext():
                result = _result_of(verb, values, named, as_json=json)
        if json or quiet:
            return Outcome(result, json)
        given = signature.bind(*values, **named)
        given.apply_defaults()
        closing = closing_of(verb.__name__, given.arguments, result)
        seconds = time.monotonic() - began
        return Outcome(result, closing=closing.lines(seconds) if closing is not None else ())

    hints, signature = get_type_hints(verb, include_extras=True), inspect.signature(verb)
    own = [
        parameter.replace(
            annotation=_flat(hints[parameter.name], parameter.default),
            default=(defaults or {}).get(parameter.name, parameter.default),
        )
        for parameter in signature.parameters.values()
    ]
    for_all = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("json", Json), ("quiet", Quiet), ("verbose", Verbose))
    ]
    command.__signature__ = inspect.Signature([*own, *for_all])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (*own, *for_all)}
    command.__doc__ = verb.__doc__
    return command


def summary_of(verb: Verb) -> str:
    """Return the first line of a verb's docstring."""
    return (inspect.getdoc(verb) or "").splitlines()[0]


def _result_of(
    verb: Verb, values: tuple[Any, ...], named: dict[str, Any], *, as_json: bool
) -> Result:
    try:
        return verb(*values, **named)
    except SaccadeError as failed:
        LOGGER.debug("refused", exc_info=True)
        # With --json, a failure that has a report is printed as JSON too.
        if not as_json or (report := getattr(failed, "report", None)) is None:
            raise
        return Answer(report.to_dict(), exit_code=failed.exit_code)


def _flat(kind: Any, default: Any) -> Any:
    """Make the fields of an options dataclass flags of the command itself."""
    if is_dataclass(kind):
        return Annotated[kind, arg(name="")]
    nothing = default is None or default is False or default == ()
    return Annotated[kind, arg(help_behavior_hint="")] if nothing else kind
