# SPDX-License-Identifier: Apache-2.0
"""JSON from a file that may be hostile: nesting and size are known before anything is made."""

import json
import math
import re
from collections import Counter
from typing import Any

from saccade import limits

# One that never ends goes to the end of the file: looked for again and again, it would take n^2.
_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_NOT_STRUCTURE = re.compile(r"[^\[\]{},]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1, ",": 0}


class JSONRefused(ValueError):
    """The text holds more than any file of ours, or NaN or infinity where a number belongs."""

    def __repr__(self) -> str:
        """As a message quotes it."""
        return str(self)


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text.

    Raises: JSONRefused if it is larger, deeper or of more values than `limits` allows, names a
        field twice, or holds a number or a character that is none; another ValueError if it is no
        JSON.
    """
    if len(data) > limits.JSON_BYTES:
        raise JSONRefused(f"{len(data)} bytes, at most {limits.JSON_BYTES} are read")
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        _check_structure(text)
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_once
        )
        if "\\u" in text:  # only an escape can be half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ValueError(f"not a text in UTF-8 ({error})"[:200]) from error
    return value


def _check_structure(text: str) -> None:
    if text.count(",") + text.count("[") + text.count("{") > limits.JSON_VALUES:
        marks = _NOT_STRUCTURE.sub("", _TEXT.sub("", text))
        count = len(marks) - marks.count("]") - marks.count("}")
        if count > limits.JSON_VALUES:
            raise JSONRefused(f"some {count} values, at most {limits.JSON_VALUES} are read")
    if text.count("[") + text.count("{") <= limits.JSON_DEPTH:
        return
    depth = 0
    for mark in _NOT_STRUCTURE.sub("", _TEXT.sub("", text)).replace(",", ""):
        depth += _STEPS[mark]
        if depth > limits.JSON_DEPTH:
            raise JSONRefused(f"nested more than {limits.JSON_DEPTH} deep")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two they believe: what one checks, another would use.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise JSONRefused(f"the field {name[:60]!r} is there twice")
    return fields


def _no_number(constant: str) -> float:
    raise JSONRefused(f"{constant} is not a number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise JSONRefused(f"{digits:.20} is too large a number")
    return value
