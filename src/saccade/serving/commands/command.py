# SPDX-License-Identifier: Apache-2.0
"""A verb as a command: its options become flags, its result text, JSON and an exit code.

A verb is a function of what it is given and of an options dataclass. The first line of its
docstring is its help; its options' fields are its flags; every command has `--json`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, get_type_hints

from tyro.conf import Positional, arg

from saccade.errors import SaccadeError


class Result(Protocol):
    """Result of a verb. One that says no has an `exit_code` besides."""

    def to_dict(self) -> Any:
        """Plain values for JSON."""

    def to_text(self) -> Any:
        """For a reader: a text, or what rich prints; none: nothing."""


Verb = Callable[..., Result]


@dataclass(frozen=True)
class Answer:
    """A result made of several."""

    data: Any
    text: Any = None
    exit_code: int = 0

    def to_dict(self) -> Any:
        """Plain values for JSON."""
        return self.data

    def to_text(self) -> Any:
        """For a reader."""
        return self.text


Json = Annotated[bool, arg(help="machine-readable answer on standard output.")]
Checkpoint = Annotated[
    Positional[Path], arg(help="a .safetensors file written by saccade, or shipped:NAME.")
]
Artefacts = Annotated[Positional[Path], arg(help="what `saccade export` wrote.")]
Repository = Annotated[Positional[Path], arg(help="what `saccade repository` wrote.")]
Image = Annotated[Positional[Path], arg(help="a PNG, JPEG or WebP file.")]
Images = Annotated[Positional[tuple[Path, ...]], arg(help="PNG, JPEG or WebP files.")]


def as_command(verb: Verb) -> Callable[..., tuple[Result, bool]]:
    """The verb as the parser calls it: answers the result, and whether as JSON."""

    def command(*values: Any, json: bool = False, **named: Any) -> tuple[Result, bool]:
        try:
            return verb(*values, **named), json
        except SaccadeError as failed:
            # Who asks for JSON is answered in JSON, where there is something to say.
            if not json or (report := getattr(failed, "report", None)) is None:
                raise
            return Answer(report.to_dict(), exit_code=failed.exit_code), json

    hints = get_type_hints(verb, include_extras=True)
    own = [
        parameter.replace(annotation=_flat(hints[parameter.name]))
        for parameter in inspect.signature(verb).parameters.values()
    ]
    json = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    command.__signature__ = inspect.Signature([*own, json])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, json)}
    command.__doc__ = verb.__doc__
    return command


def _flat(kind: Any) -> Any:
    """The fields of an options dataclass appear as flags of the command itself."""
    return Annotated[kind, arg(name="")] if is_dataclass(kind) else kind
