# SPDX-License-Identifier: Apache-2.0
"""JSON as a tree of frozen dataclasses: every key, type and number checked, nothing converted."""

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from saccade import limits
from saccade.errors import SaccadeError
from saccade.files import read_bounded
from saccade.json_text import parse_json

AGAIN = "Export again with: saccade export CHECKPOINT"
_LARGEST_INT = 2**63 - 1  # what every reader of ours counts with


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises: SaccadeError if it cannot be read, is not an object, or holds NaN or an infinity.
    """
    try:
        content = parse_json(read_bounded(path, limits.JSON_BYTES))
    except (OSError, ValueError) as error:
        raise SaccadeError(f"{path}: cannot be read as JSON ({error}). {AGAIN}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise SaccadeError(f"{path}: holds a {kind}, expected an object. {AGAIN}")
    return content


def typed(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, without any conversion but list to tuple and int to float.

    Raises: SaccadeError that starts with `where` and names the key.
    """
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _typed_object(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union) and NoneType in arguments:
        inner = next(each for each in arguments if each is not NoneType)
        return None if value is None else typed(inner, value, where)
    if origin is Literal:
        if value not in arguments:
            raise _wrong_type(where, value, " or ".join(map(repr, arguments)))
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong_type(where, value, "a list")
        return tuple(typed(arguments[0], each, f"{where}[{i}]: ") for i, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong_type(where, value, "an object")
        return {key: typed(arguments[1], each, f"{where}{key}: ") for key, each in value.items()}
    if isinstance(kind, type) and issubclass(kind, float) and kind is not float:
        return _in_range(kind, typed(float, value, where), where)
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError as error:
            raise _wrong_type(where, value, "float") from error
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _wrong_type(where, value, f"{kind.__name__}")
    if kind is int and abs(value) > _LARGEST_INT:
        raise _wrong_type(where, value, f"a whole number of at most {_LARGEST_INT}")
    return value


def _typed_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong_type(where, value, "an object")
    expected = {field.name for field in fields(kind)}
    if missing := sorted(expected - set(value)):
        raise SaccadeError(f"{where}missing keys: {', '.join(missing)}. {AGAIN}")
    if extra := sorted(set(value) - expected):
        raise SaccadeError(f"{where}unknown keys: {', '.join(extra):.200}. {AGAIN}")
    hints = get_type_hints(kind)
    checked = {key: typed(hints[key], value[key], f"{where}{key}: ") for key in value}
    try:
        return kind(**checked)
    except SaccadeError as error:
        raise SaccadeError(f"{where}{error}") from error


def _in_range(kind: type[float], number: float, where: str) -> float:
    """A number of a type that says what range it has, such as `Budget`."""
    try:
        return kind(number)
    except SaccadeError as error:
        raise SaccadeError(f"{where}{error} {AGAIN}") from error


def _wrong_type(where: str, value: Any, expected: str) -> SaccadeError:
    return SaccadeError(f"{where}found {value!r:.60}, expected {expected}. {AGAIN}")
