# SPDX-License-Identifier: Apache-2.0
"""Measure what callers notice of a dead variant and of a new repository, and what `kill -9` leaves.

A served model is under load from threads in a closed loop, half at the largest budget and half at
the smallest. In alternation, the stub of the smallest variant is killed, or the whole server is
replaced by a second one. Then `saccade serve` itself is killed. Writes
benchmarks/results/dead_variant.json.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from bench_folder import bench_folder
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.serving.client.connection import connect_alone
from saccade.serving.client.probe import probe_request
from saccade.serving.client.router_view import probe_of
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import Deployment
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server import server as server_module
from saccade.serving.server.addresses import ServeOptions, with_ports
from saccade.serving.server.process import stubs_in
from saccade.serving.server.reaper import SHARED_MEMORY
from saccade.serving.server.server import Server

HERE = Path(__file__).parent
FREE = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
MOST_TIMES = 2.0
KILLED_S = 2.0


@dataclass
class Calls:
    """The calls of one budget's callers: start, duration and status of each."""

    seen: list[tuple[float, float, str]] = field(default_factory=list)

    def window(self, start: float, stop: float) -> dict[str, Any]:
        """Return count, failures by status and percentiles of calls that started in this time."""
        calls = [call for call in list(self.seen) if start <= call[0] < stop]
        seconds = [call[1] for call in calls] or [0.0]
        failures = Counter(call[2] for call in calls if call[2])
        return {
            "calls": len(calls),
            "failed": sum(failures.values()),
            "statuses": dict(failures),
            "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
        }


def main() -> None:
    options = _options()
    folder = options.folder or bench_folder(
        HERE.parent / "build" / "benchmarks", modules=options.modules, budgets=options.budgets
    )
    with tempfile.TemporaryDirectory() as place:
        repository = deploy(folder, RepositoryOptions(out=Path(place) / "repository"))
        rounds = _rounds(repository, options)
        killed = [_killed(repository, clients, options.clients) for clients in (False, True)]
    result = {
        "benchmark": "a dead variant, another repository, a killed supervisor",
        "configuration": {"model": repository.model, "variants": repository.variants},
        "machine": this_machine().to_dict(),
        "load_average_1_5_15": os.getloadavg(),
        "note": "a shared machine: compare windows of one round, not seconds across machines",
        "clients_each": options.clients,
        "window_s": options.seconds,
        "summary": _summary(rounds, killed),
        "rounds": rounds,
        "killed_supervisor": killed,
    }  # fmt: skip
    write_result(options.out, result)
    print(result["summary"])


def _rounds(repository: Deployment, options: argparse.Namespace) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = []
    with Server(repository.folder, ServeOptions(**FREE)) as server:
        for turn in range(options.rounds):
            faults = [("loaded again", _kill), ("second server", _replace)]
            for name, fault in faults if turn % 2 else faults[::-1]:
                rounds.append({"fault": name, **_round(server, fault, options)})
                print(f"round {turn + 1}, {name}: {rounds[-1]['others']}", flush=True)
    return rounds


def _round(
    server: Server, fault: Callable[..., Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure one fault under load: a window before it, and a window that starts with it."""
    largest, smallest = options.budgets[0], options.budgets[-1]
    with _load(server.url, server.model, options.budgets, options.clients) as calls:
        time.sleep(1)
        began = time.monotonic()
        time.sleep(options.seconds)
        struck = time.monotonic()
        recovery = fault(server, smallest)
        time.sleep(max(0.0, struck + options.seconds - time.monotonic()))
        ended = time.monotonic()
    windows = ((began, struck), (struck, ended))
    before, after = ({name: call.window(*one) for name, call in calls.items()} for one in windows)
    failed = [call[0] + call[1] for call in calls[smallest].seen if call[2]]
    return {
        "others": {
            "failed": after[largest]["failed"],
            "p99_times_before": after[largest]["p99_ms"] / before[largest]["p99_ms"],
        },
        "callers_of_the_victim": {
            "failed": after[smallest]["failed"],
            "statuses": after[smallest]["statuses"],
            "last_failure_s": max(failed) - struck if failed else 0.0,
        },
        **recovery,
        "before": before[largest],
        "after": after[largest],
    }


def _kill(server: Server, budget: float) -> dict[str, Any]:
    before, began = server.reloads, time.monotonic()
    memory = _memory_mib({server.pid})
    name = f"-b{round(1000 * budget):04d}-"
    (pid,) = [stub.pid for stub in stubs_in(server.pid) if name in stub.model]
    os.kill(pid, signal.SIGKILL)
    _wait(lambda: server.reloads > before)
    return {
        "back_s": time.monotonic() - began,
        "memory_mib": {"before": memory, "most": memory, "after": _memory_mib({server.pid})},
    }


def _replace(server: Server, _: float) -> dict[str, Any]:
    old, began = server.pid, time.monotonic()
    memory, ends = _memory_mib({old}), []
    check = server_module.preflight
    with mock.patch.object(
        server_module, "preflight", lambda *given: (check(*given), ends.append(time.monotonic()))[0]
    ):
        server.reload()
    moved, both = time.monotonic(), _memory_mib({old, server.pid})
    _wait(lambda: not Path(f"/proc/{old}").exists())
    return {
        "checked_s": ends[0] - began,
        "back_s": moved - ends[0],
        "drained_s": time.monotonic() - moved,
        "memory_mib": {"before": memory, "most": both, "after": _memory_mib({server.pid})},
    }


def _killed(repository: Deployment, busy: bool, clients: int) -> dict[str, Any]:
    """Kill `saccade serve` and return the seconds until nothing of it is left."""
    ports = with_ports(ServeOptions(**FREE))
    words = [f"--{name.replace('_', '-')}={getattr(ports, name)}" for name in FREE]
    with tempfile.TemporaryDirectory() as place:
        process = subprocess.Popen(
            [sys.executable, "-m", "saccade", "serve", str(repository.folder), *words],
            stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": place},
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "ready: http" in line:
                break
        (run,) = Path(place).iterdir()
        url, budgets = f"127.0.0.1:{ports.grpc_port}", (1.0,) if busy else ()
        with _load(url, repository.model, budgets, clients):
            time.sleep(1)
            left = _left(run)
            began = time.monotonic()
            process.kill()
            process.wait()
            _wait(lambda: not _left(run))
            seconds = time.monotonic() - began
    return {"under_load": busy, "before": left, "until_nothing_is_left_s": seconds}


def _left(run: Path) -> int:
    """Count the processes, shared memory regions and folders of a run."""
    leftovers = int(run.exists()) + len(list(SHARED_MEMORY.glob(f"{run.name}*")))
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            leftovers += run.name.encode() in command.read_bytes()
    return leftovers


@contextmanager
def _load(
    url: str, model: str, budgets: tuple[float, ...], clients: int
) -> Iterator[dict[float, Calls]]:
    stop = threading.Event()
    calls = {budget: Calls() for budget in budgets}
    threads = [
        threading.Thread(target=_loop, args=(url, model, budget, calls[budget], stop))
        for budget in budgets
        for _ in range(clients)
    ]
    with ExitStack() as ends:
        for thread in threads:
            thread.start()
            ends.callback(thread.join)
        ends.callback(stop.set)
        yield calls


def _loop(url: str, model: str, budget: float, calls: Calls, stop: threading.Event) -> None:
    from tritonclient.utils import InferenceServerException

    with closing(connect_alone(url)) as connection:
        config = connection.get_model_config(model)
        request = probe_request(connection.get_model_metadata(model), probe_of(config))
        request["parameters"] = {"budget": budget}
        while not stop.is_set():
            began, status = time.monotonic(), ""
            try:
                connection.infer(model, client_timeout=10, **request)
            except InferenceServerException as error:
                status = f"{error.status()}: {error.message()}"[:120]
            calls.seen.append((began, time.monotonic() - began, status))
            if status:
                time.sleep(0.02)  # a refused caller does not retry immediately


def _memory_mib(pids: set[int]) -> float:
    """Return the memory of servers and their stubs; shared pages are divided."""
    total = 0
    for pid in {*pids, *(stub.pid for parent in pids for stub in stubs_in(parent))}:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def _wait(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not holds():
        if time.monotonic() > end:
            raise SystemExit("the expected state was not reached within 120 s")
        time.sleep(0.01)


def _summary(rounds: list[dict[str, Any]], killed: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in ("loaded again", "second server"):
        mine = [one_round for one_round in rounds if one_round["fault"] == name]
        times = [call["others"]["p99_times_before"] for call in mine]
        grown = [call["memory_mib"]["most"] / call["memory_mib"]["before"] for call in mine]
        seconds = [call["back_s"] for call in mine]
        statuses = Counter[str]()
        for call in mine:
            statuses.update(call["callers_of_the_victim"]["statuses"])
        summary[name] = {
            "failed_of_others": sum(call["others"]["failed"] for call in mine),
            "p99_of_others_times_before": {
                "median": statistics.median(times), "least": min(times), "most": max(times),
            },
            "back_s": {"median": statistics.median(seconds), "most": max(seconds)},
            "failed_of_the_victims_callers": dict(statuses),
            "memory_times_before": statistics.median(grown),
        }  # fmt: skip
    met = summary["loaded again"]
    times_met = met["p99_of_others_times_before"]["median"] <= MOST_TIMES
    summary["killed_supervisor_s"] = max(call["until_nothing_is_left_s"] for call in killed)
    summary["target"] = {
        "failed": met["failed_of_others"] == 0,
        f"p99 at most {MOST_TIMES:g} times": times_met,
        f"nothing left after {KILLED_S:g} s": summary["killed_supervisor_s"] <= KILLED_S,
    }  # fmt: skip
    return summary


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="artefact folder with both budgets")
    parser.add_argument(
        "--modules", type=int, default=16, help="modules of the configuration bench"
    )
    parser.add_argument("--budgets", type=float, nargs=2, default=(1.0, 0.25))
    parser.add_argument("--clients", type=int, default=2, help="clients at each budget")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each window")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "dead_variant.json")
    args = parser.parse_args()
    args.budgets = tuple(args.budgets)
    return args


if __name__ == "__main__":
    main()
