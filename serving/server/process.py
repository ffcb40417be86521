# SPDX-License-Identifier: Apache-2.0
"""One server process: its folders, arguments, stubs and traces, its start and its end.

Stubs are the processes in which a server's Python models run.
"""

import os
import py_compile
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.die_with_parent import dying_with_parent
from saccade.core.errors import SaccadeError, ServerFailed
from saccade.core.machine import cpu_seconds, family_of, process_fields
from saccade.model_repository.router.routes import RUN_FOLDER
from saccade.model_repository.router.tracing import (
    CLOSE_S,
    CONTEXT,
    REQUEST_LOG,
    obstacle,
    wants_tracing,
)
from saccade.serving.local.server_code import backend_files
from saccade.serving.repository.installation import STUB, Installation, Requirements
from saccade.serving.repository.runtimes.registry import served_names, served_runtime
from saccade.serving.server import beside
from saccade.serving.server.addresses import ServeOptions, connections
from saccade.serving.server.http_endpoint import OWN_HOST, hold_port, metrics
from saccade.serving.server.log import ServerLog
from saccade.serving.server.run_folder import RunFolder, close_regions, link_models, remove_regions

_RESTRICTED = "shared-memory,model-repository,logging,trace"
# A header that no request can have, so that there is no key to read or guess: a colon ends a
# header's name in HTTP/1, and gRPC refuses one inside. We need none of the restricted endpoints.
CLOSED = "closed:for-all=closed"
# Where nothing supervises the server, it ends itself after this time for requests in flight.
EXIT_TIMEOUT_S = 30
_NO_EXIT_TIMEOUT_S = 24 * 3600  # of a supervised one, which `stop` kills
_FLUSH_S = 0.2
CRASHES_S = 2.0  # a server that crashes prints a trace within this time, and exits
# At this age, give or take a tenth, gRPC moves a connection to a new one without failing a call.
# That is how callers move to a server that replaces another.
CONNECTION_AGE_S = 10
_AGAIN = "loaded-again"

SHARE = 0.1  # of one core: less is housekeeping, not progress
MOST_TIMES = 10.0  # a start may take this many times the limit, however much it computes
_LOOK_S = 1.0  # between two looks at the CPU time

# The models create the spans (model_repository/router/tracing.py); the server only forwards a
# caller's context. The server's own trace mode is not used, because it follows every context that a
# caller sends, whether sampled or not, and does not know decoding, lanes or batched requests.
_TRACING_FILE = "tracing.py"  # in the router, if it supports contexts
_PATTERN = f"(?i)^({'|'.join(CONTEXT)})$"


def compile_models(models: Path) -> None:
    """Compile the models' code to where the server's own interpreter would put it.

    Otherwise the server would see the caches written by a model's first run as a change of the
    model. This does not depend on where this process keeps its caches (PYTHONPYCACHEPREFIX).
    """
    for source in models.rglob("*.py"):
        name = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        py_compile.compile(str(source), str(source.parent / "__pycache__" / name), quiet=2)


@dataclass(frozen=True)
class Stub:
    """The process of one Python model; `started` distinguishes it from a later one with its id."""

    pid: int
    started: int
    model: str
    region: str = ""  # of shared memory, between it and the server


def stubs_in(group: int) -> list[Stub]:
    """Return the stubs in a process group."""
    stubs = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, IndexError):
            fields = process_fields(int(entry.name))
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if int(fields[2]) == group and words[0].endswith(STUB.encode()):
                region = words[2].decode(errors="replace") if len(words) > 2 else ""
                stubs.append(Stub(int(entry.name), int(fields[19]), _model_of(words), region))
    return stubs


def _model_of(words: list[bytes]) -> str:
    # One of the stub's arguments is the instance, such as `nac-b0250-fp32_0_0`.
    for word in words[2:]:
        instance = re.fullmatch(r"([a-z0-9-]+)_\d+_\d+", word.decode(errors="replace"))
        if instance:
            return instance[1]
    return ""


def _started(pid: int) -> int | None:
    """Return the start time of process `pid` in clock ticks; None if it is gone or a zombie."""
    fields = process_fields(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def is_alive(stub: Stub) -> bool:
    """Return True if this very process is running, not a later one with the same id."""
    return _started(stub.pid) == stub.started


def wait_gone(stub: Stub) -> None:
    """Wait until a stub that was killed is gone.

    Raises: ServerFailed if it does not exit.
    """
    end = time.monotonic() + 3
    while is_alive(stub):
        if time.monotonic() > end:
            raise ServerFailed(f"Process {stub.pid} of model {stub.model} does not exit.")
        time.sleep(0.01)


FORGIVEN_AFTER_S = 30.0  # seconds of service that make up for one failure
MOST_TROUBLES = 5


def exit_text(process: "subprocess.Popen[bytes]") -> str:
    """Return how a process exited; empty while it runs."""
    code = process.poll()
    if code is None:
        return ""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


class Patience:
    """Count of failures: each adds one, and service subtracts, but never below zero."""

    def __init__(self) -> None:
        self._troubles = 0.0

    def after(self, served_s: float) -> float | None:
        """Return the seconds to wait before the next start; None if there is to be none.

        Units: served_s is the seconds of service before this failure.
        """
        self._troubles = 1 + max(0.0, self._troubles - served_s / FORGIVEN_AFTER_S)
        if self._troubles > MOST_TROUBLES:
            return None
        return 0.0 if self._troubles < 2 else 2.0 ** (int(self._troubles) - 2)


class StartLimit:
    """Watches one start from now on; `used_s` returns the CPU time of its processes so far."""

    def __init__(
        self, used_s: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = used_s, clock
        self._began_s = self._looked_s = self._progress_s = clock()
        self._used_s = 0.0

    def is_over(self, limit_s: float) -> bool:
        """Return True if there was no progress for so long, or for much longer no end of it."""
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_S:
            used_s = self._read()
            # Less than before: a process that had used some has ended.
            if used_s < self._used_s or used_s - self._used_s > SHARE * (now_s - self._looked_s):
                self._progress_s = now_s
            self._used_s, self._looked_s = used_s, now_s
        return now_s - self._progress_s > limit_s or now_s - self._began_s > MOST_TIMES * limit_s

    def text(self, limit_s: float) -> str:
        """Return the limit that was passed, and what to do."""
        seconds = self._clock() - self._began_s
        return (
            f"after {seconds:.0f} s, {self._clock() - self._progress_s:.0f} of them without "
            f"progress, expected at most {limit_s:g}. Allow more with --start-timeout-s"
        )


class ServerProcess:
    """A server process that serves a repository, and is stopped at the end, by force if needed."""

    def __init__(
        self,
        installation: Installation,
        repository: Path,
        options: ServeOptions,
        folder: RunFolder,
        log: ServerLog,
        requirements: Requirements,
        copy: str,
    ) -> None:
        """Start the server; `copy` is the name of the served copy in the run's folder."""
        self._log = log
        self.copy = folder.path / copy
        self._regions = f"{folder.path.name}-{secrets.token_hex(3)}-"
        self._stubs: tuple[Stub, ...] = ()
        self._idle = threading.Event()
        self._crash = threading.Event()
        self._crash_s: float | None = None  # when it was first seen
        self._models = models = folder.path / f"models-{secrets.token_hex(3)}"
        with writable(folder.path, "TMPDIR"):
            backends = backend_folder(installation, folder.path / "backends")
            link_models(repository, self.copy, models)
        for model in models.iterdir():
            (model / _AGAIN).touch()
        compile_models(models)
        self._metrics_port = hold_port()
        # Two servers can share every port except this one.
        self._options = replace(options, metrics_port=self._metrics_port.getsockname()[1])
        arguments = server_arguments(self._options, backends, models, self._regions)
        arguments = [*supervised(arguments), *requirements.arguments]
        arguments += trace_arguments(models, self._options, os.environ)
        self._is_traced = is_traced(models, os.environ)
        environment = installation.environment() | {RUN_FOLDER: str(folder.path)}
        if options.log_format == "json":
            environment[REQUEST_LOG] = "1"
        self._process = subprocess.Popen(
            dying_with_parent([*limited(installation.binary), *arguments]),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C must not reach it before us
        )
        assert self._process.stdout is not None
        self._reader = log.follow(self._process.stdout, self._idle, self._crash)

    @property
    def pid(self) -> int:
        """The server's process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def metrics_port(self) -> int:
        """Port of this server's own metrics."""
        return self._options.metrics_port

    def cpu_s(self) -> float:
        """Return the CPU time that the server and its stubs have used."""
        return sum(cpu_seconds(family_of(self.pid)).values())

    def loaded(self) -> bool:
        """Return True if every model is loaded: the metrics port is the last that it opens."""
        close_regions(self._regions)
        return metrics(self.metrics_port, timeout_s=1)[0] == 200

    def find_stubs(self) -> tuple[Stub, ...]:
        """Look up the stubs and remember them for `dead_stubs`."""
        self._stubs = tuple(stubs_in(self.pid))
        return self._stubs

    def exit_text(self) -> str | None:
        """Return how the server exited, or None while it runs; kill it if it hangs in a crash.

        If its memory is corrupt, the crash handler crashes too, again and again. That uses the
        CPU, as work does, but answers nobody.
        """
        code = self._process.poll()
        if code is None and self._crash.is_set():
            now = time.monotonic()
            self._crash_s = self._crash_s or now
            if now - self._crash_s > CRASHES_S:
                self._process.kill()
                return f"it crashed and had not exited {CRASHES_S:g} s later"
        return exit_text(self._process) or None

    def dead_stubs(self) -> list[Stub]:
        """Return the stubs that have exited, which the server itself does not notice."""
        return [stub for stub in self._stubs if not is_alive(stub)]

    def load_again(self, model: str) -> None:
        """Make the server reload one model from this run's files, without touching the others.

        The server keeps using the dead instance, which it never removes, until the new one is
        loaded. Until then, requests to the model fail.
        """
        # Only the modification time changes, which works on a full disk too.
        os.utime(self._models / model / _AGAIN)

    def stubs_of(self, model: str) -> list[Stub]:
        """Return the known stubs of a model, including dead ones."""
        return [stub for stub in self._stubs if stub.model == model]

    def new_stubs(self, model: str) -> bool:
        """Return True if a model has new stubs since the last call, and remember them."""
        known = set(self._stubs)
        new = [stub for stub in stubs_in(self.pid) if stub.model == model and stub not in known]
        self._stubs = (*self._stubs, *new)
        close_regions(self._regions)
        return bool(new)

    def abandon(self, stub: Stub) -> None:
        """Forget a stub, kill it if it is still alive, and remove its shared memory."""
        self._stubs = tuple(one_stub for one_stub in self._stubs if one_stub != stub)
        if is_alive(stub):
            with suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)
        if stub.region:
            remove_regions(stub.region)

    def ports(self) -> tuple[int, ...]:
        """Ports that callers use; without HTTP, another program may use that port."""
        options = self._options
        return (options.grpc_port, options.http_port) if options.http else (options.grpc_port,)

    def callers(self) -> int:
        """Return the number of connections from callers."""
        return sum(connections(port, self.pid) for port in self.ports())

    def stop(self, *, at_once: bool = False, hurried: Callable[[], bool] = lambda: False) -> None:
        """Let requests in the server's queues finish, then stop it; remove stubs, shared memory.

        The server does not count the requests that its models are running: the supervisor does.
        Nothing is waited for `at_once`, or as soon as `hurried` is true.
        """
        if self._process.poll() is None and not at_once:
            self._process.send_signal(signal.SIGINT)
            self._wait_until_idle(self._options.grace_s, hurried)
        self._kill()
        self._metrics_port.close()
        remove_regions(self._regions)
        shutil.rmtree(self._models, ignore_errors=True)

    def _wait_until_idle(self, most_s: float, hurried: Callable[[], bool]) -> None:
        # Once idle, it only unloads models, which takes seconds and is not needed.
        end = time.monotonic() + most_s
        while time.monotonic() < end and self._process.poll() is None and not hurried():
            if (self._idle.wait(0.05) and not self._may_run()) or not self.callers():
                time.sleep(_FLUSH_S)
                if self._is_traced:
                    self._wait_spans()
                return

    def _may_run(self) -> bool:
        """Return whether an instance may still run a call, unseen by a probe of another one."""
        return any(is_alive(stub) and len(self.stubs_of(stub.model)) > 1 for stub in self._stubs)

    def _wait_spans(self) -> None:
        """Give the models' processes time to send their last spans."""
        end = time.monotonic() + CLOSE_S
        while time.monotonic() < end and any(map(is_alive, self._stubs)):
            time.sleep(0.02)

    def _kill(self) -> None:
        # The group's id cannot be reused while the unreaped server or a stub still has it.
        stubs = stubs_in(self.pid)
        if stubs or self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for stub in stubs:
            wait_gone(stub)
        self._reader.join(timeout=2)


def server_arguments(
    options: ServeOptions, backends: Path, models: Path, regions: str
) -> list[str]:
    """Return the arguments of the server, none of which is a secret."""
    restricted = f"{_RESTRICTED}:{CLOSED}"
    words = [
        f"--backend-directory={backends}",
        f"--model-repository={models}",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--grpc-address={options.host}",
        f"--http-address={options.host}",
        f"--metrics-address={options.host}",
        f"--grpc-port={options.grpc_port}",
        f"--http-port={options.http_port}",
        f"--metrics-port={options.metrics_port}",
        f"--grpc-restricted-protocol={restricted}",
        f"--http-restricted-api={restricted}",
        "--allow-sagemaker=false",
        "--allow-vertex-ai=false",
        f"--backend-config=python,shm-region-prefix-name={regions}",
    ]
    if options.http:
        return words
    return [*(word for word in words if not word.startswith("--http-")), "--allow-http=false"]


def limited(program: Path) -> tuple[str, ...]:
    """Return the start of a command that runs a program with the server's umask and limits."""
    return sys.executable, "-IS", beside.__file__, "limited", str(program)


def supervised(arguments: list[str]) -> list[str]:
    """Return the extra arguments for supervision: probes, reloads of models, replacement."""
    ours = {
        # The server polls a model's files every second and reloads the model if they changed. The
        # alternative needs a key that every user of the machine could read in the arguments.
        "--model-control-mode": "poll",
        "--repository-poll-secs": "1",
        "--metrics-address": OWN_HOST,
        "--reuse-grpc-port": "true",
        "--reuse-http-port": "true",
        "--grpc-max-connection-age": str(round(CONNECTION_AGE_S * 1000)),
        "--exit-timeout-secs": str(_NO_EXIT_TIMEOUT_S),
    }
    others = [word for word in arguments if word.partition("=")[0] not in ours]
    return others + [f"{name}={value}" for name, value in ours.items()]


@contextmanager
def writable(folder: Path, variable: str) -> Iterator[None]:
    """Explain what to do if the block cannot write to a folder, which `variable` sets.

    Raises: SaccadeError if the block cannot write.
    """
    try:
        yield
    except OSError as error:
        # For a whole tree: a list of what could not be copied, as source, target and reason.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise SaccadeError(
            f"{folder}: the server's files cannot be written there ({why}). Free space, or set "
            f"{variable} to another folder."
        ) from error


def backend_folder(installation: Installation, folder: Path) -> Path:
    """Return the server's backends if they run ONNX files, or a copy that includes ours."""
    if installation.has_onnxruntime:
        return installation.backends
    if folder.exists():
        return folder
    # Copy instead of link: the server refuses a backend library that links out of its folder.
    python = shutil.copytree(
        installation.backends / "python",
        folder / "python",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copyfile(installation.stub, python / STUB)
    (python / STUB).chmod(0o755)
    for name, source in backend_code().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(source)
    return folder


def backend_code() -> dict[str, bytes]:
    """Return the files of our backends by their place; they share all but one, the model."""
    backends = [
        served.backend for name in served_names() if (served := served_runtime(name)).bundled
    ]
    return {
        f"{backend}/{name}": file.read_bytes()
        for backend in sorted(backends)
        for name, file in sorted(backend_files(backend).items())
    }


def is_traced(models: Path, environment: Mapping[str, str]) -> bool:
    """Return True if these models send spans; a router of an older release cannot."""
    return wants_tracing(environment) and any(models.glob(f"*/1/{_TRACING_FILE}"))


def trace_arguments(
    models: Path, options: ServeOptions, environment: Mapping[str, str]
) -> list[str]:
    """Return the server arguments that forward callers' contexts to the router."""
    # A router that does not know these parameters would refuse requests that contain them.
    if not is_traced(models, environment):
        return []
    http = [f"--http-header-forward-pattern={_PATTERN}"] if options.http else []
    return [f"--grpc-header-forward-pattern={_PATTERN}", *http]


def trace_notices(models: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield reasons why no spans reach the configured endpoint."""
    if not wants_tracing(environment):
        return
    if not is_traced(models, environment):
        yield (
            f"No spans are sent: {models} was written by an older release. Run `saccade "
            "repository` again, or unset OTEL_EXPORTER_OTLP_ENDPOINT."
        )
    elif reason := obstacle(environment):
        yield f"No spans are sent: {reason}. Or unset OTEL_EXPORTER_OTLP_ENDPOINT."
