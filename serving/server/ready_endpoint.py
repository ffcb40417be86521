# SPDX-License-Identifier: Apache-2.0
"""`GET /ready`: readiness of the server over HTTP."""

from collections.abc import Callable

from saccade.serving.client.readiness import Readiness
from saccade.serving.server.http_endpoint import JSON, Answer, HttpEndpoint, json_line


class ReadyEndpoint(HttpEndpoint):
    """Answers 200 or 503, with the readiness as JSON."""

    def __init__(self, host: str, port: int, ask: Callable[[], Readiness]) -> None:
        def answer() -> Answer:
            readiness = ask()
            return 200 if readiness else 503, JSON, json_line(readiness.to_dict())

        super().__init__(host, port, "--ready-port", ("/ready", "/"), answer)
