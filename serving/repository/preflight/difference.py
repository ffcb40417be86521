# SPDX-License-Identifier: Apache-2.0
"""Plain data beside the data that saccade writes: each difference, by its place."""

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
    """What a field may be whose value is the operator's."""

    expected: str
    fit: Callable[[Any], bool]


@dataclass(frozen=True)
class _Difference:
    place: str  # for a reader: `input[image].dims`
    field: str  # without places in lists: `input.dims`
    found: Any
    expected: Any


def differences(found: Any, expected: Any, free: Mapping[str, Bounds]) -> Iterator[str]:
    """In what data departs from what would be written, a sentence each.

    A field that nobody writes is a difference, unless it is one of those that are `free`.
    """
    for each in _compared(found, expected, "", ""):
        bounds = free.get(each.field)
        if bounds is None:
            yield _sentence(each, _shown(each.expected))
        elif each.found is _ABSENT or not bounds.fit(each.found):
            yield _sentence(each, bounds.expected)


def _sentence(each: _Difference, expected: str) -> str:
    if each.found is _ABSENT:
        return f"{each.place} is missing, expected {expected}. {_AGAIN}"
    if expected:
        return f"{each.place} is {_shown(each.found)}, expected {expected}. {_AGAIN}"
    return f"{each.place} is {_shown(each.found)}, which saccade does not write there. {_AGAIN}"


def _compared(found: Any, expected: Any, place: str, field: str) -> Iterator[_Difference]:
    if isinstance(found, dict) and (isinstance(expected, dict) or (found and expected is _ABSENT)):
        there = {} if expected is _ABSENT else expected
        for key in sorted({*found, *there}):
            name = key if key.isidentifier() else repr(key)  # `8.9` is one name, not two
            inner = (f"{each}.{name}" if each else name for each in (place, field))
            yield from _compared(found.get(key, _ABSENT), there.get(key, _ABSENT), *inner)
    elif _are_lists_of_objects(found, expected):
        for index, (here, there) in enumerate(zip_longest(found, expected, fillvalue=_ABSENT)):
            if isinstance(here, dict) and isinstance(there, dict):
                name = there.get("name", index)
                yield from _compared(here, there, f"{place}[{name}]", field)
            else:
                # One too many is named whole: its fields are nobody's to choose.
                yield _Difference(f"{place}[{index}]", f"{field}[]", here, there)
    elif (type(found), found) != (type(expected), expected):
        yield from _inside(found, expected, place, field)


def _inside(found: Any, expected: Any, place: str, field: str) -> Iterator[_Difference]:
    """Of two texts that are JSON objects, where these differ."""
    inner: list[_Difference] = []
    if isinstance(found, str) and isinstance(expected, str) and expected.startswith("{"):
        with suppress(ValueError, RecursionError):
            inner = list(_compared(json.loads(found), json.loads(expected), place, field))
    yield from inner or [_Difference(place, field, found, expected)]


def _are_lists_of_objects(*values: Any) -> bool:
    return all(isinstance(each, list) for each in values) and any(
        isinstance(each, dict) for value in values for each in value
    )


def _shown(value: Any) -> str:
    """A value for a reader; of what is not there, nothing."""
    if value is _ABSENT:
        return ""
    if isinstance(value, list) and not any(isinstance(each, dict) for each in value):
        text = f"[{', '.join(map(_in_list, value))}]"
    else:
        text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _in_list(value: Any) -> str:
    # Whole numbers of 64 bits are texts in JSON.
    return value if isinstance(value, str) and value.lstrip("-").isdecimal() else repr(value)
