# SPDX-License-Identifier: Apache-2.0
"""Callers in a separate process: each calls, waits for the answer, and records it.

    python -m chaos.callers      a task as one JSON line in, the calls as one JSON line out

Closing standard input stops the callers. Requests are serialized in advance. An answer must have
the same numbers as the first one that its caller got.
"""

import asyncio
import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PAUSE_S = 0.01
OWN_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000),
]  # fmt: skip
_TESTS = Path(__file__).resolve().parent.parent


class Call(NamedTuple):
    """One call: its start and end by time.monotonic(), and its gRPC status."""

    began: float
    ended: float
    status: str


@dataclass(frozen=True)
class Group:
    """Callers that each send the same request, one at a time. Units: timeout_s is seconds."""

    request: bytes
    count: int = 2
    timeout_s: float = 2.0


class Callers:
    """The parent's side: callers run inside the block; after it, `calls` has the results."""

    def __init__(self, url: str, groups: Mapping[str, Group]) -> None:
        self._order = {
            "url": url,
            "groups": {
                name: {
                    "request": base64.b64encode(group.request).decode(),
                    "count": group.count,
                    "timeout_s": group.timeout_s,
                }
                for name, group in groups.items()
            },
        }
        self.calls: dict[str, list[Call]] = {name: [] for name in groups}
        self.words: dict[str, str] = {}  # the first message of each status

    def __enter__(self) -> "Callers":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.callers"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_TESTS,
            start_new_session=True,
        )  # fmt: skip
        self._process.stdin.write(json.dumps(self._order) + "\n")
        self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._reader.join(timeout=30)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def answered_since(self, when: float, least: int = 3) -> bool:
        """True if the latest calls of every group started after `when` and were answered."""
        for calls in self.calls.values():
            newest = [call for call in calls[-least:] if call.began > when]
            if len(newest) < least or any(call.status != "OK" for call in newest):
                return False
        return True

    def _read(self) -> None:
        for line in self._process.stdout:
            name, began, ended, status, said = json.loads(line)
            self.calls[name].append(Call(began, ended, status))
            if said:
                self.words.setdefault(f"{name} {status}", said)


async def _caller(name: str, group: dict[str, Any], url: str, ending: asyncio.Event) -> None:
    import grpc
    import numpy as np
    from tritonclient.grpc import service_pb2

    from saccade.exporter.gate.metrics import WHOLE, relative_error, tensor_limit

    request, first = base64.b64decode(group["request"]), None
    async with grpc.aio.insecure_channel(url, options=OWN_CHANNEL) as channel:
        ask = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        while not ending.is_set():
            began, status, said = time.monotonic(), "OK", ""
            try:
                answer = await ask(request, timeout=group["timeout_s"])
                numbers = np.frombuffer(b"".join(answer.raw_output_contents), np.float32)
                first = numbers if first is None else first
                if not numbers.size or relative_error(numbers, first, WHOLE) > tensor_limit("fp32"):
                    status = "WRONG_ANSWER"
            except grpc.aio.AioRpcError as error:
                status, said = error.code().name, error.details() or ""
            print(json.dumps([name, began, time.monotonic(), status, said]), flush=True)
            await asyncio.sleep(PAUSE_S)


async def _main() -> None:
    order = json.loads(sys.stdin.readline())
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ending.set)

    threading.Thread(target=wait, daemon=True).start()
    await asyncio.gather(
        *(
            _caller(name, group, order["url"], ending)
            for name, group in order["groups"].items()
            for _ in range(group["count"])
        )
    )


if __name__ == "__main__":
    asyncio.run(_main())
