# SPDX-License-Identifier: Apache-2.0
"""Syntax of the command line: how values are written, and the messages for refused ones.

Several values of one option are written `1,0.5,0.25`, and fields of a model `dim=64 heads=4`. The
help lists the names that an option accepts. It shows optional values without the word None, and
describes `--no-x` flags by what they turn off. A refusal says what was found and expected, and what
to do.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from saccade.core.checks import did_you_mean
from saccade.core.errors import SaccadeError
from saccade.core.options import Options
from saccade.models.budget import BudgetLike
from saccade.models.entry import imported
from saccade.models.families import FAMILIES, entries
from saccade.models.training.options import overrides_words, parse_overrides
from saccade.serving.commands.command import Command

Way = tyro.constructors.PrimitiveConstructorSpec
Kind = tyro.constructors.PrimitiveTypeInfo
Struct = tyro.constructors.StructTypeInfo
Field = tyro.constructors.StructFieldSpec
Fields = tyro.constructors.StructConstructorSpec
_OF_ALL = ("--help", "--json", "--quiet", "--verbose")
# What users of other programs type.
_ELSEWHERE = {
    "--lr": ("--learning-rate",),
    "--epochs": ("--steps",),
    "--batch-size": ("--batch",),
    "--image-size": ("--side-px",),
    "--port": ("--grpc-port", "--url"),
    "--output": ("--out",),
    "--workers": ("--processes",),
}


def ways_to_write() -> tyro.constructors.ConstructorRegistry:
    """Return the rules of this file for the parser."""
    registry = tyro.constructors.ConstructorRegistry()
    for rule in (_one, _choice, _several, _names, _overrides):
        registry.primitive_rule(rule)
    registry.struct_rule(_options)
    registry.struct_rule(_group)
    return registry


_BUDGET = {float, str}  # of one request; the family reads the budget of an export


def _budget(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def _number(kind: type, expected: str) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        try:
            return kind(word)
        except ValueError as error:
            raise ValueError(f"found {word!r:.60}, expected {expected}{_share(word)}") from error

    return read


def _share(word: str) -> str:
    """Return the share that a percentage is, as it has to be written; empty for other words."""
    try:
        return f": {word} is {float(word.removesuffix('%')) / 100:g}" if word[-1:] == "%" else ""
    except ValueError:
        return ""


_READS: dict[Any, Callable[[str], Any]] = {
    float: _number(float, "a number"),
    int: _number(int, "a whole number"),
    str: str,
    Path: Path,
    BudgetLike: _budget,
}
_METAVARS = {float: "NUMBER", int: "N", str: "TEXT", BudgetLike: "BUDGET", Path: "PATH"}
_LISTED: dict[Any, Callable[[str], Any]] = {
    float: _READS[float],
    int: _READS[int],
    str: str,
    BudgetLike: str,
}


def _one(info: Kind) -> Way[Any] | None:
    """Rule for a single value, which may be optional."""
    kinds = set(get_args(info.type) or (info.type,))
    wanted = kinds - {NoneType}
    kind = next(iter(wanted)) if len(wanted) == 1 else BudgetLike if wanted == _BUDGET else None
    if kind not in _READS or get_origin(info.type) not in (None, Union, UnionType):
        return None
    read = _READS[kind]
    return Way(
        nargs=1,
        metavar=_METAVARS[kind],
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, info.type),
        str_from_instance=lambda value: [_shown(value)],
    )


def _choice(info: Kind) -> Way[Any] | None:
    """Rule for one of several names, or nothing: without a rule, the help would list None too."""
    wanted = [kind for kind in get_args(info.type) if kind is not NoneType]
    if len(wanted) != 1 or get_origin(wanted[0]) is not Literal:
        return None
    names = get_args(wanted[0])
    return Way(
        nargs=1,
        metavar=f"{{{','.join(names)}}}",
        choices=names,
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: value is None or value in names,
        str_from_instance=lambda value: [str(value)],
    )


def _several(info: Kind) -> Way[Any] | None:
    kind, *rest = get_args(info.type) or (None,)
    if get_origin(info.type) is not tuple or kind not in _LISTED:
        return None
    one = "N" if kind in (float, int) else "VALUE"
    return Way(
        nargs=1,
        metavar=f"{one}[,{one}...]" if rest == [...] else ",".join([one] * (1 + len(rest))),
        instance_from_str=lambda words: tuple(map(_LISTED[kind], words[0].split(","))),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(_shown, value))],
    )


def _names(info: Kind) -> Way[Any] | None:
    kinds = [kind for kind in get_args(info.type) or (info.type,) if kind is not NoneType]
    if len(kinds) != 1 or (known := getattr(kinds[0], "names", None)) is None:
        return None
    return Way(
        nargs=1,
        metavar=f"{{{','.join(imported(known)())}}}",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: [str(value)],
    )


def _overrides(info: Kind) -> Way[Any] | None:
    if info.type != dict[str, Any]:
        return None
    return Way(
        nargs="*",
        metavar="KEY=VALUE",
        instance_from_str=parse_overrides,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=overrides_words,
    )


_BUSY: set[type] = set()  # a nested query, also of another parser, gets the parser's own rule


def _options(info: Struct) -> Fields | None:
    """Rule for options: the parser's own for a dataclass, with help texts that fit the flags."""
    is_options = isinstance(info.type, type) and issubclass(info.type, Options)
    if not is_options or info.type in _BUSY:
        return None
    _BUSY.add(info.type)
    try:
        spec = tyro.constructors.ConstructorRegistry.get_struct_spec(info)
    finally:
        _BUSY.discard(info.type)
    if not isinstance(spec, Fields):
        return None
    plain = get_type_hints(info.type)  # the options check their ranges themselves
    typed = [replace(field, type=plain[field.name]) for field in spec.fields]
    return _grouped(replace(spec, fields=tuple(map(_with_help, typed))), info.type.groups)


class _Group:
    """Base of a type for each heading of a help; its fields are flags of the command."""

    fields: tuple[Field, ...]


def _group(info: Struct) -> Fields | None:
    is_group = isinstance(info.type, type) and issubclass(info.type, _Group)
    return Fields(instantiate=dict, fields=info.type.fields) if is_group else None


def _grouped(spec: Fields, groups: Mapping[str, str]) -> Fields:
    """Return the fields by their headings; what has none is in front."""
    alone = {field.name: field for field in spec.fields}
    parts = []
    for heading, names in groups.items():
        own = {"fields": tuple(alone.pop(name) for name in names.split())}
        parts.append(Field(heading, type(heading, (_Group,), own), tyro.MISSING_NONPROP))

    def made(**given: Any) -> Any:
        parts = [given.pop(heading) for heading in groups]  # before a field of the same name
        return spec.instantiate(**given, **{key: part[key] for part in parts for key in part})

    return Fields(instantiate=made, fields=(*alone.values(), *parts))


def _with_help(field: Any) -> Any:
    """Return the field with a help text for its flag, which is `--no-x` if it is on by default."""
    if not (field.default in (None, "", (), {}) or isinstance(field.default, bool)):
        return field
    kind = Annotated[field.type, tyro.conf.arg(help_behavior_hint="")]
    if field.default is not True:
        return replace(field, type=kind)
    written, flag = field.helptext, f"--no-{field.name.replace('_', '-')}"

    def of_the_flag() -> str | None:
        text = written() if callable(written) else written
        return text.partition(f"{flag}: ")[2] or text if text else None

    return replace(field, type=kind, helptext=of_the_flag)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


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
            advice = "Quote paths that contain spaces."
            place = self._given.index(words[0]) if words[0] in self._given else 0
            if place > 1 and (flag := self._given[place - 2]).startswith("--") and "=" not in flag:
                several = ",".join(self._given[place - 1 : place + 1])
                advice = f"Several values have commas between them: {flag} {several}. {advice}"
            return (
                f"{self._called}: found {words[0]!r:.60} after the last argument it takes. "
                f"{advice} See: {self._called} --help"
            )
        option = options[0].partition("=")[0]
        typed = option.replace("_", "-")
        close = did_you_mean(typed, self._flags)
        if usual := [flag for flag in _ELSEWHERE.get(typed, ()) if flag in self._flags]:
            close = f" Did you mean {usual[0]}?"
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
