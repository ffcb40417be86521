# SPDX-License-Identifier: Apache-2.0
"""Load on a server from a process of its own, and what its clients saw in one window."""

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from saccade.errors import ServerFailed
from saccade.serving.bench.load_child import LoadChild


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


class LoadGenerator(LoadChild):
    """The parent's end of the load process; a context manager that ends it."""

    def __init__(self, url: str, *, server_pid: int = 0, timeout_s: float = 30) -> None:
        super().__init__("saccade.serving.bench.load_process", url)
        self.server_pid = server_pid
        self.timeout_s = timeout_s

    def run(self, streams: Sequence[Stream], *, seconds: float, warmup_s: float) -> LoadResult:
        """Load the server with all streams at once and report one window.

        Raises: ServerFailed if requests fail inside the window or the process ends.
        """
        order = {
            "url": self.url,
            "server_pid": self.server_pid,
            "timeout_s": self.timeout_s,
            "seconds": seconds,
            "warmup_s": warmup_s,
            "streams": [_packed(stream) for stream in streams],
        }
        return _result(self.ask(order))


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
