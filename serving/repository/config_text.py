# SPDX-License-Identifier: Apache-2.0
"""The text form of a model's configuration: the same message is the same bytes, always.

Protobuf promises to read its text form, not to write it the same in the next release; so this
file writes it, and a repository's hashes do not change with a package that saccade does not own.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError

MAX_BYTES = 1 << 20  # a configuration is a few kilobytes; what is larger is not a configuration


def config_text(message: Any) -> str:
    """A protobuf message as text: fields by number, maps by key, two spaces a level."""
    return "".join(f"{line}\n" for line in _lines(message, ""))


def parse_config(text: str) -> Any:
    """The `ModelConfig` message of a config.pbtxt: compare these, not the text."""
    from google.protobuf import text_format

    return text_format.Parse(text, messages().ModelConfig())


def read_config(path: Path) -> Any:
    """The `ModelConfig` message of a file.

    Raises: SaccadeError that says what is wrong with the text.
    """
    from google.protobuf import text_format

    try:
        if path.stat().st_size > MAX_BYTES:
            raise SaccadeError(f"{path.name} has more than {MAX_BYTES} bytes.")
        return parse_config(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SaccadeError(f"{path.name} cannot be read ({error}).") from error
    except text_format.ParseError as error:
        raise SaccadeError(f"{path.name} is no ModelConfig ({error}).") from error


def messages() -> Any:
    """The module of the configuration's messages."""
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2


def set_plain_fields(message: Any, fields: Mapping[str, Any]) -> None:
    """Set fields of a message from plain data, by their names; a map is a dictionary."""
    from google.protobuf import json_format

    json_format.ParseDict(dict(fields), message)


def set_fields(message: Any) -> Iterator[tuple[Any, Any]]:
    """Each field that is set with its values, a list or, of a map, pairs in order of the key."""
    for field, value in sorted(message.ListFields(), key=lambda pair: int(pair[0].number)):
        if is_map(field):
            yield field, [(key, value[key]) for key in sorted(value)]
        elif hasattr(value, "append") or hasattr(value, "add"):
            yield field, list(value)
        else:
            yield field, [value]


def is_map(field: Any) -> bool:
    """Whether a field is a map, which protobuf keeps as a list of pairs."""
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _lines(message: Any, indent: str) -> Iterator[str]:
    written = False
    for field, values in set_fields(message):
        written = True
        for value in values:
            if is_map(field):
                yield f"{indent}{field.name} {{"
                yield from _map_entry(field, value, indent + "  ")
                yield f"{indent}}}"
            else:
                yield from _field(field, value, indent)
    if not written:
        # `response_cache { }` says to a reader neither on nor off.
        for field in message.DESCRIPTOR.fields:
            if field.type == field.TYPE_BOOL:
                yield f"{indent}{field.name}: false"


def _map_entry(field: Any, pair: tuple[Any, Any], indent: str) -> Iterator[str]:
    for name, value in zip(("key", "value"), pair, strict=True):
        yield from _field(field.message_type.fields_by_name[name], value, indent)


def _field(field: Any, value: Any, indent: str) -> Iterator[str]:
    if field.type == field.TYPE_MESSAGE:
        yield f"{indent}{field.name} {{"
        yield from _lines(value, indent + "  ")
        yield f"{indent}}}"
    else:
        yield f"{indent}{field.name}: {_scalar(field, value)}"


def _scalar(field: Any, value: Any) -> str:
    if field.type == field.TYPE_BOOL:
        return "true" if value else "false"
    if field.type == field.TYPE_ENUM:
        return str(field.enum_type.values_by_number[value].name)
    if field.type == field.TYPE_STRING:
        return f'"{_escaped(value)}"'
    return repr(value)


def _escaped(text: str) -> str:
    kept = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "".join(
        kept.get(each) or (each if each >= " " and each != "\x7f" else f"\\{ord(each):03o}")
        for each in text
    )
