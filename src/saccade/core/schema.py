# SPDX-License-Identifier: Apache-2.0
"""JSON as a tree of frozen dataclasses: every key, type and number is checked, none converted.

An annotation describes a value completely: its type, and the allowed values of that type as a
`Literal` or an `Annotated[int, Range(1)]`. The same annotations check configurations and options.
"""

import math
import re
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from saccade.core import limits
from saccade.core.errors import Damaged, SaccadeError
from saccade.core.files import read_regular
from saccade.core.json_text import parse_json

EXPORT = "saccade export CHECKPOINT --out FOLDER --force"
AGAIN = f"Write it again with: {EXPORT}"
GROUP_AGAIN = "Group its members again: saccade group FOLDER FOLDER --out GROUP --force"
_LARGEST_INT = 2**63 - 1  # what all our readers support
_WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
    NoneType: "nothing",
}


@dataclass(frozen=True)
class Range:
    """Bounds of a number, for an annotation."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False  # whether `least` itself is excluded
    below: bool = False  # whether `most` itself is excluded

    def holds(self, number: float) -> bool:
        """Return True if the number is within the bounds."""
        low = number > self.least if self.above else number >= self.least
        return low and (number < self.most if self.below else number <= self.most)

    def __str__(self) -> str:
        ends = []
        if self.least > -math.inf:
            ends.append(f"{'above' if self.above else 'at least'} {self.least:.12g}")
        if self.most < math.inf:
            ends.append(f"{'below' if self.below else 'at most'} {self.most:.12g}")
        return " and ".join(ends)


@dataclass(frozen=True)
class Pattern:
    """A form of texts, for an annotation."""

    expression: str  # that the whole text must match
    meaning: str

    def holds(self, text: str) -> bool:
        """Return True if the text has the form."""
        return re.fullmatch(self.expression, text) is not None

    def __str__(self) -> str:
        return self.meaning


@dataclass(frozen=True)
class Length:
    """The smallest number of values of a list, for an annotation."""

    least: int

    def holds(self, values: tuple[Any, ...]) -> bool:
        """Return True if there are as many values."""
        return len(values) >= self.least

    def __str__(self) -> str:
        return f"at least {self.least} value{'s' * (self.least > 1)}"


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, 1, below=True)]
Probability = Annotated[float, Range(0, 1, above=True, below=True)]


class WrongValue(SaccadeError):
    """A value that its annotation does not allow; `expected` describes the allowed ones.

    `finding` is the message without what to do about it, `comparison` that without the place.
    """

    def __init__(self, where: str, value: Any, expected: str) -> None:
        self.expected = expected
        self.comparison = f"found {value!r:.60}, expected {expected}."
        self.finding = f"{where}{self.comparison}"
        super().__init__(f"{self.finding} {AGAIN}")


def read_json(path: Path, command: str = "") -> dict[str, Any]:
    """Return the JSON object in a file; `command` writes such a file.

    Raises: Damaged if it cannot be read, is not an object, or contains NaN or infinity.
    """
    try:
        content = parse_json(read_regular(path, limits.JSON_BYTES))
    except (OSError, ValueError) as error:
        raise Damaged(path, f"cannot be read as JSON ({error!s:.300})", command) from error
    if not isinstance(content, dict):
        raise Damaged(path, f"found a {type(content).__name__}, expected an object", command)
    return content


def typed(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as `kind`; only list to tuple, int to float, and text to path are converted.

    Raises: SaccadeError that starts with `where` and names the key.
    """
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        return value if isinstance(value, kind) else _typed_object(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _in_bounds(kind, typed(arguments[0], value, where), where)
    if origin is Literal:
        if not any(value == kind and type(value) is type(kind) for kind in arguments):
            raise WrongValue(where, value, words(kind))
        return value
    if origin in (UnionType, Union):
        return _typed_one_of(kind, value, where)
    if origin is tuple:
        count = 0 if arguments[-1] is Ellipsis else len(arguments)
        if not isinstance(value, list | tuple) or count not in (0, len(value)):
            raise WrongValue(where, value, words(kind))
        return tuple(typed(arguments[0], item, f"{where}[{i}]: ") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise WrongValue(where, value, "an object")
        return {key: typed(arguments[1], item, f"{where}{key}: ") for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, float) and kind is not float:
        return _in_range(kind, typed(float, value, where), where)
    return _scalar(kind, value, where)


def _typed_one_of(kind: Any, value: Any, where: str) -> Any:
    """Return the value as one of several kinds, the first that allows it."""
    kinds = [one for one in get_args(kind) if one is not NoneType]
    if value is None and len(kinds) < len(get_args(kind)):
        return None
    if len(kinds) == 1:
        return typed(kinds[0], value, where)
    for one in kinds:
        with suppress(WrongValue):
            return typed(one, value, where)
    raise WrongValue(where, value, words(kind))


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if isinstance(kind, type) and kind not in _WORDS and isinstance(value, kind):
        return value
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError as error:
            raise WrongValue(where, value, words(kind)) from error
    # NumPy's float64 is a float too.
    if not (type(value) is kind or (kind is float and isinstance(value, float))):
        raise WrongValue(where, value, words(kind))
    if kind is float and not math.isfinite(value):
        raise WrongValue(where, value, words(kind))
    if kind is int and abs(value) > _LARGEST_INT:
        raise WrongValue(where, value, f"a whole number of at most {_LARGEST_INT}")
    return value


def _in_bounds(kind: Any, value: Any, where: str) -> Any:
    inner, *bounds = get_args(kind)
    for bound in bounds:
        if not bound.holds(value):
            raise WrongValue(
                where, value, f"a whole number of {bound}" if inner is int else f"{bound}"
            )
    return value


def words(kind: Any) -> str:
    """Return a description of what an annotation allows, in English."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return words(arguments[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (UnionType, Union):
        return " or ".join(map(words, arguments))
    if origin is tuple:
        count = "values" if arguments[-1] is Ellipsis else f"{len(arguments)} values"
        return f"a list of {count}, each {words(arguments[0])}"
    if isinstance(kind, type) and not is_dataclass(kind):
        return _WORDS.get(kind, f"a {kind.__name__}")
    return "an object"


@cache
def field_kinds(kind: Any) -> dict[str, Any]:
    """Return the annotation of each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _typed_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise WrongValue(where, value, "an object")
    kinds = field_kinds(kind)
    expected = kinds.keys()
    if missing := sorted(expected - set(value)):
        raise SaccadeError(f"{where}missing keys: {', '.join(missing)}. {AGAIN}")
    if extra := sorted(set(value) - expected):
        raise SaccadeError(f"{where}unknown keys: {', '.join(extra):.200}. {AGAIN}")
    checked = {key: typed(kinds[key], value[key], f"{where}{key}: ") for key in value}
    try:
        return kind(**checked)
    except SaccadeError as error:
        raise SaccadeError(f"{where}{error}") from error


def _in_range(kind: type[float], number: float, where: str) -> float:
    """Return the number as a type that defines its range, such as `Budget`."""
    try:
        return kind(number)
    except SaccadeError as error:
        raise SaccadeError(f"{where}{error} {AGAIN}") from error
