# SPDX-License-Identifier: Apache-2.0
"""The load generator's own process: asyncio clients, one JSON line in, one out.

A run has a warm-up and a window without a break between them. Requests that complete inside
the window count, so neither the first answers nor the last ones bend the throughput; processor
time and the server's statistics are read at the same two edges. Requests are serialised before
the run, answers are parsed in it.
"""

import asyncio
import base64
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from saccade.machine import cpu_seconds, family_of

_SERVICE = "/inference.GRPCInferenceService"
_PAUSE_AFTER_ERROR_S = 0.01


class _Clients:
    """All clients of one stream on one connection."""

    def __init__(self, plain: dict[str, Any], order: dict[str, Any]) -> None:
        import grpc
        from tritonclient.grpc import service_pb2

        self.name, self.model = plain["name"], plain["model"]
        self.concurrency = plain["concurrency"]
        self.requests = [base64.b64decode(request) for request in plain["requests"]]
        self.timeout_s = order["timeout_s"]
        self.done: list[tuple[float, float]] = []
        self.failed: list[tuple[float, str, str]] = []
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        # Without a pool of its own, two streams would share one connection.
        own = ("grpc.use_local_subchannel_pool", 1)
        self.channel = grpc.aio.insecure_channel(order["url"], options=[*unlimited, own])
        self.call = self.channel.unary_unary(
            f"{_SERVICE}/ModelInfer",
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        self.statistics = self.channel.unary_unary(
            f"{_SERVICE}/ModelStatistics",
            request_serializer=service_pb2.ModelStatisticsRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStatisticsResponse.FromString,
        )

    async def client(self, index: int, running: Callable[[], bool]) -> None:
        import grpc

        turn = index
        while running():
            request = self.requests[turn % len(self.requests)]
            turn += self.concurrency
            start = time.perf_counter()
            try:
                answer = await self.call(request, timeout=self.timeout_s)
                if not all(answer.raw_output_contents):
                    raise ValueError("an output is empty")
            except grpc.aio.AioRpcError as error:
                await self.fail(error.code().name, error.details() or "")
            except ValueError as error:
                await self.fail("EMPTY", str(error))
            else:
                self.done.append((start, time.perf_counter()))

    async def counts(self) -> dict[str, Any]:
        """What the server has counted of every model: the router's variants show up in it too."""
        from tritonclient.grpc import service_pb2

        answer = await self.statistics(service_pb2.ModelStatisticsRequest())
        return {found.name: _counts(found) for found in answer.model_stats}

    async def fail(self, kind: str, text: str) -> None:
        self.failed.append((time.perf_counter(), kind, text))
        await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    def answered(self, begin: float) -> bool:
        ends = [self.done[-1][1]] if self.done else []
        ends += [self.failed[-1][0]] if self.failed else []
        return any(end > begin for end in ends)

    def seen(self, begin: float, end: float) -> dict[str, Any]:
        failed = [failure for failure in self.failed if begin < failure[0] <= end]
        return {
            "latencies_ms": [
                round(1e3 * (stop - start), 4) for start, stop in self.done if begin < stop <= end
            ],
            "errors": Counter(kind for _, kind, _ in failed),
            "first_error": f"{failed[0][1]}: {failed[0][2]}" if failed else "",
        }


async def _measure(order: dict[str, Any]) -> dict[str, Any]:
    groups = [_Clients(plain, order) for plain in order["streams"]]
    running = True
    server = family_of(order["server_pid"]) if order["server_pid"] else []
    tasks = [
        asyncio.create_task(group.client(index, lambda: running))
        for group in groups
        for index in range(group.concurrency)
    ]
    await asyncio.sleep(order["warmup_s"])
    statistics = await groups[0].counts()
    before = _clocks(server)
    await asyncio.sleep(order["seconds"])
    # A model slower than the window is still measured: on its first answer.
    latest = before["time"] + order["seconds"] + order["timeout_s"]
    while time.perf_counter() < latest and not all(g.answered(before["time"]) for g in groups):
        await asyncio.sleep(0.01)
    after = _clocks(server)
    statistics = _differences(await groups[0].counts(), statistics)
    running = False
    await asyncio.gather(*tasks)
    for group in groups:
        await group.channel.close()
    return {
        "seconds": after["time"] - before["time"],
        "client_cpu_s": after["client"] - before["client"],
        "server_cpu_s": {
            name: used - before["server"].get(name, 0.0) for name, used in after["server"].items()
        },
        "statistics": statistics,
        "streams": {group.name: group.seen(before["time"], after["time"]) for group in groups},
    }


def _clocks(server: list[int]) -> dict[str, Any]:
    return {
        "server": cpu_seconds(server),
        "client": time.process_time(),
        "time": time.perf_counter(),
    }


def _counts(found: Any) -> dict[str, Any]:
    parts = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    return {
        "inferences": found.inference_count,
        "executions": found.execution_count,
        "requests": found.inference_stats.success.count,
        **{f"{part}_ns": getattr(found.inference_stats, part).ns for part in parts},
        "batches": {
            str(batch.batch_size): batch.compute_infer.count for batch in found.batch_stats
        },
    }


def _differences(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    # The server lists a model from its first inference on.
    return {model: _difference(found, before.get(model, {})) for model, found in after.items()}


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    batches = {
        size: count - before.get("batches", {}).get(size, 0)
        for size, count in after["batches"].items()
    }
    plain = {key: after[key] - before.get(key, 0) for key in after if key != "batches"}
    return {**plain, "batches": {size: count for size, count in batches.items() if count}}


def _main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(asyncio.run(_measure(json.loads(line)))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
