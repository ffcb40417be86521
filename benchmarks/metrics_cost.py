# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of counting requests: a served model with and without counting in its router.

Both servers run at the same time and are called in turn by threads in a closed loop. The CPU time
per request of the server and its models and the requests per second are compared. Also measured: in
a server, the cost of reporting one number and of one observation of a histogram; in this process,
the cost of counting one request, compared with as many calls that do nothing. Writes
benchmarks/results/metrics_cost.json.
"""

import argparse
import json
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from bench_folder import bench_folder, random_images
from interleaved import in_turn
from result_file import write_result

from saccade.core.files import json_bytes, sha256_of
from saccade.core.machine import process_fields, this_machine
from saccade.serving.client.client import Client
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.server import ServeOptions, Server
from saccade.serving.server.stubs import stubs_in

HERE = Path(__file__).parent
FREE = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
TICKS_A_SECOND = 100
Round = dict[str, float]
AT_ONCE = 100  # requests timed together
# Appended to a router's tally.py: the first counts nothing, the second measures the reporting.
SILENT = """
class Nothing:
    def add(self, amount=1.0): pass
class Silence:
    def __enter__(self): return self
    def __exit__(self, *_): pass
class Tally:
    def __init__(self): self.lock = Silence()
    def counter(self, name, description, **labels): return Nothing()
    def histogram(self, name, description, **labels): return Nothing()
    def start(self): pass
    def close(self): pass
"""
TIMED = """
import json, os, time
from pathlib import Path
def _server_s():
    fields = Path(f"/proc/{{os.getppid()}}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
def _cost(tell, count=20_000):
    wall, cpu, server = time.perf_counter(), time.process_time(), _server_s()
    for _ in range(count):
        tell(0.005)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    server = _server_s() - server
    seconds = {{"wall_us": wall, "router_cpu_us": cpu, "server_cpu_us": server}}
    return {{name: 1e6 * value / count for name, value in seconds.items()}}
_start = Tally.start
def _timed_start(self):
    counters = pb.MetricFamily(name="a_total", description="a", kind=pb.MetricFamily.COUNTER)
    own = pb.MetricFamily(name="b_seconds", description="b", kind=pb.MetricFamily.HISTOGRAM)
    counter, histogram = counters.Metric(labels={{}}), own.Metric(labels={{}}, buckets=list(BOUNDS))
    told = {{"counter": _cost(counter.increment), "own_histogram": _cost(histogram.observe)}}
    Path({out!r}).write_text(json.dumps(told))
    _start(self)
Tally.start = _timed_start
"""


def counted_here() -> dict[str, Any]:
    """Time the counting of one request in this process, and as many calls that do nothing."""
    server = ModuleType("triton_python_backend_utils")
    metric = SimpleNamespace(increment=lambda value: None)
    server.__dict__["MetricFamily"] = lambda **_: SimpleNamespace(Metric=lambda labels: metric)
    server.__dict__["MetricFamily"].COUNTER = 0
    sys.modules[server.__name__] = server
    sys.path.insert(0, str(HERE.parent / "src" / "saccade" / "model_repository" / "router"))
    metrics, sender = import_module("metrics"), import_module("sender")
    counting = metrics.Metrics("m", ["a", "b", "c"])
    nothing = SimpleNamespace(
        **dict.fromkeys(("ended", "waited", "decoded", "ran"), lambda variant, what: None)
    )

    def request(every: Any) -> Callable[[int], None]:
        def call(_: int) -> None:
            for _ in range(AT_ONCE):
                one = sender.Sender(None, every)
                one.variant = "b"
                one.waited(0.003)
                one.decoded(0.0004)
                every.ran("b", 0.002)
                one.ended("answered")

        return call

    ratio = in_turn(request(counting), request(nothing), rounds=16, moment_s=0.2)
    counting.close()
    counting_us, nothing_us = ratio.ours_us / AT_ONCE, ratio.peer_us / AT_ONCE
    return {"counting_us": counting_us, "doing_nothing_us": nothing_us}


def repository(folder: Path, place: Path, more: str = "") -> Path:
    """Write the folder's repository, with `more` code appended to its router's tally."""
    deploy(folder, RepositoryOptions(out=place))
    if more:
        (tally,) = place.glob("*/1/tally.py")
        tally.write_text(tally.read_text() + more)
        described = json.loads((place / "saccade.json").read_text())
        described["files"][tally.relative_to(place).as_posix()] = sha256_of(tally)
        (place / "saccade.json").write_bytes(json_bytes(described))
    return place


def cpu_s(server: Server) -> float:
    """Return the CPU time of a server and its models so far."""
    pids = [server.pid, *(stub.pid for stub in stubs_in(server.pid))]
    every = [process_fields(pid) for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in every if each) / TICKS_A_SECOND


def one_round(server: Server, image: np.ndarray, threads: int, seconds: float) -> Round:
    """Measure requests per second and the server's CPU time per request."""
    counts, end = [0] * threads, time.monotonic() + seconds

    def loop(which: int) -> None:
        with Client(server.url, server.model) as client:
            while time.monotonic() < end:
                client.classify([image])
                counts[which] += 1

    before, began = cpu_s(server), time.monotonic()
    callers = [threading.Thread(target=loop, args=(which,)) for which in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    took, requests = time.monotonic() - began, sum(counts)
    return {"per_s": requests / took, "cpu_us": 1e6 * (cpu_s(server) - before) / requests}


def compared(rounds: list[tuple[Round, Round]], key: str) -> dict[str, object]:
    """Return the medians of both and the ratio of each round."""
    ratios = [counting[key] / silent[key] for counting, silent in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "counting": statistics.median(counting[key] for counting, _ in rounds),
        "silent": statistics.median(silent[key] for _, silent in rounds),
        "counting_over_silent": middle,
        "quartiles": [low, high],
    }


def main() -> None:
    """Serve, call in turn and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--work", type=Path, default=HERE.parent / "build" / "metrics-cost")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "metrics_cost.json")
    options = parser.parse_args()
    folder = bench_folder(options.work, modules=8, budgets=(0.25,))
    told_at = options.work / "told.json"
    for name in ("counting", "silent", "timed"):
        shutil.rmtree(options.work / name, ignore_errors=True)
    timed = repository(folder, options.work / "timed", TIMED.format(out=str(told_at.resolve())))
    with Server(timed, ServeOptions(**FREE)):
        told = json.loads(told_at.read_text())
    image, rounds = random_images(folder, 1)[0], []
    with ExitStack() as stack:
        counting, silent = (
            stack.enter_context(
                Server(repository(folder, options.work / name, more), ServeOptions(**FREE))
            )
            for name, more in (("counting", ""), ("silent", SILENT))
        )
        for server in (counting, silent):
            one_round(server, image, options.threads, options.seconds)
        for number in range(options.rounds):
            turn = (counting, silent) if number % 2 else (silent, counting)
            took = {
                server: one_round(server, image, options.threads, options.seconds)
                for server in turn
            }
            rounds.append((took[counting], took[silent]))
    write_result(
        options.out,
        {
            "machine": this_machine().to_dict(),
            "rounds": options.rounds,
            "seconds_a_round": options.seconds,
            "callers": options.threads,
            "counting_one_request_in_process": counted_here(),
            "server_cpu_us_a_request": compared(rounds, "cpu_us"),
            "requests_per_second": compared(rounds, "per_s"),
            "telling_one_number": told["counter"],
            "one_observation_of_the_servers_histogram": told["own_histogram"],
        },
    )


if __name__ == "__main__":
    main()
