# SPDX-License-Identifier: Apache-2.0
"""Files that a user writes for a conversion: a JSON object, a list of names."""

from pathlib import Path
from typing import Any

from saccade import limits
from saccade.errors import SaccadeError
from saccade.files import check_labels, read_bounded, read_lines
from saccade.json_text import parse_json


def object_from(path: Path | None, flag: str) -> dict[str, Any] | None:
    """The JSON object in a file; none without one.

    Raises: SaccadeError if it cannot be read or is not an object.
    """
    if path is None:
        return None
    found = _json(path, flag)
    if not isinstance(found, dict):
        raise SaccadeError(
            f"{flag} {path}: found a {type(found).__name__}, expected a JSON object."
        )
    return found


def names_from(path: Path | None, flag: str) -> tuple[str, ...] | None:
    """Names in order: one a line, a JSON list, or a JSON object between names and indices.

    Raises: SaccadeError if it cannot be read, or indices do not count from 0 without a gap.
    """
    if path is None:
        return None
    if path.suffix != ".json":
        return read_lines(path, "name")
    found = _json(path, flag)
    if isinstance(found, list) and all(isinstance(name, str) for name in found):
        check_labels(found, f"{flag} {path}", "name")
        return tuple(found)
    named = _numbered(found) if isinstance(found, dict) else None
    if named is None:
        raise SaccadeError(
            f"{flag} {path}: expected a list of strings, or an object that numbers them from 0."
        )
    check_labels(named, f"{flag} {path}", "name")
    return named


def _numbered(found: dict[str, Any]) -> tuple[str, ...] | None:
    if all(isinstance(value, str) for value in found.values()):
        pairs: list[tuple[Any, str]] = list(found.items())
    else:
        pairs = [(value, name) for name, value in found.items()]
    try:
        names = {int(index): name for index, name in pairs}
    except (TypeError, ValueError, OverflowError):
        return None
    if sorted(names) != list(range(len(pairs))):
        return None
    return tuple(names[index] for index in range(len(pairs)))


def _json(path: Path, flag: str) -> Any:
    try:
        return parse_json(read_bounded(path, limits.JSON_BYTES))
    except OSError as error:
        raise SaccadeError(f"{flag} {path}: cannot be read ({error}). Pass a JSON file.") from error
    except ValueError as error:
        raise SaccadeError(f"{flag} {path}: not JSON ({error}). Pass a JSON file.") from error
