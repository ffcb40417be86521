# SPDX-License-Identifier: Apache-2.0
"""Syntax of values on the command line: lists, names, numbers, fields of a model.

Several values of one option are written `1,0.5,0.25`, and fields of a model `dim=64 heads=4`. The
help lists the names that an option accepts. It shows optional values without the word None, and
describes `--no-x` flags by what they turn off.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import tyro

from saccade.core.options import Options
from saccade.models.budget import BudgetLike
from saccade.models.entry import imported
from saccade.models.training.options import overrides_words, parse_overrides

Way = tyro.constructors.PrimitiveConstructorSpec
Kind = tyro.constructors.PrimitiveTypeInfo
Struct = tyro.constructors.StructTypeInfo
Fields = tyro.constructors.StructConstructorSpec


def ways_to_write() -> tyro.constructors.ConstructorRegistry:
    """Return the rules of this file for the parser."""
    registry = tyro.constructors.ConstructorRegistry()
    for rule in (_one, _several, _names, _overrides):
        registry.primitive_rule(rule)
    registry.struct_rule(_options_rule())
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
            raise ValueError(f"found {word!r:.60}, expected {expected}") from error

    return read


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
    if (known := getattr(info.type, "names", None)) is None:
        return None
    return Way(
        nargs=1,
        metavar=f"{{{','.join(imported(known)())}}}",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
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


def _options_rule() -> Callable[[Struct], Fields | None]:
    """Rule for options: the parser's own for a dataclass, with help texts that fit the flags."""
    busy: set[type] = set()

    def rule(info: Struct) -> Fields | None:
        is_options = isinstance(info.type, type) and issubclass(info.type, Options)
        if not is_options or info.type in busy:
            return None
        busy.add(info.type)  # a nested query gets the parser's own rule
        try:
            spec = tyro.constructors.ConstructorRegistry.get_struct_spec(info)
        finally:
            busy.discard(info.type)
        if not isinstance(spec, Fields):
            return None
        plain = get_type_hints(info.type)  # the options check their ranges themselves
        typed = [replace(field, type=plain[field.name]) for field in spec.fields]
        return replace(spec, fields=tuple(map(_with_help, typed)))

    return rule


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
