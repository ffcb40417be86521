# SPDX-License-Identifier: Apache-2.0
"""A model's configuration: protobuf's message as text, and as plain data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError

MAX_BYTES = 1 << 20  # a configuration is a few kilobytes; what is larger is not a configuration


def config_text(message: Any) -> str:
    """A message in protobuf's text form: fields by number, maps by key."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(message, as_utf8=True))


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


def plain_fields(message: Any) -> dict[str, Any]:
    """The fields of a `ModelConfig` that are set, by their names; parameters as their texts.

    As JSON has them: whole numbers of 64 bits are texts.
    """
    from google.protobuf import json_format

    fields: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    if message.parameters:
        fields["parameters"] = {
            key: parameter.string_value for key, parameter in message.parameters.items()
        }
    return fields
