# SPDX-License-Identifier: Apache-2.0
"""Files that a user passes to a conversion: JSON as a dataclass declares it, a list of names.

A converter declares the keys that it reads as the fields of a dataclass, with the defaults of the
project that writes the JSON. Other keys are not read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from saccade.core import limits
from saccade.core.checks import nearest
from saccade.core.errors import SaccadeError
from saccade.core.files import check_labels, read_bounded, read_lines
from saccade.core.json_text import parse_json
from saccade.core.schema import WrongValue, typed

Json = TypeVar("Json")
_NESTED = ("model_cfg", "model", "kwargs")  # where a model's part may be
# A JSON that a user writes has few keys; a project's own has many names that are somewhat alike,
# such as `hidden_act` and `hidden_size`.
_LEAST_SIMILAR = {True: 0.6, False: 0.8}


def refused(name: str, value: Any, expected: str) -> SaccadeError:
    """Return the error about a value of a JSON that is not supported."""
    return SaccadeError(
        f"{name} is {value!r:.80}, expected {expected}. Correct the JSON, or convert another model."
    )


def at(path: str | None, default: Any = None, *, ours: str = "") -> Any:
    """Return a field whose value is at a path of nested keys, joined by dots; None: it has none.

    `ours` is the field of our configuration that has to be equal, see `check_stated`.
    """
    return field(default=default, metadata={"path": path, "ours": ours})


def declared(kind: type[Json], given: Mapping[str, Any] | None, where: str = "--config") -> Json:
    """Return the values of a JSON object whose keys are the fields of a dataclass.

    A number stands for a list of equal numbers, null for an object of defaults.
    Raises: SaccadeError naming the first value that its annotation does not allow.
    """
    hints = get_type_hints(kind, include_extras=True)
    values = {}
    for name, path in _own_paths(kind):
        found: Any = given
        for place, key in enumerate(path.split(".")):
            if not isinstance(found, Mapping | None):
                raise refused(f"{where}: {'.'.join(path.split('.')[:place])}", found, "an object")
            found = _LACKING if found is None else found.get(key, _LACKING)
            if found is _LACKING:
                break
        else:
            values[name] = _value(hints[name], found, f"{where}: {path}")
    return kind(**values)


_LACKING = object()


def _own_paths(kind: Any) -> list[tuple[str, str]]:
    """Return the fields of a JSON with their paths."""
    paths = [(own.name, own.metadata.get("path", own.name)) for own in fields(kind)]
    return [(name, path) for name, path in paths if path]


def _value(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(value, Mapping | None):
            raise refused(name, value, "an object")
        return declared(kind, value, name)  # type: ignore[arg-type]
    choices = [kind, *get_args(kind)]  # of an optional list, too
    lists = [each for each in choices if get_origin(each) is tuple]
    if lists and isinstance(value, int | float):
        value = [value] * (1 if ... in get_args(lists[0]) else len(get_args(lists[0])))
    try:
        return typed(kind, value, "")
    except WrongValue as error:
        only = error.expected.removeprefix("one of ")
        raise refused(name, value, error.expected if ", " in only else only) from error


def flattened(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a project's JSON with the keys of its model's part next to those around it."""
    flat = dict(given or {})
    for name in _NESTED:
        if isinstance(flat.get(name), Mapping):
            flat |= flat.pop(name)
    return flat


def check_stated(path: str, json: Any, measured: Mapping[str, Any]) -> None:
    """Check that the JSON agrees with the file, where both tell a field of our configuration.

    Raises: SaccadeError naming the first that differs.
    """
    for own in fields(json):
        said, ours = getattr(json, own.name), own.metadata.get("ours", "")
        if said is not None and ours in measured and said != measured[ours]:
            raise SaccadeError(
                f"{path}: --config has {own.metadata['path']} {said!r:.60}, but the file's tensors "
                f"have {measured[ours]}. Pass the JSON of this model."
            )


def key_notes(
    kind: Any, given: Mapping[str, Any], beside: Mapping[str, Any] | None, written: bool
) -> tuple[str, ...]:
    """Return a note for each key that no field of `kind` reads but that resembles one.

    `beside` is the JSON next to the weights, whose keys are known too.
    Raises: SaccadeError for any unknown key in a JSON that only a user writes (`written`).
    """
    known = (*_paths(kind), *map(str, beside or ()))
    unknown = tuple(_unknown(given, known, _LEAST_SIMILAR[written]))
    if written and unknown:
        raise unknown_key(*unknown[0], kind.WRITTEN)
    return tuple(
        f"--config: {key!r:.60} is not read. Did you mean {close}?"
        for key, close in unknown
        if close
    )


def unknown_key(key: str, close: str | None, known: Iterable[str]) -> SaccadeError:
    """Return the error about a key of a JSON that a user writes; `close` is one like it."""
    return SaccadeError(
        f"--config: found the unknown key {key!r:.60}, expected some of {', '.join(known)}."
        f"{f' Did you mean {close}?' if close else ''} Correct the key in the JSON, or leave it "
        "out."
    )


def _paths(kind: Any) -> Iterator[str]:
    """Yield the paths of all keys that a JSON may have."""
    hints = get_type_hints(kind)
    yield from getattr(kind, "UNREAD", ())
    for name, path in _own_paths(kind):
        nested = _paths(hints[name]) if is_dataclass(hints[name]) else ("",)
        yield from (f"{path}.{deeper}".rstrip(".") for deeper in nested)


def _unknown(
    given: Mapping[str, Any], known: Iterable[str], least: float, prefix: str = ""
) -> Iterator[tuple[str, str | None]]:
    """Yield each unknown key, and the known one that it resembles and that is missing."""
    inside = [path.partition(".") for path in known]
    names = {name for name, _, _ in inside}
    for key, value in given.items():
        if key not in names:
            close = nearest(str(key), sorted(names - {*given}), least)
            yield f"{prefix}{key}", close and f"{prefix}{close}"
            continue
        deeper = [rest for name, _, rest in inside if name == key and rest]
        if deeper and isinstance(value, Mapping):
            yield from _unknown(value, deeper, least, f"{prefix}{key}.")


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
    names = numbered(content) if isinstance(content, dict) else content
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SaccadeError(
            f"{flag} {path}: expected a list of strings, or an object that numbers them from 0."
        )
    check_labels(names, f"{flag} {path}", "name")
    return tuple(names)


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
    except (OSError, ValueError) as error:
        kind = "not JSON" if isinstance(error, ValueError) else "cannot be read"
        raise SaccadeError(f"{flag} {path}: {kind} ({error}). Pass a JSON file.") from error
