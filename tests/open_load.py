# SPDX-License-Identifier: Apache-2.0
"""Open-loop load from a separate process: requests arrive whether earlier ones are answered or not.

Arrivals are a Poisson process with a seed. Requests are serialized before the run and answers are
not parsed, so the generator needs little CPU time. The result has how late it sent each request.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from places import TESTS

from saccade.core.worker import Worker

_METHOD = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class Arrivals:
    """Requests that arrive at a rate, whatever happens to earlier ones.

    Units: rate is requests per second; deadline_s is the gRPC deadline.
    """

    requests: tuple[bytes, ...]
    rate: float
    seconds: float
    deadline_s: float
    seed: int = 0
    channels: int = 2
    url: str = ""  # of the generator that sends them


@dataclass(frozen=True)
class OpenLoadResult:
    """Results of an open load, request by request.

    `after_end` is the number of answers that came after the last request was sent.

    Units: milliseconds after sending; lag_ms is how much later than planned each was sent.
    """

    sent: int
    seconds: float
    answered_ms: tuple[float, ...]
    after_end: int
    failed_ms: dict[str, tuple[float, ...]]
    lag_ms: tuple[float, ...]
    client_cpu_s: float
    first_errors: dict[str, str]

    def statuses(self) -> Counter[str]:
        """Return the number of requests by final status."""
        ends = {status: len(times) for status, times in self.failed_ms.items()}
        return Counter({"OK": len(self.answered_ms), **ends})


class OpenLoad(Worker):
    """A generator that sends requests on time, whatever happened to earlier ones."""

    def __init__(self, url: str) -> None:
        paths = (str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
        super().__init__(__name__, environment={"PYTHONPATH": os.pathsep.join(paths)})
        self.url = url

    def run(self, arrivals: Arrivals) -> OpenLoadResult:
        """Send all requests, and wait until the last one is answered or has failed."""
        return self.ask(replace(arrivals, url=self.url), OpenLoadResult)


class _Run:
    """One order: its channels, and the results so far."""

    def __init__(self, arrivals: Arrivals) -> None:
        import grpc

        self.arrivals = arrivals
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            # If the address has several replicas, ipv4:HOST:PORT,HOST:PORT, they are used in turn.
            ("grpc.lb_policy_name", "round_robin"),
        ]
        self.channels = [
            grpc.aio.insecure_channel(arrivals.url, options=options)
            for _ in range(arrivals.channels)
        ]
        # Without serializers and deserializers, bytes pass through unchanged.
        self.calls = [channel.unary_unary(_METHOD) for channel in self.channels]
        self.answered_ms: list[float] = []
        self.after_end, self.ended = 0, False
        self.failed_ms: dict[str, list[float]] = {}
        self.first_errors: dict[str, str] = {}

    async def one(self, index: int) -> None:
        import grpc

        call = self.calls[index % len(self.calls)]
        request = self.arrivals.requests[index % len(self.arrivals.requests)]
        began = time.perf_counter()
        try:
            answer = await call(request, timeout=self.arrivals.deadline_s)
            status = "OK" if answer else "EMPTY"
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            self.first_errors.setdefault(status, error.details() or "")
        waited_ms = round(1e3 * (time.perf_counter() - began), 3)
        if status == "OK":
            self.answered_ms.append(waited_ms)
            self.after_end += self.ended
        else:
            self.failed_ms.setdefault(status, []).append(waited_ms)


def main(arrivals: Arrivals) -> OpenLoadResult:
    """Put load on the server. Runs in the separate process."""
    return asyncio.run(_load(arrivals))


async def _load(arrivals: Arrivals) -> OpenLoadResult:
    run, rng = _Run(arrivals), random.Random(arrivals.seed)
    for channel in run.channels:
        await channel.channel_ready()
    tasks: set[asyncio.Task[None]] = set()
    lag_ms, sent = [], 0
    cpu, start = time.process_time(), time.perf_counter()
    planned = start
    while (planned := planned + rng.expovariate(arrivals.rate)) < start + arrivals.seconds:
        await asyncio.sleep(max(0.0, planned - time.perf_counter()))
        lag_ms.append(round(1e3 * max(0.0, time.perf_counter() - planned), 3))
        task = asyncio.create_task(run.one(sent))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        sent += 1
    seconds, run.ended = time.perf_counter() - start, True
    await asyncio.gather(*tasks)
    used = time.process_time() - cpu
    for channel in run.channels:
        await channel.close()
    return OpenLoadResult(
        sent=sent,
        seconds=seconds,
        answered_ms=tuple(run.answered_ms),
        after_end=run.after_end,
        failed_ms={status: tuple(failed_m) for status, failed_m in run.failed_ms.items()},
        lag_ms=tuple(lag_ms),
        client_cpu_s=used,
        first_errors=run.first_errors,
    )


def with_timeout(message: Any, timeout_us: int) -> bytes:
    """Return a serialized request with a timeout parameter: how long its caller waits."""
    message.parameters["timeout"].int64_param = timeout_us
    return bytes(message.SerializeToString())


def quantiles(values_ms: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p95 and p99 of some times; None if there are none."""
    if not values_ms:
        return None
    return {f"p{q}": float(np.percentile(values_ms, q)) for q in (50, 95, 99)}
