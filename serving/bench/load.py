# SPDX-License-Identifier: Apache-2.0
"""Closed-loop load on a server from a separate process, measured by its clients in one window.

A run has a warm-up and then a window, without a break between them. Requests that complete inside
the window count, so neither the first nor the last answers distort the throughput. CPU time and
the server's statistics are read at the two ends of the window. Requests are serialized before the
run; answers are parsed during it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.core.errors import ServerFailed
from saccade.core.machine import cpu_seconds, family_of
from saccade.core.worker import Worker, WorkerEnded
from saccade.serving.client.connection import SERVICE, channel_asyncio

_PAUSE_AFTER_ERROR_S = 0.01
# Time limits of a request: of the first ones, and later in proportion to the longest answer so far.
_FIRST_S, _LEAST_S, _TIMES = 600.0, 30.0, 10.0
LEAST_ANSWERS, LONGER = 4, 4.0
WARMUP_S = 0.15  # before a window of a benchmark


@dataclass(frozen=True)
class Stream:
    """A group of clients that send the same kind of request, each waiting for its answer.

    Units: images per request; requests are serialized ModelInferRequest messages.
    """

    name: str
    model: str
    concurrency: int
    requests: tuple[bytes, ...]
    images: int = 1


@dataclass(frozen=True)
class StreamResult:
    """Results of one stream inside the window."""

    latencies_ms: tuple[float, ...]
    errors: dict[str, int] = field(default_factory=dict)
    first_error: str = ""


@dataclass(frozen=True)
class LoadResult:
    """One window: its length, each stream by name, and the CPU time of both sides.

    Units: seconds; statistics has the server's counts and nanoseconds of the window per model, and
           is empty behind a proxy that does not pass the call on.
    """

    seconds: float
    streams: dict[str, StreamResult]
    client_cpu_s: float
    server_cpu_s: dict[str, float]
    statistics: dict[str, dict[str, Any]]

    @property
    def only(self) -> StreamResult:
        """The results of the only stream."""
        (stream,) = self.streams.values()
        return stream

    @property
    def rate(self) -> float:
        """Answers per second of the only stream."""
        return len(self.only.latencies_ms) / self.seconds


@dataclass(frozen=True)
class LoadOrder:
    """The order that the process receives: one window of load."""

    url: str
    server_pid: int
    timeout_s: float | None  # of each request; None: from the longest answer so far
    seconds: float
    warmup_s: float
    streams: tuple[Stream, ...]


class LoadGenerator(Worker):
    """A process with clients that wait for each answer before they send the next request.

    It is a context manager that stops the process.
    """

    def __init__(self, url: str, *, server_pid: int = 0, timeout_s: float | None = None) -> None:
        super().__init__(__name__)
        self.url, self.server_pid, self.timeout_s = url, server_pid, timeout_s

    def run(self, streams: Sequence[Stream], *, seconds: float, warmup_s: float) -> LoadResult:
        """Put the load of all streams on the server together, and return one window.

        Raises: ServerFailed if the process stops.
        """
        order = LoadOrder(
            self.url, self.server_pid, self.timeout_s, seconds, warmup_s, tuple(streams)
        )
        try:
            return self.ask(order, LoadResult)
        except WorkerEnded as ended:
            raise ServerFailed(
                f"The load generator stopped ({ended}) while it sent requests to {self.url}. "
                f"{ended.last_words}"
            ) from ended


def refuse_errors(result: LoadResult, url: str) -> LoadResult:
    """Return the result unchanged, unless a request failed: a figure must not hide failures.

    Raises: ServerFailed with the number of failures and the first one.
    """
    for name, stream in result.streams.items():
        if stream.errors or not stream.latencies_ms:
            total = sum(stream.errors.values())
            raise ServerFailed(
                f"{name} at {url}: {total} request{'s' * (total != 1)} failed, and "
                f"{len(stream.latencies_ms)} got an answer "
                f"({stream.first_error or 'no answer came in time'}). See the server's log."
            )
    return result


def channel_to(url: str) -> Any:
    """Return an asyncio channel for load, with its own connection."""
    own = {
        # Without separate pools, two streams would share one connection.
        "grpc.use_local_subchannel_pool": 1,
        # If the address has several replicas, ipv4:HOST:PORT,HOST:PORT, they are used in turn.
        "grpc.lb_policy_name": "round_robin",
    }
    return channel_asyncio(url, **own)


class _Clients:
    """All clients of one stream on one connection."""

    def __init__(self, stream: Stream, order: LoadOrder) -> None:
        from tritonclient.grpc import service_pb2

        self.stream, self._timeout_s, self._longest_s = stream, order.timeout_s, 0.0
        self.done: list[tuple[float, float]] = []
        self.failed: list[tuple[float, str, str]] = []
        self.channel = channel_to(order.url)
        self.call = self.channel.unary_unary(
            f"{SERVICE}/ModelInfer",
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        self.statistics = self.channel.unary_unary(
            f"{SERVICE}/ModelStatistics",
            request_serializer=service_pb2.ModelStatisticsRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStatisticsResponse.FromString,
        )

    async def client(self, index: int, running: Callable[[], bool]) -> None:
        import grpc

        turn = index
        while running():
            request = self.stream.requests[turn % len(self.stream.requests)]
            turn += self.stream.concurrency
            start = time.perf_counter()
            try:
                answer = await self.call(request, timeout=self.limit_s)
                if not all(answer.raw_output_contents):
                    raise ValueError("an output is empty")
            except grpc.aio.AioRpcError as error:
                await self.fail(error.code().name, error.details() or "")
            except ValueError as error:
                await self.fail("EMPTY", str(error))
            else:
                self.done.append((start, time.perf_counter()))
                self._longest_s = max(self._longest_s, self.done[-1][1] - start)

    @property
    def limit_s(self) -> float:
        """Time limit of a request that is sent now."""
        if self._timeout_s is not None:
            return self._timeout_s
        return max(_LEAST_S, _TIMES * self._longest_s) if self.done else _FIRST_S

    async def counts(self) -> dict[str, Any]:
        """Return the server's statistics of every model, including the router's variants.

        Nothing if a proxy does not pass that call on.
        """
        import grpc
        from tritonclient.grpc import service_pb2

        try:
            answer = await self.statistics(service_pb2.ModelStatisticsRequest())
        except grpc.aio.AioRpcError:  # if the server is gone, the requests fail, too
            return {}
        return {model_stats.name: _counts(model_stats) for model_stats in answer.model_stats}

    async def fail(self, kind: str, text: str) -> None:
        self.failed.append((time.perf_counter(), kind, text))
        await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    def answered(self, begin: float) -> bool:
        """Return whether there is an answer per client, and at least a few, or a failure."""
        done = sum(end > begin for _, end in self.done)
        return self.lost(begin) or done >= max(LEAST_ANSWERS, self.stream.concurrency)

    def lost(self, begin: float) -> bool:
        """Return whether a request has failed since."""
        return any(end > begin for end, _, _ in self.failed)

    def seen(self, begin: float, end: float) -> StreamResult:
        failed = [failure for failure in self.failed if begin < failure[0] <= end]
        return StreamResult(
            tuple(
                round(1e3 * (stop - start), 4) for start, stop in self.done if begin < stop <= end
            ),
            Counter(kind for _, kind, _ in failed),
            f"{failed[0][1]}: {failed[0][2]}" if failed else "",
        )


def main(order: LoadOrder) -> LoadResult:
    """Put load on the server. Runs in the separate process."""
    return asyncio.run(_measure(order))


async def _measure(order: LoadOrder) -> LoadResult:
    groups = [_Clients(stream, order) for stream in order.streams]
    running = True
    server = family_of(order.server_pid) if order.server_pid else []
    tasks = [
        asyncio.create_task(group.client(index, lambda: running))
        for group in groups
        for index in range(group.stream.concurrency)
    ]
    await asyncio.sleep(order.warmup_s)
    statistics = await groups[0].counts()
    before = _clocks(server)
    await asyncio.sleep(order.seconds)
    await _long_enough(groups, before["time"], order.seconds)
    after = _clocks(server)
    statistics = _differences(await groups[0].counts(), statistics)
    running = False
    await asyncio.gather(*tasks)
    for group in groups:
        await group.channel.close()
    return LoadResult(
        seconds=after["time"] - before["time"],
        streams={g.stream.name: g.seen(before["time"], after["time"]) for g in groups},
        client_cpu_s=after["client"] - before["client"],
        server_cpu_s={
            name: used - before["server"].get(name, 0.0) for name, used in after["server"].items()
        },
        statistics=statistics,
    )


async def _long_enough(groups: Sequence[_Clients], begin: float, seconds: float) -> None:
    """Make the window long enough for slow models: four times as long as the first answers took.

    The end does not depend on when an answer comes, which would count one too many. A failed
    request ends the window: what would be measured is useless, and the server may be gone.
    """
    end, slow = begin + seconds, False
    while waited := [group for group in groups if not group.answered(begin)]:
        slow = True
        if time.perf_counter() > end + max(group.limit_s for group in waited):
            return
        await asyncio.sleep(0.01)
    end = begin + LONGER * (time.perf_counter() - begin)
    while slow and time.perf_counter() < end and not any(group.lost(begin) for group in groups):
        await asyncio.sleep(0.01)


def _clocks(server: list[int]) -> dict[str, Any]:
    return {
        "server": cpu_seconds(server),
        "client": time.process_time(),
        "time": time.perf_counter(),
    }


def _counts(statistics: Any) -> dict[str, Any]:
    parts = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    return {
        "inferences": statistics.inference_count,
        "executions": statistics.execution_count,
        "requests": statistics.inference_stats.success.count,
        **{f"{part}_ns": getattr(statistics.inference_stats, part).ns for part in parts},
        "batches": {
            str(batch.batch_size): batch.compute_infer.count for batch in statistics.batch_stats
        },
    }


def _differences(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    # The server lists a model only after its first inference.
    return {model: _difference(counts, before.get(model, {})) for model, counts in after.items()}


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    batches = {
        size: count - before.get("batches", {}).get(size, 0)
        for size, count in after["batches"].items()
    }
    plain = {key: after[key] - before.get(key, 0) for key in after if key != "batches"}
    return {**plain, "batches": {size: count for size, count in batches.items() if count}}
