# SPDX-License-Identifier: Apache-2.0
"""The server as a context manager."""

import logging
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.core.machine import cores
from saccade.serving.client.connection import is_loopback
from saccade.serving.client.readiness import Board, Readiness
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.installation import (
    BUNDLED_LINE,
    Installation,
    Requirements,
    check_installation,
    find_installation,
    refuse_unrunnable,
    requirements_of,
)
from saccade.serving.repository.preflight.verb import preflight
from saccade.serving.repository.threads import chosen_again
from saccade.serving.server.addresses import ServeOptions, address, with_ports
from saccade.serving.server.envoy_process import EnvoyProcess, find_envoy, in_flight_of
from saccade.serving.server.http_endpoint import (
    MetricsRelay,
    NewCaller,
    ReadyEndpoint,
    Watched,
    hold_port,
)
from saccade.serving.server.log import SERVICE, ServerLog, report
from saccade.serving.server.process import ServerProcess, trace_notices
from saccade.serving.server.run_folder import COPY, RunFolder
from saccade.serving.server.supervisor import Replacement, Start, Supervisor
from saccade.serving.server.web_process import WebProcess, read_keys

__all__ = ["ServeOptions", "Server"]

# Weaknesses of the server that saccade cannot fix, reported when it starts.
_HTTP = (
    "HTTP is on: one request of 150 kB (nested JSON) or with a million small chunks can crash the "
    "server, a compressed one fill its memory for good, and web pages in a browser on this machine "
    "can send requests. Put docker/proxy in front of it, or use gRPC."
)
_MESSAGES = (
    "A message may be up to 2 GiB large, and the server needs several times that in memory. Limit "
    "the message with --proxy (256 MiB), or the server with `systemd-run --user --scope -p "
    "MemoryMax=4G saccade serve ...`."
)


class Server:
    """A running server: `with Server("build/repo") as server: Client(server.url, "nac")`.

    The server is ready when the block begins, and stopped when the block ends. Inside the block it
    is restarted if it fails. A model whose process dies is reloaded while the others answer.
    Raises: SaccadeError for wrong input; ServerFailed if the server dies or hangs while starting.
    """

    def __init__(self, repository: Path | str, options: ServeOptions | None = None) -> None:
        self.repository = Path(repository)
        self.options = options or ServeOptions()
        self._supervisor: Supervisor | None = None
        self._metrics: MetricsRelay | None = None
        self._web: WebProcess | None = None
        self._reloading = threading.Lock()
        self._proxy: EnvoyProcess | None = None

    def __enter__(self) -> "Server":
        installation = find_installation()
        wanted = self.options
        refuse_exposure(wanted, installation)
        self._keys = read_keys(wanted)
        deployment = read_repository(self.repository)
        requirements = requirements_of(self.repository)
        refuse_unrunnable(self.repository, requirements, installation)
        if wanted.proxy:
            find_envoy()
        here = cores()
        for name, threads in chosen_again(deployment.threads, deployment.cores, here).items():
            why = deployment.threads[name].why(here)
            SERVICE.info("%s: one run has %d threads here, because %s", name, threads, why)
        if installation.bundled:
            for text in trace_notices(self.repository, os.environ):
                SERVICE.warning("%s", text)
        for attempts_left in (2, 1, 0):
            self.options = with_ports(wanted)
            check_installation(installation, deployment.runtime)
            self._board = Board(deployment.model, deployment.variants, deployment.sha256)
            log = ServerLog(self.options.server_log)
            try:
                self._start(installation, requirements, log)
                break
            except ServerFailed:
                # A port that was free a moment ago is taken: choose again those that we chose.
                if not (attempts_left and self.options != wanted and log.says("already in use")):
                    raise
        # An error that ended the start would be below them, where few look for it.
        for level, text in notices(wanted):
            SERVICE.log(level, text)
        return self

    def _start(
        self, installation: Installation, requirements: Requirements, log: ServerLog
    ) -> None:
        options, self._log = self.options, log
        # Behind the proxy, which has the callers' port, the server takes any other.
        self._behind = hold_port() if options.proxy else None
        if self._behind:
            place = address(*self._behind.getsockname())
            in_flight = options.in_flight or in_flight_of(self.repository)
            self._proxy = EnvoyProcess(options, place, in_flight, log)
        start = self._starter(self.repository.resolve(), installation, requirements)
        supervisor = Supervisor(start, self._inner(), self._board, log, self._proxy)
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
                    self._proxy.figures() if self._proxy else {},
                ),
            )
            if options.openai is not None:
                self._web = WebProcess(options, self.model, self._keys)
            self._supervisor = supervisor
            supervisor.start()
            supervisor.settled.wait()
            if supervisor.failure:
                raise supervisor.failure
        except BaseException:
            self._close()
            raise

    def _inner(self) -> ServeOptions:
        """Return the options of the server itself, which only the proxy calls if there is one."""
        if self._behind is None:
            return self.options
        host, port = self._behind.getsockname()
        return replace(self.options, host=host, grpc_port=port)

    def _starter(
        self, repository: Path, installation: Installation, requirements: Requirements
    ) -> Start:
        options, log = self._inner(), self._log
        # A restart serves the bytes of the first start; another repository gets its own copy.
        copy = f"{COPY}{secrets.token_hex(3)}"

        def start(folder: RunFolder) -> ServerProcess:
            return ServerProcess(installation, repository, options, folder, log, requirements, copy)

        return start

    def __exit__(self, *_: object) -> None:
        self._close()

    def reload(self) -> None:
        """Serve the repository as it is now, without failing a call.

        The repository may have new files, or the link to it may point to another folder. Two
        servers run until the last caller has moved to the new one.

        Raises: SaccadeError if preflight fails; ServerFailed if the new server does not start. The
            old server then continues.
        """
        if not self._reloading.acquire(blocking=False):
            raise SaccadeError("The repository is already being read. Try again when that is done.")
        try:
            self._replace(self.repository.resolve())
        finally:
            self._reloading.release()

    def _replace(self, repository: Path) -> None:
        supervisor, installation = self._supervisor, find_installation()
        if supervisor is None:
            raise SaccadeError("There is no running server to replace. Start one first.")
        deployment, requirements = read_repository(repository), requirements_of(repository)
        if deployment.model != self.model:
            raise SaccadeError(
                f"The repository serves {deployment.model!r}, but callers ask for {self.model!r}. "
                "Write it with the same name, or stop the server and start it with the new "
                "repository."
            )
        refuse_unrunnable(repository, requirements, installation)
        findings = preflight(repository)
        if not findings.passed:
            raise SaccadeError(f"The repository is not ready to serve.\n{findings.to_text()}")
        start = self._starter(repository, installation, requirements)
        wanted = Replacement(start, deployment.model, deployment.variants, deployment.sha256)
        supervisor.replace(wanted)
        wanted.settled.wait()
        if wanted.failure:
            raise wanted.failure
        sha256 = deployment.sha256
        text = f"Serving {repository}, SHA-256 {sha256:.12}."
        fields = {"repository": str(repository), "repository_sha256": sha256}
        report(logging.INFO, "replaced", text, **fields)

    @property
    def model(self) -> str:
        """The name of the router, for `Client`."""
        return self._board.model

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the variants."""
        return self._board.variants

    @property
    def repository_sha256(self) -> str:
        """The SHA-256 of the served repository's saccade.json, which has that of every file."""
        return self._board.repository

    @property
    def url(self) -> str:
        """The gRPC address, for `Client`."""
        return address(self.options.host, self.options.grpc_port)

    @property
    def http_url(self) -> str:
        """The HTTP address.

        Raises: SaccadeError if HTTP is off, which is the default.
        """
        if not self.options.http:
            raise SaccadeError("HTTP is off. Turn it on with ServeOptions(http=True) or --http.")
        return f"http://{address(self.options.host, self.options.http_port)}"

    @property
    def openai_url(self) -> str:
        """The base URL for clients of OpenAI's API.

        Raises: SaccadeError if it is off, which is the default.
        """
        if self.options.openai is None:
            raise SaccadeError("This API is off. Turn it on with ServeOptions(openai=8080).")
        return f"http://{address(self.options.host, self.options.openai)}/v1"

    @property
    def metrics_url(self) -> str:
        """The URL of the Prometheus metrics."""
        return f"http://{address(self.options.host, self.options.metrics_port)}/metrics"

    @property
    def ready_url(self) -> str:
        """The URL that returns 200 if every variant answers, and 503 otherwise."""
        return f"http://{address(self.options.host, self.options.ready_port)}/ready"

    @property
    def pid(self) -> int:
        """The server's process id, which changes with a restart; 0 while there is no server."""
        return self._supervisor.pid if self._supervisor else 0

    @property
    def in_flight(self) -> int:
        """Number of requests that the proxy passes on at the same time; 0 without a proxy."""
        return self._proxy.in_flight if self._proxy else 0

    @property
    def proxy_pid(self) -> int:
        """The process id of the proxy in front of the server; 0 while there is none."""
        return self._proxy.pid if self._proxy else 0

    @property
    def restarts(self) -> int:
        """Number of restarts of the whole server."""
        return self._supervisor.restarts if self._supervisor else 0

    @property
    def reloads(self) -> int:
        """Number of times that a single model was reloaded because its process had died."""
        return self._supervisor.reloads.total() if self._supervisor else 0

    @property
    def replacements(self) -> int:
        """Number of times that a new server took over from a running one."""
        return self._supervisor.replacements if self._supervisor else 0

    def ready(self) -> Readiness:
        """Return which variants answered the last probe, and whether new callers can connect."""
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
        supervisor, web = self._supervisor, self._web
        try:
            if web:
                web.stop()  # first, because its requests need the server
            if supervisor:
                supervisor.stop()
                supervisor.finished.wait()
        except KeyboardInterrupt:
            # On a second Ctrl-C, do not wait for requests in flight.
            if web:
                web.stop(at_once=True)
            if supervisor:
                supervisor.stop(at_once=True)
                supervisor.finished.wait()
            raise
        finally:
            self._endpoint.close()
            if self._metrics:
                self._metrics.close()
                self._metrics = None
            self._web = None
            if self._behind:
                self._behind.close()


def notices(options: ServeOptions) -> Iterator[tuple[int, str]]:
    """Yield notices about remaining risks, each with a log level."""
    if options.http:
        yield logging.WARNING, _HTTP
    if not options.proxy:
        yield logging.INFO, _MESSAGES


def refuse_exposure(options: ServeOptions, installation: Installation) -> None:
    """Refuse to listen beyond loopback without `accept_risk`, or over HTTP.

    Raises: SaccadeError if the host is not loopback, and the risk was not accepted or HTTP is on.
    """
    over_http = options.http and installation.bundled
    if not is_loopback(options.host) and (over_http or not options.accept_risk):
        advice = (
            "Over HTTP, any caller could crash it with one request of 150 kB. Drop --http, or "
            "listen on 127.0.0.1 behind docker/proxy."
            if over_http
            else "Pass --accept-risk to do it anyway, or drop --host for 127.0.0.1."
        )
        raise SaccadeError(f"--host {options.host}: {risk_of(installation)} {advice}")


def risk_of(installation: Installation) -> str:
    """Return a description of the risk of listening beyond loopback."""
    whose = (
        f"The bundled server is version {BUNDLED_LINE}, without the security fixes of 2025. "
        if installation.bundled
        else f"The server is {installation.binary}, whose version saccade does not know. "
    )
    return (
        f"Other machines could reach the server there. {whose}It requires no password and cannot "
        "limit the size of a message. To expose it, serve the same repository with NVIDIA's "
        "current container, behind a proxy that limits messages."
    )
