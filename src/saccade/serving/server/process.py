# SPDX-License-Identifier: Apache-2.0
"""One process of the server: its folders, its arguments, its stubs, its start and its end."""

import os
import py_compile
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path

from saccade.die_with_parent import dying_with_parent
from saccade.errors import SaccadeError
from saccade.serving.repository.installation import STUB, Installation
from saccade.serving.repository.requirements import Requirements
from saccade.serving.server import listeners
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.json_log import REQUEST_LOG
from saccade.serving.server.log import ServerLog
from saccade.serving.server.metrics_relay import OWN_HOST, hold_port, metrics
from saccade.serving.server.run_folder import RunFolder, close_regions, remove_regions
from saccade.serving.server.served_copy import link_models
from saccade.serving.server.stubs import Stub, is_alive, stubs_in, wait_gone
from saccade.serving.server.tracing import CLOSE_S, FILE, is_traced, trace_arguments

_RESTRICTED = "shared-memory,model-repository,logging,trace"
# A header that no request can have, so that there is no key to be read or guessed: a colon ends
# its name in HTTP/1, and gRPC refuses one inside. Nothing here needs what is restricted.
CLOSED = "closed:for-all=closed"
_EXIT_TIMEOUT_S = 5
_FLUSH_S = 0.2
CRASHES_S = 2.0  # a server that crashes prints where it was, and ends
# gRPC moves a connection of this age, give or take a tenth, to a new one, and no call notices:
# so callers of a server that another one replaces go over to it.
CONNECTION_AGE_S = 10
_AGAIN = "loaded-again"


def compile_models(models: Path) -> None:
    """Compile the models' code beside it, where the server's own interpreter would.

    Else the server takes the caches of a model's first run for a change of the model. Where this
    process keeps its own caches (PYTHONPYCACHEPREFIX) does not matter.
    """
    for source in models.rglob("*.py"):
        name = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        py_compile.compile(str(source), str(source.parent / "__pycache__" / name), quiet=2)


class ServerProcess:
    """A server that was started on a repository and is stopped at the end, by force if need be."""

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
        """`copy` is the name, in the run's folder, of the bytes that are served."""
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
        # Two servers can share every port but this one.
        self._options = replace(options, metrics_port=self._metrics_port.getsockname()[1])
        arguments = server_arguments(self._options, backends, models, self._regions)
        arguments = [*supervised(arguments), *requirements.arguments]
        arguments += trace_arguments(models, self._options, os.environ)
        self._is_traced = is_traced(models, os.environ)
        environment = installation.environment()
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
        """The server's process id, by which it also leads its process group."""
        return self._process.pid

    @property
    def metrics_port(self) -> int:
        """Port of this server's own metrics."""
        return self._options.metrics_port

    def loaded(self) -> bool:
        """True if every model is loaded: its metrics are the last that the server opens."""
        close_regions(self._regions)
        return metrics(self.metrics_port, timeout_s=1)[0] == 200

    def find_stubs(self) -> tuple[Stub, ...]:
        """Look up the stubs; from now on `dead_stubs` knows them."""
        self._stubs = tuple(stubs_in(self.pid))
        return self._stubs

    def exit_text(self) -> str | None:
        """Exit of the server in words, None while it runs; one that crashes and does not end is
        killed.

        Where its memory is spoilt, the handler of the crash crashes as well, again and again: that
        uses the CPU, as work does, and answers nobody.
        """
        code = self._process.poll()
        if code is None and self._crash.is_set():
            now = time.monotonic()
            self._crash_s = self._crash_s or now
            if now - self._crash_s > CRASHES_S:
                self._process.kill()
                return f"it crashed, and had not ended {CRASHES_S:g} s later"
        if code is None:
            return None
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def dead_stubs(self) -> list[Stub]:
        """Stubs that have ended; the server itself does not notice."""
        return [stub for stub in self._stubs if not is_alive(stub)]

    def load_again(self, model: str) -> None:
        """Have one model loaded anew from the files of this run, beside the others.

        The server goes on using the dead instance, which it never gives up, until the new one is
        loaded; nothing of it is answered before.
        """
        # The time alone is changed, for which there is room on a full disk, too.
        os.utime(self._models / model / _AGAIN)

    def stubs_of(self, model: str) -> list[Stub]:
        """The known stubs of a model, dead ones included."""
        return [stub for stub in self._stubs if stub.model == model]

    def new_stubs(self, model: str) -> bool:
        """True if stubs of a model came up since it was last asked; they are known from now on."""
        known = set(self._stubs)
        new = [stub for stub in stubs_in(self.pid) if stub.model == model and stub not in known]
        self._stubs = (*self._stubs, *new)
        close_regions(self._regions)
        return bool(new)

    def abandon(self, stub: Stub) -> None:
        """Leave a stub that is dead, or should be, and its shared memory behind."""
        self._stubs = tuple(one_stub for one_stub in self._stubs if one_stub != stub)
        if is_alive(stub):
            with suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)
        if stub.region:
            remove_regions(stub.region)

    def ports(self) -> tuple[int, int]:
        """Those that callers use."""
        return self._options.grpc_port, self._options.http_port

    def callers(self) -> int:
        """Number of connections that callers have to this very process."""
        return sum(listeners.connections(port, self.pid) for port in self.ports())

    def stop(self, *, at_once: bool = False) -> None:
        """Let requests in flight finish, then end the server, its stubs and its shared memory."""
        if self._process.poll() is None and not at_once:
            self._process.send_signal(signal.SIGINT)
            self._wait_until_idle()
        self._kill()
        self._metrics_port.close()
        remove_regions(self._regions)
        shutil.rmtree(self._models, ignore_errors=True)

    def _wait_until_idle(self) -> None:
        # Once idle it only unloads models, for seconds, and nothing in them needs that.
        end = time.monotonic() + _EXIT_TIMEOUT_S + 1
        while time.monotonic() < end and self._process.poll() is None:
            if self._idle.wait(0.05):
                time.sleep(_FLUSH_S)
                if self._is_traced:
                    self._wait_spans()
                return

    def _wait_spans(self) -> None:
        """Let the models' processes send their last spans, for as long as that may take them."""
        end = time.monotonic() + CLOSE_S
        while time.monotonic() < end and any(map(is_alive, self._stubs)):
            time.sleep(0.02)

    def _kill(self) -> None:
        # The group's number cannot pass to others while the unreaped server or a stub holds it.
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
    """Arguments of the server; there is no secret among them."""
    restricted = f"{_RESTRICTED}:{CLOSED}"
    words = [
        f"--backend-directory={backends}",
        f"--model-repository={models}",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
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
    """The first words of a command that runs a program with the server's umask and limits."""
    limits = Path(__file__).with_name("process_limits.py")
    return sys.executable, "-IS", str(limits), str(program)


def supervised(arguments: list[str]) -> list[str]:
    """The arguments of a server that is watched, has its models loaded again, and is replaced."""
    ours = {
        # It looks every second whether a model's files have changed and loads it if they have:
        # that needs no key, which every user of the machine could read among the arguments.
        "--model-control-mode": "poll",
        "--repository-poll-secs": "1",
        "--metrics-address": OWN_HOST,
        "--reuse-grpc-port": "true",
        "--reuse-http-port": "true",
        "--grpc-max-connection-age": str(round(CONNECTION_AGE_S * 1000)),
    }
    others = [word for word in arguments if word.partition("=")[0] not in ours]
    return others + [f"{name}={value}" for name, value in ours.items()]


@contextmanager
def writable(folder: Path, variable: str) -> Iterator[None]:
    """Make a folder for what the server writes inside the block, chosen by a variable.

    Raises: SaccadeError where the block cannot write.
    """
    try:
        yield
    except OSError as error:
        # Of a whole tree: all that could not be copied, each as from, to and why.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise SaccadeError(
            f"{folder}: what the server needs cannot be written there ({why}). Make room, or set "
            f"{variable} to another folder."
        ) from error


def backend_folder(installation: Installation, folder: Path) -> Path:
    """The server's own backends where they run ONNX files, else a copy in which ours does."""
    if installation.has_onnxruntime:
        return installation.backends
    if folder.exists():
        return folder
    # Copies: the server refuses a backend library that is a link out of its folder.
    python = shutil.copytree(
        installation.backends / "python",
        folder / "python",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copyfile(installation.stub, python / STUB)
    (python / STUB).chmod(0o755)
    (folder / "onnxruntime").mkdir()
    for name, source in backend_code().items():
        (folder / "onnxruntime" / name).write_bytes(source)
    return folder


def backend_code() -> dict[str, bytes]:
    """The files of our own onnxruntime backend by name; one is the router's too."""
    package = resources.files("saccade.model_repository")
    own = [file for file in (package / "onnxruntime_backend").iterdir() if file.name[-3:] == ".py"]
    files = (*own, package / "router" / FILE)
    return {file.name: file.read_bytes() for file in sorted(files, key=lambda file: file.name)}
