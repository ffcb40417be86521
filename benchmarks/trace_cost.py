# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of spans: all or some sent, no endpoint, and the router of an earlier commit.

Four servers serve a repository of two matrices. Its requests are as cheap as possible, so that the
overhead is most visible. The servers answer blocks of calls in turn, in a seeded random order; each
seed starts all four again. Core time is what the kernel booked on the server and its models'
processes. Writes benchmarks/results/trace_cost.json.

    python benchmarks/trace_cost.py --before COMMIT [--seeds 6 --rounds 30 --calls 20]
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from over_seeds import over_seeds
from result_file import write_result

from saccade.core.machine import process_fields, this_machine
from saccade.serving.client.client import Client
from saccade.serving.repository import router_folder
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.process import stubs_in
from saccade.serving.server.server import Server

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from tiny_artefacts import write_repository  # noqa: E402

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ROUTER = "model_repository/router"
# The environment of each server; the last one traces one request in a hundred.
SAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
KINDS: dict[str, dict[str, str]] = {"before": {}, "off": {}, "on": {}, "on, 1 %": SAMPLED}
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")
QUIET = ServeOptions(grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600)


def main() -> None:
    """Run all seeds and write each result as it finishes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", required=True, help="commit of the router to compare with")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=20, help="calls of each server per round")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "trace_cost.json")
    options = parser.parse_args()
    before = router_of(options.before)
    result: dict[str, Any] = {
        "benchmark": "cost of spans",
        "machine": this_machine().to_dict(),
        "before": options.before,
        "calls": options.rounds * options.calls,
        "nothing_us": nothing_us(),
        "seeds": [],
    }
    print(f"without an endpoint, of one request: {result['nothing_us']:.1f} us", flush=True)
    for seed in range(options.seeds):
        one = measured(seed, before, options.rounds, options.calls)
        result["seeds"].append(one)
        print(seed, {kind: one[kind]["core_us"] for kind in KINDS}, flush=True)
        if seed:  # an interval needs two seeds
            result["ratios"] = ratios(result["seeds"])
            write_result(options.out, result)
    for name, interval in result["ratios"].items():
        low, high = interval["interval"]
        print(f"{name}: {interval['mean']:+.3f} ({low:+.3f} to {high:+.3f})")


def ratios(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how much more one kind takes than another, as a share, with interval over seeds."""
    return {
        f"{figure}: {kind} over {other}, less 1": over_seeds(
            [ratio(one[kind][figure], one[other][figure]) - 1 for one in seeds]
        )
        for figure in ("round_us", "core_us")
        for kind, other in (("off", "before"), ("on", "off"), ("on, 1 %", "off"))
    }


def ratio(ours: Any, others: Any) -> float:
    """Return the ratio of two figures; for lists of rounds, the median of the rounds' ratios."""
    return float(np.median(np.divide(ours, others)))


def router_of(commit: str) -> dict[str, bytes]:
    """Return the router's files at a commit."""

    def git(*words: str) -> bytes:
        return subprocess.run(
            ["git", *words], cwd=HERE.parent, check=True, capture_output=True
        ).stdout

    names = git("ls-tree", "--name-only", f"{commit}:{ROUTER}").decode().split()
    return {name: git("show", f"{commit}:{ROUTER}/{name}") for name in names}


def measured(seed: int, before: dict[str, bytes], rounds: int, calls: int) -> dict[str, Any]:
    """Return median call times per round and core time per call of servers that run together."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint, received = stack.enter_context(receiver())
        servers = {
            kind: stack.enter_context(served(place, kind, before, endpoint)) for kind in KINDS
        }
        clients = {
            kind: stack.enter_context(Client(server.url, server.model))
            for kind, server in servers.items()
        }
        image = np.random.default_rng(seed).integers(0, 256, (8, 8, 1), dtype=np.uint8)
        for client in clients.values():
            call_times(client, image, calls)  # warm-up: lazy loading, and the lanes' estimates
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        core_us = dict.fromkeys(KINDS, 0.0)
        order = np.random.default_rng(seed)
        for _ in range(rounds):
            for kind in order.permutation(list(KINDS)):
                began = core_time_us(servers[kind])
                times[kind].append(statistics.median(call_times(clients[kind], image, calls)))
                core_us[kind] += core_time_us(servers[kind]) - began
        time.sleep(2)  # a block's last spans are sent within a second
        kilobytes = received.value / 1024
    figures = {
        kind: {
            "round_us": [1e6 * seconds for seconds in times[kind]],
            "core_us": core_us[kind] / (rounds * calls),
        }
        for kind in KINDS
    }
    return {"seed": seed, **figures, "received_kib": kilobytes}


def nothing_us(times: int = 20_000) -> float:
    """Measure the core time per request of the router's instrumentation when it is off."""
    server = ModuleType("triton_python_backend_utils")
    server.__dict__["Logger"] = SimpleNamespace(log_warn=print)
    router = [str(HERE.parent / ROUTER), *sys.path]
    with patch.dict(sys.modules, {server.__name__: server}), patch.object(sys, "path", router):
        module = import_module("instrumentation")
    watched, sender = module.Instrumentation("nac", {}), SimpleNamespace()
    request = SimpleNamespace(get_response_sender=lambda: sender)
    group = [SimpleNamespace(sender=sender)]
    began = time.process_time()
    for _ in range(times):
        watched.sender(request)
        watched.routed(group[0], None)
        watched.taken(group)
        with watched.decoding(group[0], []):
            pass
        with watched.calls_for(group), module.called("nac", 1):
            pass
    return 1e6 * (time.process_time() - began) / times


@contextmanager
def served(place: Path, kind: str, before: dict[str, bytes], endpoint: str) -> Iterator[Server]:
    """Start a server of the repository with the router and environment of its kind."""
    code: Callable[[str], dict[str, bytes]] = router_folder.router_code
    own = {path.name for path in (HERE.parent / ROUTER).glob("*.py")}

    def older(family: str) -> dict[str, bytes]:
        return {name: text for name, text in code(family).items() if name not in own} | before

    (place / kind).mkdir()
    with patch.object(router_folder, "router_code", older if kind == "before" else code):
        repository = write_repository(place / kind)
    named = {ENDPOINT: endpoint} if kind.startswith("on") else {}
    with patch.dict(os.environ, named | KINDS[kind]):
        server = Server(repository, QUIET)
        server.__enter__()
    try:
        yield server
    finally:
        server.__exit__(None, None, None)


def call_times(client: Client, image: np.ndarray, calls: int) -> list[float]:
    """Return the seconds of each of `calls` sequential calls."""
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        client.classify([image])
        times.append(time.perf_counter() - began)
    return times


def core_time_us(server: Server) -> float:
    """Return the core time of the server and its models' processes so far."""
    ticks = 0
    for pid in (server.pid, *(stub.pid for stub in stubs_in(server.pid))):
        fields = process_fields(pid)
        ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_US


@contextmanager
def receiver() -> Iterator[tuple[str, Any]]:
    """Start a receiver of spans in a separate process that counts the bytes."""
    received, port = multiprocessing.Value("q", 0), multiprocessing.Value("i", 0)
    process = multiprocessing.Process(target=receive, args=(received, port), daemon=True)
    process.start()
    while not port.value:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port.value}", received
    finally:
        process.terminate()
        process.join()


def receive(received: Any, port: Any) -> None:
    """Accept everything and count the bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.value += len(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.value = server.server_address[1]
    server.serve_forever()


if __name__ == "__main__":
    main()
