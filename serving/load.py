# SPDX-License-Identifier: Apache-2.0
"""Load on a server from a process of its own, and what its clients saw in one window."""

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from saccade.plugins.errors import ServerFailed
from saccade.serving import leash


@dataclass(frozen=True)
class Stream:
    """A group of clients that send the same kind of request, each waiting for its answer.

    Units: images counts per request; requests are serialised ModelInferRequest messages.
    """

    name: str
    model: str
    concurrency: int
    requests: tuple[bytes, ...]
    images: int = 1


@dataclass(frozen=True)
class StreamResult:
    """What one stream saw inside the window."""

    latencies_ms: tuple[float, ...]
    errors: dict[str, int] = field(default_factory=dict)
    first_error: str = ""


@dataclass(frozen=True)
class LoadResult:
    """One window: its length, each stream by name, and who used the processor.

    Units: seconds; statistics holds, for each model, cumulative counts and nanoseconds spent
    in the window by the server's own account.
    """

    seconds: float
    streams: dict[str, StreamResult]
    client_cpu_s: float
    server_cpu_s: dict[str, float]
    statistics: dict[str, dict[str, Any]]


class LoadGenerator:
    """The parent's end of the load process; a context manager that ends it."""

    def __init__(self, url: str, *, server_pid: int = 0, timeout_s: float = 30) -> None:
        self.url = url
        self.server_pid = server_pid
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "LoadGenerator":
        # Its own session: a Ctrl-C reaches the parent alone, which then ends this process.
        self._process = subprocess.Popen(
            leash.leashed([sys.executable, "-m", "saccade.serving.load_process"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None and self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()

    def run(self, streams: Sequence[Stream], *, seconds: float, warmup_s: float) -> LoadResult:
        """Load the server with all streams at once and report one window.

        Raises: ServerFailed if requests fail inside the window or the process ends.
        """
        assert self._process is not None and self._process.stdin and self._process.stdout
        order = {
            "url": self.url,
            "server_pid": self.server_pid,
            "timeout_s": self.timeout_s,
            "seconds": seconds,
            "warmup_s": warmup_s,
            "streams": [_packed(stream) for stream in streams],
        }
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ServerFailed(
                f"The load generator ended with code {self._process.wait()} while it loaded "
                f"{self.url}. Its own message is above."
            )
        return _result(json.loads(line))


def refuse_errors(result: LoadResult, url: str) -> LoadResult:
    """The same result, or an error where a request failed: a figure must not hide failures.

    Raises: ServerFailed with the count and the first failure.
    """
    for name, stream in result.streams.items():
        if stream.errors or not stream.latencies_ms:
            total = sum(stream.errors.values())
            raise ServerFailed(
                f"{name} at {url}: {total} requests failed and {len(stream.latencies_ms)} were "
                f"answered ({stream.first_error or 'none came in time'}). "
                "Look at the server's log."
            )
    return result


def _packed(stream: Stream) -> dict[str, Any]:
    plain = asdict(stream)
    plain["requests"] = [base64.b64encode(request).decode() for request in stream.requests]
    return plain


def _result(answer: dict[str, Any]) -> LoadResult:
    streams = {
        name: StreamResult(tuple(found["latencies_ms"]), found["errors"], found["first_error"])
        for name, found in answer.pop("streams").items()
    }
    return LoadResult(streams=streams, **answer)
