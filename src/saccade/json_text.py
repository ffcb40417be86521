# SPDX-License-Identifier: Apache-2.0
"""JSON from files that may be hostile: nesting and size are checked before values are created."""

import json
import math
import re
from collections import Counter
from typing import Any

from saccade import limits

# An unterminated string extends to the end of the file; otherwise the search would take n^2 time.
_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_NOT_STRUCTURE = re.compile(r"[^\[\]{},]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1, ",": 0}


class JSONRefused(ValueError):
    """The JSON is larger than any of our files, or has NaN or infinity in place of a number."""

    def __repr__(self) -> str:
        """Return the message, for quoting in other messages."""
        return str(self)


def parse_json(data: bytes | str) -> Any:
    """Parse JSON and return its value.

    Raises: JSONRefused if it is larger or deeper or has more values than `limits` allows, has a
        field twice, or contains an invalid number or character; another ValueError if it is not
        JSON.
    """
    if len(data) > limits.JSON_BYTES:
        raise JSONRefused(f"found {len(data)} bytes, expected at most {limits.JSON_BYTES}")
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        _check_structure(text)
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_once
        )
        if "\\u" in text:  # only an escape can be a lone surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ValueError(f"not UTF-8 text ({error})"[:200]) from error
    return value


def _check_structure(text: str) -> None:
    if text.count(",") + text.count("[") + text.count("{") > limits.JSON_VALUES:
        marks = _NOT_STRUCTURE.sub("", _TEXT.sub("", text))
        count = len(marks) - marks.count("]") - marks.count("}")
        if count > limits.JSON_VALUES:
            raise JSONRefused(f"found about {count} values, expected at most {limits.JSON_VALUES}")
    if text.count("[") + text.count("{") <= limits.JSON_DEPTH:
        return
    depth = 0
    for mark in _NOT_STRUCTURE.sub("", _TEXT.sub("", text)).replace(",", ""):
        depth += _STEPS[mark]
        if depth > limits.JSON_DEPTH:
            raise JSONRefused(f"nested more than {limits.JSON_DEPTH} deep")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two values they use, so one could check what another does not use.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise JSONRefused(f"found the field {name[:60]!r} twice")
    return fields


def _no_number(constant: str) -> float:
    raise JSONRefused(f"{constant} is not a number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise JSONRefused(f"the number {digits:.20} is too large")
    return value
