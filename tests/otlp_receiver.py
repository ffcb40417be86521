# SPDX-License-Identifier: Apache-2.0
"""A receiver of spans over OTLP, which records them and can simulate failures."""

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Span:
    """One received span, with the attributes of the process that sent it."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool
    state: str
    resource: dict[str, Any]


class Receiver:
    """Receives spans at `endpoint` and answers `status` after `delay_s`, with `body_mib` MiB.

    `body_sent` is how many bytes of such a body its senders took.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.status, self.delay_s, self.requests = 200, 0.0, 0
        self.body_mib = self.body_sent = 0
        members = {"receiver": self}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), members))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        """The address for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def of(self, trace: str) -> dict[str, list[Span]]:
        """Return the spans of one trace, by name."""
        named: dict[str, list[Span]] = {}
        for span in list(self.spans):
            if span.trace == trace:
                named.setdefault(span.name, []).append(span)
        return named

    def close(self) -> None:
        """Stop receiving."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver inside the block."""
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()


class _Handler(BaseHTTPRequestHandler):
    receiver: Receiver

    def do_POST(self) -> None:
        receiver = self.receiver
        body = self.rfile.read(int(self.headers["Content-Length"]))
        receiver.requests += 1
        time.sleep(receiver.delay_s)
        if receiver.status == 200 and self.path == "/v1/traces":
            plain = gzip.decompress(body) if self.headers.get("Content-Encoding") else body
            receiver.spans += decoded(plain)
        self.send_response(receiver.status)
        if not receiver.body_mib:
            self.send_header("Content-Length", "0")
        self.end_headers()
        with suppress(OSError):  # the sender has heard enough
            for _ in range(16 * receiver.body_mib):
                receiver.body_sent += self.wfile.write(bytes(2**16))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def decoded(body: bytes) -> list[Span]:
    """Return the spans of one message."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
    )

    message = ExportTraceServiceRequest.FromString(body)
    return [
        Span(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            span.status.code == 2,
            span.trace_state,
            _values(group.resource.attributes),
        )
        for group in message.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
