# SPDX-License-Identifier: Apache-2.0
"""JSON from files that may be hostile: nesting and size are checked before values are created."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from saccade.core import limits

# An unterminated string extends to the end of the file; otherwise the search would take n^2 time.
_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_NOT_STRUCTURE = re.compile(r"[^\[\]{},]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1, ",": 0}
_SPACE = re.compile(r"[ \t\n\r]*")
_PIECE = 2**18  # characters that are read at a time


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
        _check_characters(text, value)
    except UnicodeError as error:
        raise ValueError(f"not UTF-8 text ({error})"[:200]) from error
    return value


def _check_characters(text: str, value: Any) -> None:
    """Raise UnicodeError for half of a surrogate pair, which only an escape can be."""
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()


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


class _Text:
    """The unread text of a file; more is read when a value is not complete."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False
        self._decoder = json.JSONDecoder(
            parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_once
        )

    def mark(self) -> str:
        """Return the next character that is not a space; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self, marks: str) -> str:
        """Return the next character and skip it.

        Raises: ValueError if it is none of `marks`.
        """
        mark = self.mark()
        if not mark or mark not in marks:
            found = repr(mark) if mark else "the end of the file"
            raise ValueError(f"found {found}, expected {' or '.join(marks)}")
        self._at += 1
        return mark

    def parts(self, first: str, last: str) -> Iterator[None]:
        """Stop at each part between two brackets; the caller takes it."""
        self.take(first)
        if self.mark() == last:
            self.take(last)
            return
        yield
        while self.take(f",{last}") != last:
            yield

    def value(self) -> Any:
        """Return the next value and skip it."""
        self.mark()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                # The next piece may have further digits of a number.
                if end < len(self._text) or not self._more():
                    _check_characters(self._text[self._at : end], value)
                    self._at = end
                    return value
            except RecursionError as error:
                raise JSONRefused(f"nested more than {limits.JSON_DEPTH} deep") from error
            except json.JSONDecodeError:
                if not self._more():
                    raise

    def _more(self) -> bool:
        """Read a further piece, or return False at the end."""
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > limits.TABLE_LINE:
            raise JSONRefused(f"found a value of more than {limits.TABLE_LINE} characters")
        piece = "" if self._ended else self._file.read(_PIECE)
        self._text += piece
        self._ended = not piece
        return bool(piece)


def stream_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the fields of the one object in a file of any size; a list value by value.

    A value, or one of a list, has at most `limits.TABLE_LINE` characters, so little is in memory.

    Raises: JSONRefused if a value is larger or has a field twice; another ValueError if the file
        does not contain a JSON object; OSError.
    """
    with path.open(encoding="utf-8-sig") as file:
        text = _Text(file)
        for _ in text.parts("{", "}"):
            field = text.value()
            if not isinstance(field, str):
                raise ValueError(f"found the field {field!r:.60}, expected text")
            text.take(":")
            if text.mark() == "[":
                for _ in text.parts("[", "]"):
                    yield field, text.value()
            else:
                yield field, text.value()
        if text.mark():
            raise ValueError("found more text after the object")
