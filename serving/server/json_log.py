# SPDX-License-Identifier: Apache-2.0
"""The log as lines of JSON: one object per record, with the fields of the event.

Foreign text is escaped as on a terminal, so that no value contains a control character even after
a reader has decoded it. The further lines of a message are in `detail`.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from saccade.core.escaped import escaped_line

FIELDS = "saccade_fields"  # attribute of a log record: the fields passed to `event`
_ROUTER: Mapping[str, Any] = vars(import_module("saccade.model_repository.router.request_log"))
# Set for the server, so that its router writes a line for each refused or failed request.
REQUEST_LOG: str = _ROUTER["REQUEST_LOG"]
_LINE: str = _ROUTER["REQUEST_LINE"]
# The fields of such a line, with their types.
_REQUEST: Mapping[str, type] = _ROUTER["FIELDS"]


def event(name: str, **fields: Any) -> dict[str, Any]:
    """Return the arguments of a logger's call: the kind of event, and its fields."""
    return {"extra": {FIELDS: {"event": name, **fields}}}


class JsonFormatter(logging.Formatter):
    """Formatter that writes one line of ASCII JSON per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's time, level, logger, message and fields as JSON."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        message, *detail = text.split("\n")
        time = datetime.fromtimestamp(record.created, UTC)
        content = {
            "time": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **({"detail": detail} if detail else {}),
            **getattr(record, FIELDS, {}),
        }
        return json.dumps({name: _plain(value) for name, value in content.items()})


def request_fields(text: str) -> dict[str, Any]:
    """Return the fields of a router's line about one request; empty for any other line."""
    if not text.startswith(_LINE):
        return {}
    with suppress(ValueError):
        content = json.loads(text.removeprefix(_LINE))
        if isinstance(content, dict):
            return {
                name: content[name]
                for name, kind in _REQUEST.items()
                if type(content.get(name)) is kind
            }
    return {}


def _plain(value: Any) -> Any:
    """Convert a value for JSON, with its strings on one line and escaped."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | None) else escaped_line(value)
