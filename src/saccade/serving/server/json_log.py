# SPDX-License-Identifier: Apache-2.0
"""The log as lines of JSON: one object a record, with the fields of what happened.

What others wrote is written out as on a terminal, so that no value holds a control character even
after a reader has decoded it. Further lines of a message stand in `detail`.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from saccade.escaped import escaped_line

FIELDS = "saccade_fields"  # of a log record: what `event` was given
_ROUTER: Mapping[str, Any] = vars(import_module("saccade.model_repository.router.request_log"))
# Set for the server, so that its router writes a line for each request that is refused or fails.
REQUEST_LOG: str = _ROUTER["REQUEST_LOG"]
_LINE: str = _ROUTER["REQUEST_LINE"]
# What such a line may hold, and of which type.
_REQUEST: Mapping[str, type] = _ROUTER["FIELDS"]


def event(name: str, **fields: Any) -> dict[str, Any]:
    """Arguments of a logger's call: the kind of what happened, and its figures."""
    return {"extra": {FIELDS: {"event": name, **fields}}}


class JsonFormatter(logging.Formatter):
    """One line of JSON a record, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """The record with its time, level, logger, message and fields."""
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
    """The fields of a router's line about one request; none of any other line."""
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
    """A value for JSON, its texts on one line and without commands."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | None) else escaped_line(value)
