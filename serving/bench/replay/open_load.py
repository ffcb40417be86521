# SPDX-License-Identifier: Apache-2.0
"""Open-loop load: requests are sent when they are due, however earlier ones end.

A request's time counts from when it was due, so a server that makes the sender wait cannot hide
that (coordinated omission). How late each was sent is measured, too. Several processes may send.
"""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from saccade.core.errors import ServerFailed
from saccade.core.worker import Worker, WorkerEnded
from saccade.serving.bench.load import channel_to
from saccade.serving.client.connection import SERVICE, says_busy

OK, REFUSED = "OK", "REFUSED"  # ends; others are gRPC's names of failures
CHANNELS = 2
START_S = 1.5  # for the order to reach every process
GRACE_S = 5.0  # the server keeps the timeout; a call that is cut off costs it more than an answer


@dataclass(frozen=True)
class OpenOrder:
    """Requests to send: each is a head followed by a body, which may be large and is shared.

    Shapes: plan float64 [n 3] as bytes: when a request is due, and the indices of head and body.
    Units: due in seconds after start_s of `time.monotonic()`; timeout_s is of gRPC.
    """

    url: str
    plan: bytes
    heads: tuple[bytes, ...]
    bodies: tuple[bytes, ...]
    timeout_s: float
    start_s: float = 0.0


@dataclass(frozen=True)
class Sent:
    """How the requests of one process ended, in the order of its plan."""

    first_errors: dict[str, str]
    cpu_s: float
    ms: tuple[float, ...]
    lag_ms: tuple[float, ...]
    end: tuple[str, ...]
    variant: tuple[str, ...]
    degraded: tuple[bool, ...]


class Ended(NamedTuple):
    """How the requests ended, in the order of the plan.

    Shapes: all arrays [n]; variant is empty without an answer, and degraded tells whether a better
        variant answers without load.
    Units: ms is from when a request was due until its end, lag_ms until it was sent.
    """

    first_errors: dict[str, str]
    cpu_s: float
    ms: np.ndarray
    lag_ms: np.ndarray
    end: np.ndarray
    variant: np.ndarray
    degraded: np.ndarray


def send(order: OpenOrder, processes: int = 1) -> Ended:
    """Send the requests, in turn from each process.

    Raises: ServerFailed if a process ends.
    """
    plan = np.frombuffer(order.plan).reshape(-1, 3)
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(__name__)) for _ in range(processes)]
        try:
            for worker in workers:
                worker.ask(replace(order, plan=b""), Sent)  # it starts, and connects
            start_s = time.monotonic() + START_S
            for at, worker in enumerate(workers):
                part = plan[at::processes].tobytes()
                worker.send(replace(order, plan=part, start_s=start_s))
            parts = [worker.answer(Sent) for worker in workers]
        except WorkerEnded as ended:
            raise ServerFailed(
                f"The load generator stopped ({ended}) while it sent requests to {order.url}. "
                f"{ended.last_words}"
            ) from ended
    places = np.concatenate([np.arange(at, len(plan), processes) for at in range(processes)])
    columns = zip(*([*vars(part).values()][2:] for part in parts), strict=True)
    joined = [np.concatenate(column)[places.argsort()] for column in columns]
    errors = {end: said for part in parts for end, said in part.first_errors.items()}
    return Ended(errors, sum(part.cpu_s for part in parts), *joined)


class _Run:
    """One order on its way."""

    def __init__(self, order: OpenOrder) -> None:
        from tritonclient.grpc import service_pb2

        self.order, self.plan = order, np.frombuffer(order.plan).reshape(-1, 3)
        self.rows: list[Any] = [None] * len(self.plan)
        self.errors: dict[str, str] = {}
        self.channels = [channel_to(order.url) for _ in range(CHANNELS)]
        parse = service_pb2.ModelInferResponse.FromString
        self.calls = [
            to.unary_unary(f"{SERVICE}/ModelInfer", response_deserializer=parse)
            for to in self.channels
        ]

    async def one(self, at: int) -> None:
        import grpc

        due_s, head, body = self.plan[at]
        due_s += self.order.start_s
        request = self.order.heads[int(head)] + self.order.bodies[int(body)]
        lag_s, end, raw = time.monotonic() - due_s, OK, {"variant": b""}
        try:
            answer = await self.calls[at % CHANNELS](request, timeout=self.order.timeout_s)
            names = (output.name for output in answer.outputs)
            raw = dict(zip(names, answer.raw_output_contents, strict=True))
        except grpc.aio.AioRpcError as error:
            said = error.details() or ""
            end = REFUSED if says_busy(said) else error.code().name
            self.errors.setdefault(end, said)
        times = (1e3 * (time.monotonic() - due_s), 1e3 * lag_s)
        variant = raw["variant"].rstrip(b"\0").decode()
        self.rows[at] = (*times, end, variant, any(raw.get("degraded", b"")))


def main(order: OpenOrder) -> Sent:
    """Send the requests. Runs in a separate process."""
    return asyncio.run(_sent(order))


async def _sent(order: OpenOrder) -> Sent:
    run, tasks, cpu_s = _Run(order), set[asyncio.Task[None]](), time.process_time()
    for channel in run.channels:
        await channel.channel_ready()
    for at, due_s in enumerate((order.start_s + run.plan[:, 0]).tolist()):
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        task = asyncio.create_task(run.one(at))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for channel in run.channels:
        await channel.close()
    columns = zip(*run.rows, strict=True) if run.rows else [()] * 5
    return Sent(run.errors, time.process_time() - cpu_s, *columns)
