# SPDX-License-Identifier: Apache-2.0
"""The server as a context manager, and `saccade serve` in the foreground."""

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from saccade import interruption
from saccade.errors import SaccadeError, ServerFailed
from saccade.escaped import escaped_message
from saccade.serving.client.connection import is_loopback
from saccade.serving.client.readiness import Board, Readiness
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.installation import (
    BUNDLED_LINE,
    Installation,
    check_installation,
    find_installation,
)
from saccade.serving.repository.preflight.verb import preflight
from saccade.serving.repository.requirements import Requirements, refuse_unrunnable, requirements_of
from saccade.serving.server.addresses import ServeOptions, address, with_ports
from saccade.serving.server.exposure import check_repository, notices
from saccade.serving.server.handover import Replacement, Start
from saccade.serving.server.json_log import JsonFormatter, event
from saccade.serving.server.log import EscapedFormatter, ServerLog
from saccade.serving.server.metrics_relay import MetricsRelay, Watched
from saccade.serving.server.new_connection import NewCaller
from saccade.serving.server.process import ServerProcess
from saccade.serving.server.ready_endpoint import ReadyEndpoint
from saccade.serving.server.run_folder import RunFolder
from saccade.serving.server.served_copy import COPY
from saccade.serving.server.signals import signals
from saccade.serving.server.supervisor import Supervisor
from saccade.serving.server.tracing import trace_notices

LOGGER = logging.getLogger("saccade.serve")

__all__ = ["ServeOptions", "Server", "serve"]


class Server:
    """A running server: `with Server("build/repo") as server: Client(server.url, "nac")`.

    It is ready when the block begins and gone when it ends, and restarted between if it fails.
    A model whose process dies is loaded again by itself, while the others answer.
    Raises: SaccadeError for wrong input, ServerFailed if it dies or hangs while starting.
    """

    def __init__(self, repository: Path | str, options: ServeOptions | None = None) -> None:
        self.repository = Path(repository)
        self.options = options or ServeOptions()
        self._supervisor: Supervisor | None = None
        self._metrics: MetricsRelay | None = None
        self._reloading = threading.Lock()

    def __enter__(self) -> "Server":
        installation = find_installation()
        wanted = self.options
        refuse_exposure(wanted, installation)
        deployment = read_repository(self.repository)
        requirements = requirements_of(self.repository)
        refuse_unrunnable(self.repository, requirements, installation)
        check_repository(self.repository, requirements, wanted)
        for level, text in notices(self.repository, requirements, wanted):
            LOGGER.log(level, text)
        if installation.bundled:
            for text in trace_notices(self.repository, os.environ):
                LOGGER.warning("%s", text)
        for attempts_left in (2, 1, 0):
            self.options = with_ports(wanted)
            check_installation(installation)
            self._board = Board(deployment.model, deployment.variants)
            log = ServerLog(self.options.server_log)
            try:
                self._start(installation, requirements, log)
                break
            except ServerFailed:
                # A port that was free a moment ago: only those that we chose are chosen again.
                if not (attempts_left and self.options != wanted and log.says("already in use")):
                    raise
        return self

    def _start(
        self, installation: Installation, requirements: Requirements, log: ServerLog
    ) -> None:
        options, self._log = self.options, log
        start = self._starter(self.repository.resolve(), installation, requirements)
        supervisor = Supervisor(start, options, self._board, log)
        self._new_caller = NewCaller(options.host, options.grpc_port, options.probe_timeout_s)
        self._endpoint = ReadyEndpoint(options.host, options.ready_port, self.ready)
        try:
            self._metrics = MetricsRelay(
                options.host,
                options.metrics_port,
                lambda: supervisor.metrics_port,
                lambda: Watched(
                    self.ready(),
                    supervisor.restarts,
                    supervisor.replacements,
                    supervisor.reloads.copy(),
                ),
            )
            self._supervisor = supervisor
            supervisor.start()
            supervisor.settled.wait()
            if supervisor.failure:
                raise supervisor.failure
        except BaseException:
            self._close()
            raise

    def _starter(
        self, repository: Path, installation: Installation, requirements: Requirements
    ) -> Start:
        options, log = self.options, self._log
        # A restart serves the bytes of the first start; another repository gets a copy of its own.
        copy = f"{COPY}{secrets.token_hex(3)}"

        def start(folder: RunFolder) -> ServerProcess:
            return ServerProcess(installation, repository, options, folder, log, requirements, copy)

        return start

    def __exit__(self, *_: object) -> None:
        self._close()

    def reload(self) -> None:
        """Serve the repository as it is now: new files in the same folder, or another one behind
        the same link. No call fails; until the last caller has moved, two servers run.

        Raises: SaccadeError where preflight finds it unfit, ServerFailed where the new server
            does not start. What was served before is served on.
        """
        if not self._reloading.acquire(blocking=False):
            raise SaccadeError("The repository is being read already. Try again when it is served.")
        try:
            self._replace(self.repository.resolve())
        finally:
            self._reloading.release()

    def _replace(self, repository: Path) -> None:
        supervisor, installation = self._supervisor, find_installation()
        if supervisor is None:
            raise SaccadeError("No server runs that could be replaced. Start one first.")
        deployment, requirements = read_repository(repository), requirements_of(repository)
        refuse_unrunnable(repository, requirements, installation)
        check_repository(repository, requirements, self.options)
        report = preflight(repository)
        if not report.passed:
            raise SaccadeError(f"It is not fit to be served.\n{report.to_text()}")
        start = self._starter(repository, installation, requirements)
        wanted = Replacement(start, deployment.model, deployment.variants)
        supervisor.replace(wanted)
        wanted.settled.wait()
        if wanted.failure:
            raise wanted.failure

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
        """The HTTP address.

        Raises: SaccadeError where HTTP is off, as by default.
        """
        if not self.options.http:
            raise SaccadeError("HTTP is off. Turn it on with ServeOptions(http=True), or --http.")
        return f"http://{address(self.options.host, self.options.http_port)}"

    @property
    def metrics_url(self) -> str:
        """URL that Prometheus reads."""
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
        """Number of restarts of the whole server."""
        return self._supervisor.restarts if self._supervisor else 0

    @property
    def reloads(self) -> int:
        """Number of times that a single model was loaded again, because its process had died."""
        return self._supervisor.reloads.total() if self._supervisor else 0

    @property
    def replacements(self) -> int:
        """Number of times that another server took over from one that ran."""
        return self._supervisor.replacements if self._supervisor else 0

    def ready(self) -> Readiness:
        """Variants that answer, as the supervisor last saw it, and whether new callers do."""
        return self._new_caller.sees(self._board.readiness())

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
        try:
            if supervisor:
                supervisor.stop()
                supervisor.finished.wait()
        except KeyboardInterrupt:
            # A second Ctrl-C: whoever presses it does not want to wait for requests in flight.
            if supervisor:
                supervisor.stop(at_once=True)
                supervisor.finished.wait()
            raise
        finally:
            self._endpoint.close()
            if self._metrics:
                self._metrics.close()
                self._metrics = None


def serve(repository: Path | str, options: ServeOptions | None = None) -> int:
    """Run the server in the foreground until Ctrl-C or SIGTERM. Returns the exit code.

    Where the log is JSON, what would be raised is its last line, and its exit code is returned.

    Raises: SaccadeError for wrong input, ServerFailed when it cannot be kept running,
    KeyboardInterrupt if it is interrupted before it is ready.
    """
    options = options or ServeOptions()
    if not is_loopback(options.host) and not options.accept_risk:
        options = _ask_consent(options)
    with _own_log(options):
        try:
            with signals() as hang_up:
                with Server(repository, options) as server, suppress(KeyboardInterrupt):
                    hang_up.call(server)
                    _announce(server, options)
                    server.wait()
        except (SaccadeError, KeyboardInterrupt) as error:
            if options.log_format == "text":
                raise
            return _logged_end(error)
        _say("stopped.", options, "stopped")
    return 0


def _logged_end(error: BaseException) -> int:
    if isinstance(error, SaccadeError):
        code = error.exit_code
        LOGGER.critical("%s", error, **event("failed", exit_code=code))
    else:
        code = 128 + (interruption.received() or signal.SIGINT)
        LOGGER.warning("interrupted.", **event("interrupted", exit_code=code))
    return code


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
    """Risk of listening beyond loopback."""
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
    _print(risk_of(find_installation()))
    print(f"Listen on {options.host} all the same? [y/N] ", end="", file=sys.stderr, flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    return replace(options, accept_risk=agreed)


def _announce(server: Server, options: ServeOptions) -> None:
    if options.log_format == "json":
        places = {"grpc": server.url, "metrics": server.metrics_url, "ready": server.ready_url}
        places |= {"http": server.http_url} if server.options.http else {}
        what = {"model": server.model, "variants": list(server.variants)}
        LOGGER.info("serving.", **event("serving", **what, **places))
        return
    _print(f"{server.model} with {len(server.variants)} variants: {', '.join(server.variants)}")
    over_http = f"HTTP {server.http_url}   " if server.options.http else ""
    _print(f"gRPC {server.url}   {over_http}metrics {server.metrics_url}")
    _print(f"ready: {server.ready_url}   (Ctrl-C stops)")


def _say(text: str, options: ServeOptions, kind: str) -> None:
    if options.log_format == "json":
        LOGGER.info("%s", text, **event(kind))
    else:
        _print(text)


def _print(text: str) -> None:
    print(escaped_message(f"saccade: {text}"), file=sys.stderr, flush=True)


@contextmanager
def _own_log(options: ServeOptions) -> Iterator[None]:
    """Show the log on standard error, unless the program has set one up."""
    logger = logging.getLogger("saccade")
    if logger.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    text = EscapedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(text if options.log_format == "text" else JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
