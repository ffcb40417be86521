# SPDX-License-Identifier: Apache-2.0
"""`saccade serve` in the foreground: its log, and the signals that stop it or update it."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from saccade.core import interruption, verbosity
from saccade.core.errors import SaccadeError
from saccade.core.escaping import escaped_message
from saccade.serving.client.connection import is_loopback
from saccade.serving.repository.installation import find_installation
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.log import SERVICE, EscapedFormatter, JsonFormatter, event, report
from saccade.serving.server.server import Server, risk_of

_FAILED = "The update failed. The old repository is still served."


class Reloads(Protocol):
    """Interface of a server that can read its repository again."""

    def reload(self) -> None:
        """Read the repository again, check it and serve it."""


class HangUp:
    """Handler of SIGHUP: read the repository again, unless the terminal was closed.

    The system sends the same signal when a terminal is closed, but removes the terminal from the
    process first, so the two cases can be distinguished. A closed terminal stops the command, as
    usual, or is ignored if SIGHUP was ignored before (nohup).

    One thread does the updates, one after the other. Signals that arrive during an update lead to
    one more afterwards.
    """

    def __init__(self, ignored: bool) -> None:
        self._ignored = ignored
        self._had_terminal = _has_terminal()
        self._server: Reloads | None = None
        # Only this queue may be used in a handler that another signal can interrupt.
        self._signals: SimpleQueue[bool] = SimpleQueue()
        self._updating = False

    def call(self, server: Reloads) -> None:
        """Direct the signal to this server from now on."""
        self._server = server
        # The check takes seconds, and a signal handler must not block.
        threading.Thread(target=self._update, args=(server,), daemon=True).start()

    def close(self) -> None:
        """End the thread after the current update."""
        self._signals.put(False)

    def __call__(self, number: int, *_: object) -> None:
        """Handle the signal."""
        if self._had_terminal and not _has_terminal():
            self._had_terminal = False
            if not self._ignored:
                interruption.interrupt(number)
        elif self._server is None:
            SERVICE.warning("SIGHUP ignored: the server is still starting with this repository.")
        else:
            if self._updating:
                text = "SIGHUP: an update is in progress. Afterwards, the repository is read again."
                report(logging.INFO, "reload_pending", text)
            self._signals.put(True)

    def _update(self, server: Reloads) -> None:
        while self._signals.get():
            self._updating = True
            with suppress(Empty):
                while self._signals.get_nowait():
                    pass  # one update serves all signals that came before it
                return
            _reload(server)
            self._updating = False


@contextmanager
def signals() -> Iterator[HangUp]:
    """Let SIGINT and SIGTERM end the block as Ctrl-C does, even in a background shell."""
    hang_up = HangUp(ignored=signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
    if threading.current_thread() is not threading.main_thread():
        try:
            yield hang_up
        finally:
            hang_up.close()
        return
    handlers: dict[signal.Signals, Callable[..., None]] = {
        signal.SIGINT: interruption.interrupt,
        signal.SIGTERM: interruption.interrupt,
        signal.SIGHUP: hang_up,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield hang_up
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        hang_up.close()


def _reload(server: Reloads) -> None:
    report(logging.INFO, "reloading", "SIGHUP: reading the repository again.")
    try:
        server.reload()
    except SaccadeError as error:
        report(logging.ERROR, "reload_failed", f"{_FAILED} {error}")
    except Exception:
        SERVICE.exception(_FAILED, **event("reload_failed"))
    else:
        report(logging.INFO, "reloaded", "The new repository is being served.")


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def serve(repository: Path | str, options: ServeOptions | None = None) -> int:
    """Run the server in the foreground until Ctrl-C or SIGTERM, and return the exit code.

    With a JSON log, an error becomes the last line of the log instead of an exception, and its
    exit code is returned.

    Raises: SaccadeError for wrong input; ServerFailed if the server cannot be kept running;
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
        report(logging.CRITICAL, "failed", str(error), exit_code=code)
    else:
        code = 128 + (interruption.received() or signal.SIGINT)
        report(logging.WARNING, "interrupted", "Interrupted.", exit_code=code)
    return code


def _ask_consent(options: ServeOptions) -> ServeOptions:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return options
    _print(risk_of(find_installation()))
    print(f"Listen on {options.host} anyway? [y/N] ", end="", file=sys.stderr, flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    return replace(options, accept_risk=agreed)


def _announce(server: Server, options: ServeOptions) -> None:
    if options.log_format == "json":
        places = {"grpc": server.url, "metrics": server.metrics_url, "ready": server.ready_url}
        places |= {"http": server.http_url} if server.options.http else {}
        what = {"model": server.model, "variants": list(server.variants)}
        what |= {
            "repository": str(server.repository),
            "repository_sha256": server.repository_sha256,
        }
        report(logging.INFO, "serving", "Serving.", **what, **places)
        return
    count = len(server.variants)
    names = ", ".join(server.variants)
    _print(f"{server.model} with {count} variant{'s' * (count != 1)}: {names}")
    _print(f"repository {server.repository}, SHA-256 {server.repository_sha256[:12]}")
    over_http = f"HTTP {server.http_url}   " if server.options.http else ""
    _print(f"gRPC {server.url}   {over_http}metrics {server.metrics_url}")
    _print(f"ready: {server.ready_url}   (Ctrl-C stops)")


def _say(text: str, options: ServeOptions, kind: str) -> None:
    if options.log_format == "json":
        report(logging.INFO, kind, text)
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
    logger.setLevel(verbosity.level())
    try:
        yield
    finally:
        logger.removeHandler(handler)
