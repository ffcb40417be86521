# SPDX-License-Identifier: Apache-2.0
"""Send more requests than can be answered: which are answered in time or refused, and how soon.

    python benchmarks/overload.py                         # 16 loads of two minutes: 40 minutes
    python benchmarks/overload.py --seconds 10            # the same, shorter
    python benchmarks/overload.py --times 3 10 --deadlines 1 --budgets one
    python benchmarks/overload.py --refusal               # what a refusal costs: 30 seconds
    python benchmarks/overload.py --through server proxy --apart --times 3 10    # --proxy or not

First, the CPU time of a refusal is measured, then the capacity, with callers that wait for their
answers. Then a separate process sends requests with random (Poisson) arrivals at multiples of the
capacity, without waiting for answers. Two seconds after they end, the capacity is measured again. A
request has several images, so that the generator costs little compared with the service; the result
contains its share of all CPU time. Last, a caller with a thousand waiting requests competes with a
caller with a single one. Writes results/overload.json.

With `--through`, loads go to a bare service and to one of `serve --proxy` in turn. Both capacities
are that of the bare one. With `--apart`, whatever sends requests has the last core of this machine
for itself, and the services have the others.
"""

import argparse
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile

import numpy as np
from result_file import options_of, write_result
from served_models import digits_folder, random_images

from saccade.core.errors import ServerFailed
from saccade.core.machine import cpu_seconds, family_of, memory_mib
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.serving.bench.load import LoadGenerator, Stream, StreamResult
from saccade.serving.bench.load_requests import encoded_request
from saccade.serving.client.wire import with_deadline
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from open_load import Arrivals, OpenLoad, OpenLoadResult, quantiles, with_timeout

BUDGETS = (1.0, 0.5, 0.25)
CORES = tuple(sorted(os.sched_getaffinity(0)))
PATHS: dict[str, dict[str, Any]] = {"server": {}, "proxy": {"proxy": True}}  # of requests
CLIENTS = 16
READY_S = 120.0
REST_S = 2.0  # pause after a load before the capacity is measured again
GOODPUT = 0.9
AT_ONCE = 0.1  # the median refusal takes at most this part of the deadline
GROWTH_MIB = 64.0
COST_ROUNDS, COST_S, COST_RATE = 5, 4.0, 20.0
GREEDY, GREEDY_S = 1000, 20.0


def main() -> None:
    """Run every load on one server and write each result as it finishes."""
    options = _options()
    folder = options.folder or digits_folder("overload", BUDGETS)
    quiet = ServeOptions(grpc_port=0, http_port=0, metrics_port=0, ready_port=0)
    with tempfile.TemporaryDirectory() as place:
        repository = Path(place) / "repository"
        deploy(folder, RepositoryOptions(out=repository))
        with ExitStack() as stack:
            if options.apart:
                os.sched_setaffinity(0, CORES[:-1])
            services = {
                through: stack.enter_context(Server(repository, replace(quiet, **PATHS[through])))
                for through in dict.fromkeys(("server", *options.through))
            }
            requests = _requests(folder, options.images)
            if options.refusal:
                cost = _refusal(services["server"], requests["one"][0], options)
                write_result(options.out, {**json.loads(options.out.read_text()), "refusal": cost})
                print(f"a refusal: {cost}")
                return
            if options.cost:
                cost = _cost(services, requests["one"][0], options)
                write_result(options.out, {**json.loads(options.out.read_text()), "cost": cost})
                print(f"without and with the proxy: {cost}")
                return
            result = _measure(services, requests, options)
    print(f"aims missed: {', '.join(result['missed']) or 'none'}")


def _options() -> argparse.Namespace:
    parser = options_of(__doc__, "overload", seconds=120.0)
    parser.add_argument("--folder", type=Path, help=f"artefact folder with budgets {BUDGETS}")
    parser.add_argument("--times", type=float, nargs="+", default=[0.5, 1, 3, 10])
    parser.add_argument("--deadlines", type=float, nargs="+", default=[0.3, 1.0])
    parser.add_argument("--budgets", nargs="+", choices=("one", "all"), default=["one", "all"])
    parser.add_argument("--images", type=int, default=4, help="images per request")
    parser.add_argument("--through", nargs="+", choices=PATHS, default=["server"])
    parser.add_argument("--in-flight", type=int, default=0, help="of the proxy; 0: its default")
    parser.add_argument("--apart", action="store_true", help="give the generator a separate core")
    parser.add_argument("--no-greedy", action="store_true", help="skip the last part")
    parser.add_argument(
        "--refusal", action="store_true", help="measure only refusals, and update the results"
    )
    parser.add_argument(
        "--cost", action="store_true", help="measure only what the proxy adds, and update results"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.apart and len(CORES) < 2:
        parser.error("--apart needs two cores")
    PATHS["proxy"]["in_flight"] = options.in_flight
    return options


@contextmanager
def _generator_cores(options: argparse.Namespace) -> Iterator[None]:
    """Start the processes of the block, which send requests, on the last core."""
    if options.apart:
        os.sched_setaffinity(0, CORES[-1:])
    try:
        yield
    finally:
        if options.apart:
            os.sched_setaffinity(0, CORES[:-1])


def _processes(server: Server) -> list[int]:
    return [*family_of(server.pid), *([server.proxy_pid] if server.proxy_pid else [])]


def _measure(
    services: Mapping[str, Server],
    requests: dict[str, list[bytes]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "benchmark": "open-loop load beyond the capacity",
        "images": options.images,
        "budgets": {"one": [BUDGETS[0]], "all": list(BUDGETS)},
        "seconds": options.seconds,
        "generator_apart": options.apart,
        "in_flight": services["proxy"].in_flight if "proxy" in services else None,
        "refusal": _refusal(services["server"], requests["one"][0], options),
        "loads": [],
        "missed": [],
    }
    print(f"a refusal: {result['refusal']}", flush=True)
    plan = itertools.product(options.budgets, options.deadlines, options.times, options.through)
    for budgets, deadline_s, times, through in plan:
        one = _load(services, through, requests[budgets], deadline_s, times, options)
        which = {"budgets": budgets, "deadline_s": deadline_s, "times": times, "through": through}
        result["loads"].append(one := which | one)
        missed = [name for name, met in one["aims"].items() if not met]
        named = f"{budgets} {deadline_s:g} s {times:g} x {through}"
        result["missed"] += [f"{named}: {name}" for name in missed]
        write_result(options.out, result)
        print(_line(one), flush=True)
    if not options.no_greedy:
        result["greedy"] = _greedy(
            services["server"], requests["all"], min(GREEDY_S, options.seconds)
        )
        write_result(options.out, result)
        print(f"beside {GREEDY} waiting: {result['greedy']}", flush=True)
    return result


def _refusal(
    server: Server, request: bytes, options: argparse.Namespace, rate: float = 100.0
) -> dict[str, float]:
    """Measure the cost of a request that the router refuses immediately."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest.FromString(request)
    message.parameters["budget"].double_param = -1.0
    arrivals = Arrivals((message.SerializeToString(),), rate=rate, seconds=10.0, deadline_s=5.0)
    family = family_of(server.pid)
    with _generator_cores(options), OpenLoad(server.url) as load:
        load.run(replace(arrivals, seconds=1.0))
        cpu = sum(cpu_seconds(family).values())
        result = load.run(arrivals)
        service_s = sum(cpu_seconds(family).values()) - cpu
    if result.statuses()["INVALID_ARGUMENT"] != result.sent:
        raise SystemExit(
            f"the refused requests ended as {result.statuses()}: {result.first_errors}"
        )
    return {
        "requests_per_s": result.sent / result.seconds,
        "service_cpu_us": 1e6 * service_s / result.sent,
        "generator_cpu_us": 1e6 * result.client_cpu_s / result.sent,
    }


def _cost(
    services: Mapping[str, Server], request: bytes, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure requests that are answered, with and without the proxy in turn, in milliseconds."""
    rounds: dict[str, list[dict[str, float]]] = {}
    arrivals = Arrivals((request,), rate=COST_RATE, seconds=COST_S, deadline_s=5.0)
    for _, (through, server) in itertools.product(range(COST_ROUNDS), services.items()):
        before = cpu_seconds(_processes(server))
        with _generator_cores(options), OpenLoad(server.url) as load:
            result = load.run(arrivals)
        spent = {
            name: now - before.get(name, 0) for name, now in cpu_seconds(_processes(server)).items()
        }
        proxy = sum(used for name, used in spent.items() if name.endswith(" envoy"))
        one = {
            "p50": float(np.median(result.answered_ms)),
            "service": 1e3 * (sum(spent.values()) - proxy) / result.sent,
            "proxy": 1e3 * proxy / result.sent,
        }
        rounds.setdefault(through, []).append(one)
    return {
        name: {key: float(np.median([one[key] for one in found])) for key in found[0]}
        for name, found in rounds.items()
    }


def _load(
    services: Mapping[str, Server],
    through: str,
    requests: list[bytes],
    deadline_s: float,
    times: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Run one load between two measurements of the capacity."""
    server, bare = services[through], services["server"]
    _wait_ready(bare)
    _wait_ready(server)
    restarts, (before, each_core_s) = server.restarts, _capacity(bare, requests, options)
    named = with_deadline({}, deadline_s)
    arrivals = Arrivals(
        tuple(_timed(request, named["timeout"]) for request in requests),
        rate=times * before,
        seconds=options.seconds,
        deadline_s=named["client_timeout"],
        seed=options.seed,
    )
    processes = _processes(server)
    cpu = cpu_seconds(processes)
    with _memory_of(server) as memory, _generator_cores(options), OpenLoad(server.url) as load:
        result = load.run(arrivals)
    used = {name: spent - cpu.get(name, 0) for name, spent in cpu_seconds(processes).items()}
    time.sleep(REST_S)
    # The generator of waiting callers asks for statistics, which the proxy does not pass on.
    after, _ = (None, 0) if server.proxy_pid else _capacity(server, requests, options)
    one = {
        "capacity_before": before,
        "capacity_after": after,
        "offered": arrivals.rate,
        **_counts(result, deadline_s),
        "recovered_of_capacity": after and after / before,
        "restarts": server.restarts - restarts,
        "memory_mib": _grown(memory),
        "generator_share": result.client_cpu_s
        / max(1e-9, result.client_cpu_s + sum(used.values())),
        "load_average": os.getloadavg()[0],
    }
    # On a machine with other work, a load gets more or less of it than the capacity before did.
    core_s = max(1e-9, sum(used.values()))
    by_core_time = one["in_time"] / core_s / each_core_s
    # A server that was restarted has taken its CPU time with it.
    one["goodput_of_capacity_by_core_time"] = None if one["restarts"] else by_core_time
    for name in used:
        if name == f"{server.proxy_pid} envoy":
            one["proxy_cpu_us"] = 1e6 * used[name] / result.sent
    one["goodput_of_capacity"] = one["goodput"] / before
    return one | {"aims": _aims(one, result, deadline_s, times)}


@contextmanager
def _memory_of(server: Server) -> Iterator[list[float]]:
    """Record the memory of the server and its stubs once per second until the block ends."""
    seen, ended = [], threading.Event()

    def look() -> None:
        while not ended.wait(1.0):
            if server.pid:
                seen.append(sum(memory_mib(_processes(server)).values()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def _grown(seen: list[float]) -> dict[str, Any]:
    """Return the growth from the second to the last quarter of the load; the first is warm-up."""
    quarter = max(1, len(seen) // 4)
    early, last = seen[quarter : 2 * quarter] or seen, seen[-quarter:]
    more = float(np.median(last) - np.median(early)) if seen else 0.0
    return {"grown": more, "most": max(seen, default=0.0), "each_second": seen}


def _counts(result: OpenLoadResult, deadline_s: float) -> dict[str, Any]:
    refused = result.failed_ms.get("UNAVAILABLE", ())
    late = sum(1 for answered_m in result.answered_ms if answered_m > 1e3 * deadline_s)
    in_time = len(result.answered_ms) - late
    return {
        "in_time": in_time,
        "late": late,
        # Answers after the last arrival do not count: they were not under load.
        "goodput": max(0, in_time - result.after_end) / result.seconds,
        "in_time_of_accepted": in_time / max(1, result.sent - len(refused)),
        "sent": result.sent,
        "statuses": dict(result.statuses()),
        "answered_ms": quantiles(result.answered_ms),
        "refused_ms": quantiles(refused),
        "lag_ms": quantiles(result.lag_ms),
        "first_errors": result.first_errors,
    }


def _aims(
    one: dict[str, Any], result: OpenLoadResult, deadline_s: float, times: float
) -> dict[str, bool]:
    """Return the aims of a load and whether each was met, as far as they were measured."""
    refused, answered = one["refused_ms"], one["answered_ms"]
    known = {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
    recovered = one["recovered_of_capacity"]
    return {
        "no restart": one["restarts"] == 0,
        "goodput": times < 1 or one["goodput_of_capacity"] >= (GOODPUT if times > 1 else 0.0),
        "answers in time": answered is not None and answered["p99"] <= 1e3 * deadline_s,
        "refused at once": refused is None or refused["p50"] <= 1e3 * deadline_s * AT_ONCE,
        "no other failure": set(result.statuses()) <= known,
        "memory flat": one["memory_mib"]["grown"] <= GROWTH_MIB,
        **({} if recovered is None else {"full speed after it": recovered >= GOODPUT}),
    }


def _capacity(
    server: Server, requests: list[bytes], options: argparse.Namespace
) -> tuple[float, float]:
    """Measure the callers that wait for their answers: per second, and per second of core time."""
    stream = Stream("all", server.model, CLIENTS, tuple(requests))
    with _generator_cores(options), LoadGenerator(server.url, server_pid=server.pid) as load:
        try:
            result = load.run([stream], seconds=max(4.0, options.seconds / 10), warmup_s=1.0)
        except ServerFailed:  # it is restarting and answers nothing
            return 0.1, 0.1
    answered = len(result.streams["all"].latencies_ms)
    core_s = max(1e-9, sum(result.server_cpu_s.values()))
    return max(0.1, answered / result.seconds), max(0.1, answered / core_s)


def _wait_ready(server: Server) -> None:
    """Wait for a restart that the previous load caused."""
    end = time.monotonic() + READY_S
    while not server.ready() and time.monotonic() < end:
        time.sleep(0.1)


def _greedy(server: Server, requests: list[bytes], seconds: float) -> dict[str, Any]:
    """Run a caller with many requests and one with a single request, at two budgets."""
    timeout_us = with_deadline({}, 1.0)["timeout"]
    greedy, same, other = (
        _timed(each, timeout_us, caller)
        for each, caller in (
            (requests[0], "greedy"),
            (requests[0], "modest"),
            (requests[-1], "modest"),
        )
    )
    waits = {}
    for name, modest in (("same", same), ("other", other)):
        streams = [
            Stream("greedy", server.model, GREEDY, (greedy,)),
            Stream("modest", server.model, 1, (modest,)),
        ]
        _wait_ready(server)
        restarts = server.restarts
        with LoadGenerator(server.url, timeout_s=1.0) as load:
            try:
                seen = load.run(streams, seconds=seconds, warmup_s=2.0).streams
            except ServerFailed:  # the server was restarted meanwhile
                seen = {stream.name: StreamResult(()) for stream in streams}
        modest_seen = seen["modest"]
        answered = len(modest_seen.latencies_ms)
        waits[name] = {
            "answered": answered,
            "calls": answered + sum(modest_seen.errors.values()),
            "errors": dict(modest_seen.errors),
            "restarts": server.restarts - restarts,
            "waited_ms": quantiles(modest_seen.latencies_ms),
            "greedy_answered_per_s": len(seen["greedy"].latencies_ms) / seconds,
        }
    return {"waiting": GREEDY, **waits}


def _requests(folder: Path, images: int) -> dict[str, list[bytes]]:
    manifest = ArtefactFolder(folder).manifests[0]
    pictures = random_images(folder, images)
    each = [encoded_request(manifest.variant.model, pictures, budget) for budget in BUDGETS]
    return {"one": each[:1], "all": each}


def _timed(request: bytes, timeout_us: int, caller: str = "many") -> bytes:
    """Add a timeout and the caller's name to a request."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest.FromString(request)
    message.id = f"{caller}/1"
    return with_timeout(message, timeout_us)


def _line(one: dict[str, Any]) -> str:
    missed = [name for name, met in one["aims"].items() if not met]
    return (
        f"{one['budgets']:3} {one['deadline_s']:g} s {one['times']:4g} x {one['through']} of "
        f"{one['capacity_before']:.0f}/s: {one['statuses']}, goodput "
        f"{100 * one['goodput_of_capacity']:.0f} % "
        f"({100 * (one['goodput_of_capacity_by_core_time'] or 0):.0f} % by core time), "
        f"{100 * one['in_time_of_accepted']:.0f} % of the accepted, refused after "
        f"{one['refused_ms']}, load average {one['load_average']:.1f}, "
        f"{one.get('proxy_cpu_us', 0):.0f} us of the proxy per request, "
        f"restarts {one['restarts']}, generator {100 * one['generator_share']:.0f} %; "
        f"missed: {', '.join(missed) or 'none'}"
    )


if __name__ == "__main__":
    main()
