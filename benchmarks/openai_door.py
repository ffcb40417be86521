# SPDX-License-Identifier: Apache-2.0
"""Measure the core time that a request through `saccade serve --openai` costs above gRPC.

    python benchmarks/openai_door.py [--rounds 7 --seconds 4 --callers 16]

Callers ask for the embedding of a small image, at the smallest budget of `shipped:sparo-shapes`. In
turn they send gRPC messages to the router, and HTTP requests to the process of --openai, as the
client of OpenAI sends them: JSON with a data URL, answered in base64. Requests are serialized
before. The core time of each process is read around each window. `above gRPC` is what all
processes of the service use for a request over HTTP, minus what they use over gRPC. The core time
of a caller over gRPC is listed too: the process of --openai is such a caller of the router, which
a service in front of it would have to run otherwise. Writes results/openai_door.json.
"""

import asyncio
import base64
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from result_file import BUILD, options_of, spread, write_result
from served_models import QUIET, random_images

from saccade.core.machine import cpu_seconds, family_of
from saccade.exporter.export import ExportOptions, export
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import encoded_request, png_files
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.server import Server

BUDGETS = (1.0, 0.5, 0.25)
AIM_MS = 0.4
_OUTPUTS = ("embedding", "variant", "variant_sha256")


def http_request(image: bytes) -> bytes:
    """Return a request as the client of OpenAI sends it."""
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    body = {"model": f"sparo-shapes@{BUDGETS[-1]}", "input": url, "encoding_format": "base64"}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n"
        "Content-Type: application/json\r\nUser-Agent: OpenAI/Python\r\nAuthorization: Bearer x\r\n"
        f"x-stainless-read-timeout: 600\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def over_http(port: int, message: bytes, callers: int, seconds: float) -> int:
    """Return the number of answers within the time; each caller waits for its answer."""
    end, answers = time.monotonic() + seconds, 0

    async def caller() -> None:
        nonlocal answers
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < end:
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body = await reader.readexactly(size)
            assert head.startswith(b"HTTP/1.1 200 "), body
            answers += 1
        writer.close()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return answers


def process_of(module: bytes) -> int:
    """Return the child process that runs a module."""
    (pid,) = (
        pid for pid in family_of(os.getpid()) if module in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return pid


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants so far."""
    return sum(cpu_seconds(family_of(pid)).values())


def main() -> None:
    parser = options_of(__doc__, "openai_door", rounds=7, seconds=4.0)
    parser.add_argument("--callers", type=int, default=16)
    options = parser.parse_args()
    folder = BUILD / "sparo-shapes"
    if not folder.exists():
        export("shipped:sparo-shapes", ExportOptions(folder, budget=BUDGETS, gate="quick"))
    image = random_images(folder, 1)
    message = http_request(png_files(image)[0, 0])
    request = (encoded_request("sparo-shapes", image, BUDGETS[-1], *_OUTPUTS),)
    stream = Stream("gRPC", "sparo-shapes", options.callers, request)
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "repository"
        deploy(folder, RepositoryOptions(out))
        with (
            Server(out, replace(QUIET, openai=0)) as server,
            LoadGenerator(server.url, server_pid=server.pid) as load,
        ):
            web, port = process_of(b"saccade.serving.web.main"), server.options.openai or 0
            asyncio.run(over_http(port, message, options.callers, 1.0))
            for _ in range(options.rounds):
                grpc = refuse_errors(
                    load.run([stream], seconds=options.seconds, warmup_s=0.5), load.url
                )
                count = len(grpc.only.latencies_ms)
                before = cpu_s(web), cpu_s(server.pid)
                answers = asyncio.run(over_http(port, message, options.callers, options.seconds))
                one = {
                    "HTTP, process of --openai": (cpu_s(web) - before[0]) / answers,
                    "HTTP, server": (cpu_s(server.pid) - before[1]) / answers,
                    "gRPC, server": sum(grpc.server_cpu_s.values()) / count,
                    "gRPC, caller": grpc.client_cpu_s / count,
                }
                one["above gRPC"] = sum(
                    sign * one[name] for name, sign in zip(list(one)[:3], (1, 1, -1), strict=True)
                )
                rounds.append({name: 1e3 * seconds for name, seconds in one.items()})
                print({name: round(ms, 3) for name, ms in rounds[-1].items()}, flush=True)
    result = {name: spread([one[name] for one in rounds]) for name in rounds[0]}
    content = {"callers": options.callers, "aim_ms": AIM_MS, "ms_per_request": result}
    write_result(options.out, content)
    for name, found in result.items():
        print(f"{name}: {found['median']:.3f} ms ({found['least']:.3f} to {found['most']:.3f})")


if __name__ == "__main__":
    main()
