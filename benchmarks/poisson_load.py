# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive at random at changing rates, from several processes, with every answer.

Unlike saccade's own load generator, this one keeps the answers and reads them after the load.
"""

import asyncio
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np

METHOD = "/inference.GRPCInferenceService/ModelInfer"
OK, REFUSED, OTHER = 0, 1, 2
START_S = 3.0  # time in which the processes start


@dataclass(frozen=True)
class Order:
    """The requests of one generator; the first phase warms up, before time 0.

    Units: rates are per second; start_s is of `time.monotonic()`.
    """

    url: str
    messages: tuple[bytes, ...]
    phases: tuple[tuple[float, float], ...]  # rate and seconds
    deadline_s: float
    seed: int
    start_s: float = 0.0


@dataclass(frozen=True)
class Sent:
    """All requests of one arm.

    Shapes: planned_s, ms, lag_ms, status, message [n]; classes, variants, degraded [n images].
    """

    planned_s: np.ndarray
    ms: np.ndarray
    lag_ms: np.ndarray
    status: np.ndarray
    message: np.ndarray
    classes: np.ndarray
    variants: np.ndarray
    degraded: np.ndarray
    refusals: dict[str, str]


def send(order: Order, processes: int) -> Sent:
    """Send an order from several processes together, each with its part of the rate."""
    start_s = time.monotonic() + START_S
    phases = tuple((rate / processes, seconds) for rate, seconds in order.phases)
    parts = [
        replace(order, phases=phases, start_s=start_s, seed=order.seed + index)
        for index in range(processes)
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return _joined(list(pool.map(generate, parts)))


def _joined(parts: list[Sent]) -> Sent:
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Sent.__dataclass_fields__
        if name != "refusals"
    }
    refusals: dict[str, str] = {}
    for part in parts:
        refusals |= part.refusals
    return Sent(**joined, refusals=refusals)


def generate(order: Order) -> Sent:
    """Send one generator's requests. Runs in a separate process."""
    return asyncio.run(_generate(order))


async def _generate(order: Order) -> Sent:
    import grpc

    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    channel = grpc.aio.insecure_channel(order.url, options=own)
    call = channel.unary_unary(METHOD)
    await channel.channel_ready()
    rng, tasks = random.Random(order.seed), set()
    rows: list[tuple[float, float, float, int, int, bytes]] = []
    refusals: dict[str, str] = {}

    async def one(planned_s: float, index: int) -> None:
        began = time.monotonic()
        answer, status = b"", OK
        try:
            answer = await call(order.messages[index], timeout=order.deadline_s)
        except grpc.aio.AioRpcError as error:
            status = REFUSED if error.code() is grpc.StatusCode.UNAVAILABLE else OTHER
            refusals.setdefault(error.code().name, error.details() or "")
        now = time.monotonic()
        lag_ms = 1e3 * max(0.0, began - planned_s)
        rows.append((planned_s, 1e3 * (now - began), lag_ms, status, index, answer))

    planned_s, until_s = order.start_s, order.start_s
    index = order.seed % len(order.messages)
    for rate, seconds in order.phases:
        planned_s, until_s = until_s, until_s + seconds
        while (planned_s := planned_s + rng.expovariate(rate)) < until_s:
            await asyncio.sleep(max(0.0, planned_s - time.monotonic()))
            index = (index + 1) % len(order.messages)
            task = asyncio.create_task(one(planned_s, index))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    await channel.close()
    return _sent(order, rows, refusals)


def _sent(order: Order, rows: list[Any], refusals: dict[str, str]) -> Sent:
    """Parse the answers, after the load."""
    from tritonclient.grpc import service_pb2

    images = service_pb2.ModelInferRequest.FromString(order.messages[0]).inputs[0].shape[0]
    classes = np.full((len(rows), images), -1, np.int16)
    degraded = np.zeros((len(rows), images), bool)
    names = np.zeros((len(rows), images), "U64")
    for at, row in enumerate(rows):
        if row[3] != OK:
            continue
        answer = service_pb2.ModelInferResponse.FromString(row[5])
        raw = dict(zip((o.name for o in answer.outputs), answer.raw_output_contents, strict=True))
        logits = np.frombuffer(raw["logits"], np.float32).reshape(images, -1)
        width = len(raw["variant"]) // images
        texts = [raw["variant"][i * width : (i + 1) * width] for i in range(images)]
        classes[at], names[at] = logits.argmax(-1), [text.rstrip(b"\0").decode() for text in texts]
        if "degraded" in raw:
            degraded[at] = np.frombuffer(raw["degraded"], bool)
    columns = [np.array([row[at] for row in rows]) for at in range(5)]
    planned_s = columns[0] - order.start_s - order.phases[0][1]
    return Sent(planned_s, *columns[1:], classes, names, degraded, refusals)
