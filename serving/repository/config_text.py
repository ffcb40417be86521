# SPDX-License-Identifier: Apache-2.0
"""A model's configuration: the protobuf message as text and as plain data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError

MAX_BYTES = 1 << 20  # a configuration has a few kilobytes: a larger file is not a configuration


def config_text(message: Any) -> str:
    """Return a message in protobuf's text form: fields in order of number, maps sorted by key."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(message, as_utf8=True))


def parse_config(text: str) -> Any:
    """Parse the text of a config.pbtxt into a `ModelConfig`. Compare these, not the texts."""
    from google.protobuf import text_format

    return text_format.Parse(text, messages().ModelConfig())


def read_config(path: Path) -> Any:
    """Read the `ModelConfig` message from a file.

    Raises: SaccadeError if the file cannot be read or parsed.
    """
    from google.protobuf import text_format

    try:
        if path.stat().st_size > MAX_BYTES:
            raise SaccadeError(f"{path.name} is too large, expected at most {MAX_BYTES} bytes.")
        return parse_config(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SaccadeError(f"{path.name} cannot be read ({error}).") from error
    except text_format.ParseError as error:
        raise SaccadeError(f"{path.name} is not a valid ModelConfig ({error}).") from error


def messages() -> Any:
    """Return the module with the configuration's protobuf messages."""
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2


def set_plain_fields(message: Any, fields: Mapping[str, Any]) -> None:
    """Set fields of a message by name from plain data; maps are dictionaries."""
    from google.protobuf import json_format

    json_format.ParseDict(dict(fields), message)


def plain_fields(message: Any) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` that are set, by name; parameters as strings.

    Values are as in protobuf's JSON: 64-bit integers are strings.
    """
    from google.protobuf import json_format

    fields: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    if message.parameters:
        fields["parameters"] = {
            key: parameter.string_value for key, parameter in message.parameters.items()
        }
    return fields
