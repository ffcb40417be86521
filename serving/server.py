# SPDX-License-Identifier: Apache-2.0
"""The server as a context manager, and `saccade serve` in the foreground."""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from saccade import interruption
from saccade.plugins.errors import SaccadeError, ServerFailed
from saccade.serving.addresses import ServeOptions, address, is_loopback, with_ports
from saccade.serving.installation import (
    BUNDLED_LINE,
    Installation,
    check_installation,
    find_installation,
)
from saccade.serving.needs import Needs, needs_of, refuse_unrunnable
from saccade.serving.readiness import Board, Readiness, ReadyEndpoint
from saccade.serving.repository import read_repository
from saccade.serving.run_folder import RunFolder
from saccade.serving.server_log import ServerLog
from saccade.serving.server_process import ServerProcess
from saccade.serving.supervisor import Supervisor

__all__ = ["ServeOptions", "Server", "serve"]


class Server:
    """A running server: `with Server("build/repo") as server: Client(server.url, "nac")`.

    It is ready when the block begins and gone when it ends, and restarted between if it fails.
    Raises: SaccadeError for wrong input, ServerFailed if it dies or hangs while starting.
    """

    def __init__(self, repository: Path | str, options: ServeOptions | None = None) -> None:
        self.repository = Path(repository)
        self.options = options or ServeOptions()
        self._supervisor: Supervisor | None = None

    def __enter__(self) -> "Server":
        found = find_installation()
        wanted = self.options
        refuse_exposure(wanted, found)
        deployment = read_repository(self.repository)
        needs = needs_of(self.repository)
        refuse_unrunnable(self.repository, needs, found)
        for attempts_left in (2, 1, 0):
            self.options = with_ports(wanted)
            check_installation(found)
            self._board = Board(deployment.model, deployment.variants)
            log = ServerLog(self.options.server_log)
            try:
                self._start(found, needs, log)
                break
            except ServerFailed:
                # A port that was free a moment ago: only those that we chose are chosen again.
                if not (attempts_left and self.options != wanted and log.says("already in use")):
                    raise
        return self

    def _start(self, found: Installation, needs: Needs, log: ServerLog) -> None:
        options, repository = self.options, self.repository

        def start(folder: RunFolder) -> ServerProcess:
            return ServerProcess(found, repository, options, folder, log, needs)

        self._endpoint = ReadyEndpoint(options.host, options.ready_port, self.ready)
        self._supervisor = Supervisor(start, options, self._board, log)
        try:
            self._supervisor.start()
            self._supervisor.settled.wait()
            if self._supervisor.failure:
                raise self._supervisor.failure
        except BaseException:
            self._close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def model(self) -> str:
        """The name of the router: what `Client` is given."""
        return self._board.model

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the variants."""
        return self._board.variants

    @property
    def url(self) -> str:
        """The gRPC address, as `Client` takes it."""
        return address(self.options.host, self.options.grpc_port)

    @property
    def http_url(self) -> str:
        """The HTTP address."""
        return f"http://{address(self.options.host, self.options.http_port)}"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus reads."""
        return f"http://{address(self.options.host, self.options.metrics_port)}/metrics"

    @property
    def ready_url(self) -> str:
        """Answers 200 if every variant answers, else 503."""
        return f"http://{address(self.options.host, self.options.ready_port)}/ready"

    @property
    def pid(self) -> int:
        """The server's process id; another one after a restart, 0 between."""
        return self._supervisor.pid if self._supervisor else 0

    @property
    def restarts(self) -> int:
        """How often it was restarted."""
        return self._supervisor.restarts if self._supervisor else 0

    def ready(self) -> Readiness:
        """Which variants answer, as the supervisor last saw it."""
        return self._board.readiness()

    def wait(self) -> None:
        """Block until the server has failed for good.

        Raises: ServerFailed when that happens.
        """
        assert self._supervisor is not None
        self._supervisor.finished.wait()
        if self._supervisor.failure:
            raise self._supervisor.failure

    def _close(self) -> None:
        supervisor = self._supervisor
        if supervisor is None:
            return
        try:
            supervisor.stop()
            supervisor.finished.wait()
        except KeyboardInterrupt:
            # A second Ctrl-C: whoever presses it does not want to wait for requests in flight.
            supervisor.stop(at_once=True)
            supervisor.finished.wait()
            raise
        finally:
            self._endpoint.close()


def serve(repository: Path | str, options: ServeOptions | None = None) -> int:
    """Run the server in the foreground until Ctrl-C or SIGTERM. Returns the exit code.

    Raises: SaccadeError for wrong input, ServerFailed when it cannot be kept running,
    KeyboardInterrupt if it is interrupted before it is ready.
    """
    options = options or ServeOptions()
    if not is_loopback(options.host) and not options.accept_risk:
        options = _ask_consent(options)
    with _own_log(), _signals():
        with Server(repository, options) as server, suppress(KeyboardInterrupt):
            _announce(server)
            server.wait()
    _say("stopped.")
    return 0


def refuse_exposure(options: ServeOptions, installation: Installation) -> None:
    """Listening beyond loopback needs consent.

    Raises: SaccadeError if the host is not loopback and nobody consented.
    """
    if not is_loopback(options.host) and not options.accept_risk:
        raise SaccadeError(
            f"--host {options.host}: {risk_of(installation)} "
            "Pass --accept-risk if you want that, or leave --host out for 127.0.0.1."
        )


def risk_of(installation: Installation) -> str:
    """What listening beyond loopback means."""
    whose = (
        f"The bundled server is the {BUNDLED_LINE} line, older than the security fixes of 2025. "
        if installation.bundled
        else f"The server is {installation.binary}, whose age saccade does not know. "
    )
    return (
        f"Others could reach the server there. {whose}It asks for no password and cannot cap the "
        "size of a message. For exposure serve the same repository with NVIDIA's current "
        "container, behind a proxy that caps messages."
    )


def _ask_consent(options: ServeOptions) -> ServeOptions:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return options
    _say(risk_of(find_installation()))
    print(f"Listen on {options.host} all the same? [y/N] ", end="", file=sys.stderr, flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    return replace(options, accept_risk=agreed)


def _announce(server: Server) -> None:
    _say(f"{server.model} with {len(server.variants)} variants: {', '.join(server.variants)}")
    _say(f"gRPC {server.url}   HTTP {server.http_url}   metrics {server.metrics_url}")
    _say(f"ready: {server.ready_url}   (Ctrl-C stops)")


def _say(text: str) -> None:
    print(f"saccade: {text}", file=sys.stderr, flush=True)


@contextmanager
def _own_log() -> Iterator[None]:
    """Show the log on standard error, unless the program has set one up."""
    logger = logging.getLogger("saccade")
    if logger.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the block as Ctrl-C does, even in a background shell."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interruption.interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
