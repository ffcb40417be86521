# SPDX-License-Identifier: Apache-2.0
"""Compare plain data with the data that saccade writes, and report each difference."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

_AGAIN = "Write the repository again."
_MOST_SHOWN = 80
_ABSENT: Any = object()


@dataclass(frozen=True)
class Bounds:
    """Bounds of a field whose value the operator may choose."""

    expected: str
    fit: Callable[[Any], bool]


@dataclass(frozen=True)
class _Difference:
    place: str  # for messages: `input[image].dims`
    field: str  # without positions in lists: `input.dims`
    found: Any
    expected: Any


def differences(actual: Any, expected: Any, free: Mapping[str, Bounds]) -> Iterator[str]:
    """Describe each difference between the data found and the data that saccade would write.

    A field that saccade does not write is a difference, unless it is in `free`.
    """
    for difference in _compared(actual, expected, "", ""):
        bounds = free.get(difference.field)
        if bounds is None:
            yield _sentence(difference, _shown(difference.expected))
        elif difference.found is _ABSENT or not bounds.fit(difference.found):
            yield _sentence(difference, bounds.expected)


def _sentence(difference: _Difference, expected: str) -> str:
    if difference.found is _ABSENT:
        return f"{difference.place} is missing, expected {expected}. {_AGAIN}"
    if expected:
        return f"{difference.place} is {_shown(difference.found)}, expected {expected}. {_AGAIN}"
    return (
        f"{difference.place} is {_shown(difference.found)}, which saccade does not write. {_AGAIN}"
    )


def _compared(actual: Any, expected: Any, place: str, field: str) -> Iterator[_Difference]:
    if isinstance(actual, dict) and (
        isinstance(expected, dict) or (actual and expected is _ABSENT)
    ):
        there = {} if expected is _ABSENT else expected
        for key in sorted({*actual, *there}):
            name = key if key.isidentifier() else repr(key)  # `8.9` is one name, not two
            inner = (f"{each}.{name}" if each else name for each in (place, field))
            yield from _compared(actual.get(key, _ABSENT), there.get(key, _ABSENT), *inner)
    elif _are_lists_of_objects(actual, expected):
        for index, (here, there) in enumerate(zip_longest(actual, expected, fillvalue=_ABSENT)):
            if isinstance(here, dict) and isinstance(there, dict):
                name = there.get("name", index)
                yield from _compared(here, there, f"{place}[{name}]", field)
            else:
                # An extra item is reported whole: the operator may choose none of its fields.
                yield _Difference(f"{place}[{index}]", f"{field}[]", here, there)
    elif (type(actual), actual) != (type(expected), expected):
        yield from _inside(actual, expected, place, field)


def _inside(actual: Any, expected: Any, place: str, field: str) -> Iterator[_Difference]:
    """Yield the differences inside two strings if both are JSON objects."""
    inner: list[_Difference] = []
    if isinstance(actual, str) and isinstance(expected, str) and expected.startswith("{"):
        with suppress(ValueError, RecursionError):
            inner = list(_compared(json.loads(actual), json.loads(expected), place, field))
    yield from inner or [_Difference(place, field, actual, expected)]


def _are_lists_of_objects(*values: Any) -> bool:
    return all(isinstance(value, list) for value in values) and any(
        isinstance(item, dict) for value in values for item in value
    )


def _shown(value: Any) -> str:
    """Return a value as text for a message; the empty string for an absent value."""
    if value is _ABSENT:
        return ""
    if isinstance(value, list) and not any(isinstance(item, dict) for item in value):
        text = f"[{', '.join(map(_in_list, value))}]"
    else:
        text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _in_list(value: Any) -> str:
    # 64-bit integers are strings in protobuf's JSON.
    return value if isinstance(value, str) and value.lstrip("-").isdecimal() else repr(value)
