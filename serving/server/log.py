# SPDX-License-Identifier: Apache-2.0
"""Logs: the server's output, and the lines of JSON in which `saccade serve` reports it.

The server's output is written to our log line by line and to a file; the last lines are kept. As
JSON, each record is one object with the fields of its event. Foreign text is escaped as on a
terminal, so that no value contains a control character even after a reader has decoded it. The
further lines of a message are in `detail`.
"""

import json
import logging
import re
import threading
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import IO, Any

from saccade.core.errors import SaccadeError
from saccade.core.escaping import escaped_line
from saccade.model_repository.router.tracing import FIELDS as REQUEST_FIELDS
from saccade.model_repository.router.tracing import REQUEST_LINE

LOGGER = logging.getLogger("saccade.server")
SERVICE = logging.getLogger("saccade.serve")

_LINE = re.compile(r"^([VIWEF])\d{4} [\d:.]+ \d+ (\S+)\] ?(.*)$")
_LEVELS = {
    "V": logging.DEBUG,
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "F": logging.CRITICAL,
}
# Printed at every start, at every start without a GPU, and at every clean stop. The address of the
# server's own metrics would mislead, because callers use those of the relay.
_HARMLESS = (
    "Started Metrics Service at",
    "CudaDriverHelper has not been initialized",
    "Unable to allocate pinned system memory",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "Unable to get NVML",
    "failed to allocate pinned system memory",
    "Exit timeout expired",
    "Signal (2) received",
)
_IDLE = "All models are stopped"
# The first line that its handler of SIGILL, SIGABRT, SIGBUS, SIGFPE and SIGSEGV prints.
_CRASH = re.compile(r"Signal \((4|6|7|8|11)\) received\.")
_KEPT = 400

FIELDS = "saccade_fields"  # attribute of a log record: the fields passed to `event`


class ServerLog:
    """Reads what each server writes, one after the other; errors show its `last_lines`.

    Raises: SaccadeError if the file for the raw log cannot be opened.
    """

    def __init__(self, raw: Path | None = None) -> None:
        self._last: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self._raw = _open(raw)

    def follow(
        self, output: IO[bytes], idle: threading.Event, crash: threading.Event
    ) -> threading.Thread:
        """Read `output` to its end in a separate thread.

        `idle` is set once no request is in flight, and `crash` when the server reports a crash.
        Two servers may write at the same time, while one replaces the other.
        """
        reader = threading.Thread(
            target=self._read, args=(output, idle, crash), name="server-log", daemon=True
        )
        reader.start()
        return reader

    def forget(self) -> None:
        """Forget the lines of earlier servers."""
        self._last.clear()

    def last_lines(self, count: int = 8) -> str:
        """Return the newest errors and warnings, or the newest other lines if there are none."""
        lines = [(level, text) for level, text in self._last if level > logging.DEBUG]
        grave = [text for level, text in lines if level >= logging.WARNING]
        chosen = (grave or [text for _, text in lines])[-count:]
        return "\n".join(f"  | {text}" for text in chosen) or "  | (it wrote nothing)"

    def says(self, text: str) -> bool:
        """Return True if a kept line contains `text`."""
        return any(text in line for _, line in list(self._last))

    def close(self) -> None:
        """Close the raw log."""
        if self._raw:
            self._raw.close()

    def _read(self, output: IO[bytes], idle: threading.Event, crash: threading.Event) -> None:
        level = logging.INFO
        with output:
            for raw in output:
                self._keep(raw)
                line = raw.decode(errors="replace").rstrip()
                if _CRASH.fullmatch(line):
                    crash.set()
                level, text = read_line(line, level)
                if not text:
                    continue
                if _IDLE in text:
                    idle.set()
                if fields := request_fields(text):
                    self._tell_request(level, text, fields)
                    continue
                self._last.append((level, text))
                LOGGER.log(level, "%s", text)

    def _tell_request(self, level: int, text: str, fields: dict[str, Any]) -> None:
        """Log the failure of one request; it does not explain a failure of the server."""
        known = {"request_id": "", "code": "", "reason": text, **fields}
        message = f"request {known['request_id']} {known['code']}: {known['reason']}"
        # The field has the first line of the reason; the formatter splits the message.
        first = {"reason": known["reason"].partition("\n")[0]} if "reason" in fields else {}
        LOGGER.log(level, "%s", message, **event("request_failed", **fields | first))

    def _keep(self, raw: bytes) -> None:
        """Write a line to the raw log; a full disk stops the log, not the service."""
        if self._raw is None or self._raw.closed:
            return
        try:
            self._raw.write(raw)
        except OSError as error:
            LOGGER.error("%s: the server's log stops here: %s", self._raw.name, error.strerror)
            self.close()


def read_line(line: str, level: int) -> tuple[int, str]:
    """Return level and message of one line; a line without a prefix keeps the previous level.

    Tables printed at the start, and lines known to be meaningless, get the debug level.
    """
    head = _LINE.match(line)
    if head:
        text = head[3].strip()
        # Messages are JSON strings; tables are an empty message followed by lines.
        if len(text) > 1 and text[0] == text[-1] == '"':
            text = _unquoted(text)
        level = _LEVELS[head[1]]
    else:
        text = line
        if line.startswith(("+", "|")):
            level = logging.DEBUG
    if any(phrase in text for phrase in _HARMLESS):
        return logging.DEBUG, text
    return level, text


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text[1:-1]


def _open(path: Path | None) -> FileIO | None:
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileIO(path, "wb")  # unbuffered, so that closing it writes nothing
    except OSError as error:
        raise SaccadeError(
            f"{path}: the server's log cannot be written there ({error.strerror}). "
            "Pass another path with --server-log."
        ) from error


def event(name: str, **fields: Any) -> dict[str, Any]:
    """Return the arguments of a logger's call: the kind of event, and its fields."""
    return {"extra": {FIELDS: {"event": name, **fields}}}


def report(level: int, name: str, text: str, **fields: Any) -> None:
    """Log an event of the service: its level, name, text and fields."""
    SERVICE.log(level, "%s", text, **event(name, **fields))


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
    if not text.startswith(REQUEST_LINE):
        return {}
    with suppress(ValueError):
        content = json.loads(text.removeprefix(REQUEST_LINE))
        if isinstance(content, dict):
            return {
                name: content[name]
                for name, kind in REQUEST_FIELDS.items()
                if type(content.get(name)) is kind
            }
    return {}


def _plain(value: Any) -> Any:
    """Convert a value for JSON, with its strings on one line and escaped."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | None) else escaped_line(value)
