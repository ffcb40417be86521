# SPDX-License-Identifier: Apache-2.0
"""Serve variants that take ten seconds a batch, and report what takes them for dead.

    python -m chaos.slow_variant [TRIAL ...] [--batch-s 10]     in tests; by hand, for minutes

The variants sleep, as those do that wait for a GPU, so nothing but their pace shows that they
work. The exit code is 1 if a trial did not give the wanted result.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from tiny_artefacts import HALF, rehash, write_repository

from saccade.core.errors import SaccadeError
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import png_files, request
from saccade.serving.client import request_sizes
from saccade.serving.client.client import Client
from saccade.serving.repository.model_config import read_config
from saccade.serving.repository.preflight.verb import preflight
from saccade.serving.server import server as server_module
from saccade.serving.server.process import stubs_in
from saccade.serving.server.server import ServeOptions, Server

FREE = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
IMAGES = list(np.random.default_rng(0).integers(0, 256, (64, 4, 4, 1), dtype=np.uint8))
_MODEL = """
import time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb

WIDTHS = {{"logits": 3, "probabilities": 3, "embedding": 4}}

class TritonPythonModel:
    def execute(self, requests):
        rows = [len(pb.get_input_tensor_by_name(one, "image").as_numpy()) for one in requests]
        batch_s, row_s = map(float, Path({pace!r}).read_text().split())
        Path({pace!r} + "-" + str(sum(rows))).touch()
        time.sleep(batch_s + row_s * sum(rows))
        return [
            pb.InferenceResponse([
                pb.Tensor(name, np.full((count, WIDTHS[name]), 0.25, np.float32))
                for name in one.requested_output_names()
            ])
            for one, count in zip(requests, rows)
        ]
"""


class Scene:
    """A server of two such variants; `pace` sets how long they sleep from now on."""

    def __init__(self, place: Path, batch_s: float) -> None:
        self.place, self.batch_s = place, batch_s
        self.repository = write_repository(place)
        for model in self.repository.glob("tiny-*"):
            config = read_config(model / "config.pbtxt")
            config.backend, config.default_model_filename = "python", "model.py"
            for field in ("parameters", "optimization", "model_operations"):
                config.ClearField(field)  # those of the other backend
            (model / "config.pbtxt").write_text(str(config))
            code = _MODEL.format(pace=str(place / "pace"))
            (model / "1" / "model.py").write_text(code)
        rehash(self.repository)
        self.pace(batch_s)

    def pace(self, batch_s: float, row_s: float = 0.0) -> None:
        """Sleep so long for a batch and each of its rows."""
        following = self.place / "next"
        following.write_text(f"{batch_s} {row_s}")
        following.replace(self.place / "pace")

    def wait_for(self, rows: int) -> None:
        """Wait until a batch with this many rows is run."""
        wait((self.place / f"pace-{rows}").exists, 60)

    @contextmanager
    def server(self, **options: Any) -> Iterator[Server]:
        """Start a server, which must not reload or restart anything until it ends."""
        with Server(self.repository, ServeOptions(**FREE, **options)) as server:
            yield server
            expect(server.reloads == 0, f"{server.reloads} reloads")
            expect(server.restarts == 0, f"{server.restarts} restarts")


def expect(holds: object, text: str) -> None:
    """Fail the trial with a text."""
    if not holds:
        raise AssertionError(text)


@contextmanager
def watched(server: Server) -> Iterator[list[str]]:
    """Look at /ready and the metrics four times a second; every trouble is listed."""
    troubles, stop = [], threading.Event()

    def look() -> None:
        while not stop.wait(0.25):
            try:
                urllib.request.urlopen(server.ready_url, timeout=5).read()
                urllib.request.urlopen(server.metrics_url, timeout=5).read()
            except OSError as error:
                said = error.read().decode() if hasattr(error, "read") else ""
                reasons = json.loads(said)["reasons"] if said else ""
                troubles.append(f"{error} {reasons}")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield troubles
    finally:
        stop.set()
        thread.join()
    expect(not troubles, f"{len(troubles)} looks failed, first: {troubles[:1]}")


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start work in a thread; the list gets its result or its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except SaccadeError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def answered(results: list[Any], images: int) -> None:
    """Fail unless the work was answered."""
    expect(isinstance(results[0], list) and len(results[0]) == images, f"{results[0]}")


def starts(scene: Scene) -> None:
    """A server whose variants need so long for the first probe becomes ready."""
    with scene.server() as server:
        expect(server.ready(), f"{server.ready()}")


def under_load(scene: Scene) -> None:
    """Three callers with requests of 64 for five batches: nothing is reloaded, /ready stays."""
    with scene.server() as server, watched(server):
        work = []
        for _ in range(3):
            client = Client(server.url, server.model, timeout_s=20 * scene.batch_s)
            work.append(in_background(lambda client=client: whole(client, 2)))
        for thread, _ in work:
            thread.join()
        for _, results in work:
            answered(results, 128)


def whole(client: Client, times: int, images: int = 64) -> list[Any]:
    """Send all images in one request, as a caller does that does not care."""
    answers: list[Any] = []
    for _ in range(times):
        with mock.patch.object(request_sizes, "FIRST_ROWS", 64):
            client._pacing = request_sizes.Pacing(client.timeout_s)
            answers += client.classify(IMAGES[:images])
    return answers


def direct(scene: Scene) -> None:
    """A caller of a variant past the router, whose batches are longer than any before."""
    scene.pace(0.05, scene.batch_s / 64)
    with scene.server(probe_interval_s=1) as server, watched(server):
        message = request(HALF, {"image": np.stack(IMAGES)}, ("logits",))
        with LoadGenerator(server.url, server_pid=server.pid, timeout_s=600) as load:
            stream = Stream("direct", HALF, 2, (message,), 64)
            refuse_errors(load.run([stream], seconds=3 * scene.batch_s, warmup_s=0), server.url)


def long_calls(scene: Scene) -> None:
    """A single request that is longer than the age at which connections are renewed."""
    with scene.server() as server, watched(server):
        scene.pace(3 * scene.batch_s)
        with Client(server.url, server.model) as client:
            answered([client.classify(IMAGES[:1])], 1)


def unmeasured(scene: Scene) -> None:
    """The first request of the router is a batch of more than a minute."""
    scene.pace(0.1, 7.5 * scene.batch_s / 64)
    with scene.server() as server, watched(server):
        with Client(server.url, server.model, timeout_s=20 * scene.batch_s) as client:
            answered([whole(client, 1)], 64)


def doctor(scene: Scene) -> None:
    """`doctor --url` says that every variant answers, while batches run."""
    with scene.server() as server:
        client = Client(server.url, server.model)
        thread, _ = in_background(lambda: whole(client, 2))
        time.sleep(1)
        with Client(server.url, server.model) as other:
            readiness = other.ready()
        thread.join()
        expect(readiness, f"{readiness}")


def stops(scene: Scene) -> None:
    """At SIGTERM, a request in flight is answered first."""
    with Server(scene.repository, ServeOptions(**FREE)) as server:
        client = Client(server.url, server.model)
        thread, results = in_background(lambda: whole(client, 1, 3))
        scene.wait_for(3)
    thread.join()
    answered(results, 3)


def replaced(scene: Scene) -> None:
    """At SIGHUP, requests in flight are answered, by the old server or the new one."""
    with scene.server() as server, watched(server):
        client = Client(server.url, server.model)
        thread, results = in_background(lambda: whole(client, 2, 3))
        scene.wait_for(3)
        with mock.patch.object(server_module, "preflight", lambda _: SimpleNamespace(passed=True)):
            server.reload()
        thread.join()
        answered(results, 6)
        expect(server.replacements == 1, f"{server.replacements} replacements")


def killed(scene: Scene) -> None:
    """A variant whose process is killed is loaded again, although its probe is slow."""
    with Server(scene.repository, ServeOptions(**FREE)) as server:
        _kill(server, signal.SIGKILL)
        seconds = wait(lambda: server.reloads == 1 and server.ready(), 6 * scene.batch_s)
        print(f"  back after {seconds:.1f} s")
        expect(server.restarts == 0, f"{server.restarts} restarts")


def stopped(scene: Scene) -> None:
    """A variant whose process is stopped is noticed as soon as a fast one."""
    with Server(scene.repository, ServeOptions(**FREE)) as server:
        _kill(server, signal.SIGSTOP)
        seconds = wait(lambda: not server.ready(), 60)
        print(f"  noticed after {seconds:.1f} s")
        expect(seconds < 30, "too late")


def hangs(scene: Scene) -> None:
    """A fast variant that hangs, without being stopped, is killed and loaded again."""
    scene.pace(0.01)
    with Server(scene.repository, ServeOptions(**FREE)) as server:
        scene.pace(1e6)
        seconds = wait(lambda: not server.ready(), 60)
        scene.pace(0.01)  # for the new process
        wait(lambda: server.reloads and server.ready(), 120)
        print(f"  noticed after {seconds:.1f} s")


def bench(scene: Scene) -> None:
    """The load generator of `bench` measures, with one client and with sixteen."""
    with scene.server(probe_interval_s=600) as server:
        files = png_files(np.stack(IMAGES[:1]))
        message = request(server.model, {"image": files}, ("probabilities",))
        with LoadGenerator(server.url, server_pid=server.pid) as load:
            for clients in (1, 16):
                stream = Stream(f"{clients} clients", server.model, clients, (message,))
                result = load.run([stream], seconds=1, warmup_s=0.15)
                refuse_errors(result, server.url)
                count = len(result.streams[stream.name].latencies_ms)
                print(f"  {clients} clients: {count} answers in {result.seconds:.1f} s")


def classified(scene: Scene) -> None:
    """The client's own requests: 64 images, each as slow as a batch may be."""
    scene.pace(0.1, scene.batch_s / 10)
    with scene.server() as server, watched(server), Client(server.url, server.model) as client:
        answered([client.classify(IMAGES)], 64)


def checked(scene: Scene) -> None:
    """`preflight` calls no check late."""
    report = preflight(scene.repository)
    late = [finding for finding in report.findings if "stopped the process" in str(finding)]
    expect(not late, f"{late}")


def _kill(server: Server, number: int) -> None:
    (pid,) = [stub.pid for stub in stubs_in(server.pid) if stub.model == HALF]
    os.kill(pid, number)


def wait(holds: Callable[[], object], most_s: float) -> float:
    """Wait until something holds; return how long that took."""
    began = time.monotonic()
    while not holds():
        expect(time.monotonic() - began < most_s, f"not within {most_s:g} s")
        time.sleep(0.05)
    return time.monotonic() - began


TRIALS = {
    trial.__name__: trial
    for trial in (
        starts, checked, under_load, direct, long_calls, unmeasured, doctor, stops, replaced,
        killed, stopped, hangs, bench, classified,
    )
}  # fmt: skip


def main() -> int:
    """Run the trials that were named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trials", nargs="*", choices=[*TRIALS, []], help="default: all")
    parser.add_argument("--verbose", action="store_true", help="print the server's log")
    parser.add_argument("--batch-s", type=float, default=10.0, help="seconds of a batch")
    given = parser.parse_args()
    if given.verbose:
        logging.basicConfig(level=logging.INFO, format="  %(asctime)s %(message)s")
    failed = 0
    for name in given.trials or TRIALS:
        began = time.monotonic()
        with TemporaryDirectory() as place:
            try:
                TRIALS[name](Scene(Path(place), given.batch_s))
                verdict = "passed"
            except (AssertionError, SaccadeError) as error:
                failed += 1
                verdict = f"FAILED: {error}"
        print(f"{name}, {time.monotonic() - began:.0f} s: {verdict}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
