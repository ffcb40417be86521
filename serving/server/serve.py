# SPDX-License-Identifier: Apache-2.0
"""`saccade serve`: the server in the foreground, or a command to run it without supervision.

In the foreground, signals stop it or update it. A server of a printed command does not notice a
dead variant. Its arguments are those of `saccade serve`; the container's differ in paths and in
what a repository for GPUs needs.
"""

import csv
import hashlib
import io
import logging
import os
import secrets
import shlex
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from typing import Protocol

from saccade.core import interruption, verbosity
from saccade.core.errors import SaccadeError
from saccade.core.files import new_folder
from saccade.core.machine import cores
from saccade.core.options import flag
from saccade.core.sizes import counted
from saccade.plugins.native.library import NAME as ONNXRUNTIME_LIBRARY
from saccade.serving.client.connection import is_loopback
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.installation import (
    LIBRARIES,
    RELEASE,
    Installation,
    Requirements,
    check_installation,
    find_installation,
    refuse_container,
    refuse_unrunnable,
    requirements_of,
)
from saccade.serving.server.addresses import ServeOptions, listening, numeric, refuse_shared
from saccade.serving.server.log import SERVICE, JsonFormatter, event, report
from saccade.serving.server.process import (
    EXIT_TIMEOUT_S,
    backend_code,
    backend_folder,
    limited,
    server_arguments,
    trace_arguments,
    writable,
)
from saccade.serving.server.run_folder import link_models
from saccade.serving.server.server import Server, refuse_exposure, risk_of

_FAILED = "The update failed. The old repository is still served."
IMAGE = f"saccade-server:{RELEASE}"  # built from docker/Dockerfile
MODELS = PurePosixPath("/models")
# The ports that the server in the container listens on.
INSIDE = ServeOptions(host="0.0.0.0", accept_risk=True, http=True)
SHARED_MEMORY_MIB = 256
PIDS = 4096  # includes threads: each model's process has some, plus those of NumPy
STOP_TIMEOUT_S = EXIT_TIMEOUT_S + 10  # more than the server needs to finish requests in flight
_PORTS = ("grpc_port", "http_port", "metrics_port")  # the fourth belongs to the supervisor
_BACKENDS = PurePosixPath("/opt/tritonserver/backends")
_USER = "1000:1000"  # the user triton-server of the image


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
    verbosity.say(risk_of(find_installation()))
    print(f"Listen on {options.host} anyway? [y/N] ", end="", file=sys.stderr, flush=True)
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    return replace(options, accept_risk=agreed)


def _announce(server: Server, options: ServeOptions) -> None:
    if options.log_format == "json":
        places = {"grpc": server.url, "metrics": server.metrics_url, "ready": server.ready_url}
        places |= {"http": server.http_url} if server.options.http else {}
        places |= {"openai": server.openai_url} if server.options.openai is not None else {}
        what = {"model": server.model, "variants": list(server.variants)}
        what |= {
            "repository": str(server.repository),
            "repository_sha256": server.repository_sha256,
        }
        report(logging.INFO, "serving", "Serving.", **what, **places)
        return
    names = ", ".join(server.variants)
    verbosity.say(f"{server.model} with {counted(len(server.variants), 'variant')}: {names}")
    verbosity.say(f"repository {server.repository}, SHA-256 {server.repository_sha256[:12]}")
    over_http = f"HTTP {server.http_url}   " if server.options.http else ""
    verbosity.say(f"gRPC {server.url}   {over_http}metrics {server.metrics_url}")
    if server.options.openai is not None:
        verbosity.say(f"for clients of OpenAI's API: base URL {server.openai_url}")
    if limit := server.in_flight:
        verbosity.say(f"proxy: at most {limit} requests at once, more are refused (--in-flight)")
    verbosity.say(f"ready: {server.ready_url}   (Ctrl-C stops)")


def _say(text: str, options: ServeOptions, kind: str) -> None:
    if options.log_format == "json":
        report(logging.INFO, kind, text)
    else:
        verbosity.say(text)


def _own_log(options: ServeOptions) -> AbstractContextManager[None]:
    """Show the log on standard error, unless the program has set one up."""
    if logging.getLogger("saccade").hasHandlers():
        return nullcontext()
    formatter = JsonFormatter() if options.log_format == "json" else None
    return verbosity.log_shown(formatter, verbosity.level())


def print_command(
    repository: Path | str, options: ServeOptions | None = None, *, container: bool = False
) -> tuple[str, ...]:
    """Return the command that serves a repository, on this machine or in NVIDIA's container.

    Raises: SaccadeError for wrong input, port 0, the same port twice, a host beyond loopback
        without `accept_risk`, or a repository that only the other server can run; MissingPackage
        if there is no server here.
    """
    repository, options = Path(repository), options or ServeOptions()
    if options.log_format != "text":
        raise SaccadeError(
            f"--log-format {options.log_format}: the supervisor writes this log, but a printed "
            "command runs without it. Drop the option."
        )
    if options.openai is not None:
        raise SaccadeError(
            f"--openai {options.openai}: the supervisor starts this API, but a printed command "
            "runs without it. Drop the option."
        )
    if options.proxy:
        raise SaccadeError(
            "--proxy: the supervisor starts the proxy, but a printed command runs without it. Drop "
            "the option, and write a configuration for Envoy with: saccade proxy HOST:PORT --out "
            "envoy.yaml"
        )
    # HTTP is on in the container, because Docker's health check uses it.
    _check_ports(options, _PORTS if container else listening(options))
    options = replace(options, host=numeric(options.host))
    runtime = read_repository(repository).runtime
    requirements = requirements_of(repository)
    if container:
        return _container(repository.resolve(), options, requirements)
    return _embedded(repository, options, requirements, runtime)


def as_text(words: tuple[str, ...]) -> str:
    """Return the command for a shell, one option per line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(lines)


def container_arguments(requirements: Requirements) -> list[str]:
    """Return the arguments of the server in the container, which are defined only here."""
    arguments = server_arguments(INSIDE, Path(_BACKENDS), Path(MODELS), "saccade-")
    return arguments + requirements.arguments


def _container(
    repository: Path, options: ServeOptions, requirements: Requirements
) -> tuple[str, ...]:
    if not is_loopback(options.host) and not options.accept_risk:
        raise SaccadeError(
            f"--host {options.host}: other machines could reach the container there. It requires "
            "no password, has no TLS and accepts gRPC messages of any size. Put a proxy in front "
            "of it (docs/production.md), or pass --accept-risk to do it anyway."
        )
    refuse_container(repository, requirements)
    for name in requirements.op_libraries:
        if "/" in name and PurePosixPath(name).parent != LIBRARIES:
            raise SaccadeError(
                f"{repository}: its models load {name}, which is on this machine but not in the "
                f"container. Expected {ONNXRUNTIME_LIBRARY}, or that in {LIBRARIES}. Write the "
                "repository again, if necessary with --no-op-library to use function bodies."
            )
    publish = [
        f"--publish={options.host}:{getattr(options, port)}:{getattr(INSIDE, port)}"
        for port in _PORTS
    ]
    return (
        # Never pull: the image is built here, and we do not own its name on a registry.
        *("docker", "run", "--rm", "--pull=never"),
        *(f"--user={_USER}", "--read-only", "--tmpfs=/tmp", f"--pids-limit={PIDS}"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *(f"--shm-size={SHARED_MEMORY_MIB}m", f"--stop-timeout={STOP_TIMEOUT_S}"),
        *(["--gpus=all"] if requirements.gpu else []),
        *(f"--mount={_mount(repository, MODELS)}", *publish, IMAGE, "tritonserver"),
        *container_arguments(requirements),
    )


def _mount(source: Path, target: PurePosixPath) -> str:
    # Docker reads the value as a line of CSV, so a comma in a path needs quotes.
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", "readonly"]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _embedded(
    repository: Path, options: ServeOptions, requirements: Requirements, runtime: str
) -> tuple[str, ...]:
    installation = find_installation()
    refuse_unrunnable(repository, requirements, installation)
    refuse_exposure(options, installation)
    check_installation(installation, runtime)
    folder = _prepared(installation, repository)
    backends = installation.backends if installation.has_onnxruntime else folder / "backends"
    regions = f"saccade-printed-{secrets.token_hex(3)}-"
    changed = [
        f"{name}={value}"
        for name, value in installation.environment().items()
        if name == "ORT_DISABLE_TELEMETRY" or value != os.environ.get(name)
    ]
    arguments = server_arguments(options, backends, folder / "models", regions)
    arguments += trace_arguments(folder / "models", options, os.environ)
    return ("env", *changed, *limited(installation.binary), *arguments, *requirements.arguments)


def _prepared(installation: Installation, repository: Path) -> Path:
    """Return a folder with the backends and a copy of the models, made once per repository.

    The server writes caches next to the models that it runs; they must not mix with hashed files.
    """
    digest = hashlib.sha256(repr((installation, repository.resolve(), cores())).encode())
    digest.update((repository / "saccade.json").read_bytes())
    for source in backend_code().values():
        digest.update(source)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    folder = home / "saccade" / f"served-{digest.hexdigest()[:16]}"
    with writable(folder, "XDG_CACHE_HOME"):
        home.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        if not folder.exists():
            # Another process that does this at the same time writes the same files.
            with new_folder(folder, force=True) as partial:
                backend_folder(installation, partial / "backends")
                link_models(repository, partial / "copy", partial / "models")
    _refuse_foreign(folder.parent)
    _refuse_foreign(folder)
    return folder


def _refuse_foreign(folder: Path) -> None:
    state = folder.lstat()
    is_ours = state.st_uid == os.geteuid() and not state.st_mode & 0o022
    if not is_ours or stat.S_ISLNK(state.st_mode):
        raise SaccadeError(
            f"{folder}: other users can write to it, but code in it would be executed. "
            "Remove it, or set XDG_CACHE_HOME to a folder of your own."
        )


def _check_ports(options: ServeOptions, names: tuple[str, ...]) -> None:
    chosen: dict[str, int] = {}
    for name in names:
        if name not in _PORTS:
            continue
        port = getattr(options, name)
        if port == 0:
            raise SaccadeError(
                f"{flag(name)} 0: a free port can only be found when the server starts, but a "
                "printed command starts later. Pass a port."
            )
        refuse_shared(name, port, chosen)
        chosen[name] = port
