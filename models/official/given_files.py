# SPDX-License-Identifier: Apache-2.0
"""Files that a user passes to a conversion: a JSON object, a list of names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.core.files import check_labels, read_bounded, read_lines
from saccade.core.json_text import parse_json


def check_stated(path: str, stated: Mapping[str, tuple[Any, Any]]) -> None:
    """Check that the JSON agrees with the file; `stated` has (in the JSON, in the file) by name.

    Raises: SaccadeError naming the first that differs.
    """
    for name, (said, actual) in stated.items():
        if said is not None and said != actual:
            raise SaccadeError(
                f"{path}: --config has {name} {said!r:.60}, but the file's tensors have {actual}. "
                "Pass the JSON of this model."
            )


def whole_number(value: Any, name: str, *, least: int = 1) -> int:
    """Return a count from the JSON.

    Raises: SaccadeError if it is not a count.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SaccadeError(
            f"--config: {name} is {value!r:.60}, expected a whole number of at least {least}. "
            "Correct it in the JSON."
        )
    return value


def object_from(path: Path | None, flag: str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None without a path.

    Raises: SaccadeError if it cannot be read or is not an object.
    """
    if path is None:
        return None
    content = _json(path, flag)
    if not isinstance(content, dict):
        raise SaccadeError(
            f"{flag} {path}: found a {type(content).__name__}, expected a JSON object."
        )
    return content


def names_from(path: Path | None, flag: str) -> tuple[str, ...] | None:
    """Read names in order: one per line, a JSON list, or a JSON object of names and indices.

    Raises: SaccadeError if it cannot be read, or the indices do not count from 0 without gaps.
    """
    if path is None:
        return None
    if path.suffix != ".json":
        return read_lines(path, "name")
    content = _json(path, flag)
    if isinstance(content, list) and all(isinstance(name, str) for name in content):
        check_labels(content, f"{flag} {path}", "name")
        return tuple(content)
    named = numbered(content) if isinstance(content, dict) else None
    if named is None:
        raise SaccadeError(
            f"{flag} {path}: expected a list of strings, or an object that numbers them from 0."
        )
    check_labels(named, f"{flag} {path}", "name")
    return named


def numbered(content: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return names in order from an object between names and indices; None if it is not one."""
    if all(isinstance(value, str) for value in content.values()):
        pairs: list[tuple[Any, str]] = list(content.items())
    else:
        pairs = [(value, name) for name, value in content.items()]
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
