# SPDX-License-Identifier: Apache-2.0
"""One process of the server: its folders, its arguments, its stubs, its start and its end."""

import http.client
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from saccade.plugins.errors import SaccadeError, ServerFailed
from saccade.serving.addresses import ServeOptions, address
from saccade.serving.installation import STUB, Installation
from saccade.serving.needs import Needs
from saccade.serving.run_folder import RunFolder, remove_regions
from saccade.serving.server_log import ServerLog

_RESTRICTED = "shared-memory,model-repository,logging,trace"
_EXIT_TIMEOUT_S = 5
_FLUSH_S = 0.2


@dataclass(frozen=True)
class Stub:
    """The process in which one Python model runs; `started` tells it from a later one."""

    pid: int
    started: int
    model: str


class ServerProcess:
    """A server that was started on a repository and is stopped at the end, by force if need be."""

    def __init__(
        self,
        installation: Installation,
        repository: Path,
        options: ServeOptions,
        folder: RunFolder,
        log: ServerLog,
        needs: Needs,
    ) -> None:
        self._options = options
        self._log = log
        self._regions = f"{folder.path.name}-{secrets.token_hex(3)}-"
        self._stubs: tuple[Stub, ...] = ()
        models = folder.path / "models"
        with writable(folder.path, "TMPDIR"):
            backends = backend_folder(installation, folder.path / "backends")
            link_repository(repository, models)
        arguments = server_arguments(options, backends, models, self._regions) + needs.arguments
        leash = Path(__file__).with_name("leash.py")
        self._process = subprocess.Popen(
            [sys.executable, "-IS", leash, str(os.getpid()), installation.binary, *arguments],
            env=installation.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C must not reach it before us
        )
        assert self._process.stdout is not None
        self._reader = log.follow(self._process.stdout)

    @property
    def pid(self) -> int:
        """The server's process id, by which it also leads its process group."""
        return self._process.pid

    def loaded(self) -> bool:
        """Whether the server says that every model is loaded."""
        options = self._options
        place = address(options.host, options.http_port)
        connection = http.client.HTTPConnection(place, timeout=1)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def find_stubs(self) -> tuple[Stub, ...]:
        """Look up the stubs; from now on `dead_stubs` knows them."""
        self._stubs = tuple(_stubs_in(self.pid))
        return self._stubs

    @property
    def stubs(self) -> tuple[Stub, ...]:
        """The stubs as `find_stubs` saw them."""
        return self._stubs

    def exit_text(self) -> str | None:
        """How the server ended, None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def dead_stubs(self) -> list[Stub]:
        """Stubs that have ended; the server itself does not notice."""
        return [stub for stub in self._stubs if _started(stub.pid) != stub.started]

    def stop(self, *, at_once: bool = False) -> None:
        """Let requests in flight finish, then end the server, its stubs and its shared memory."""
        if self._process.poll() is None and not at_once:
            self._process.send_signal(signal.SIGINT)
            self._wait_until_idle()
        self._kill()
        remove_regions(self._regions)

    def _wait_until_idle(self) -> None:
        # Once idle it only unloads models, for seconds, and nothing in them needs that.
        end = time.monotonic() + _EXIT_TIMEOUT_S + 1
        while time.monotonic() < end and self._process.poll() is None:
            if self._log.idle.wait(0.05):
                time.sleep(_FLUSH_S)
                return

    def _kill(self) -> None:
        # The group's number cannot pass to others while the unreaped server or a stub holds it.
        stubs = _stubs_in(self.pid)
        if stubs or self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for stub in stubs:
            _wait_gone(stub)
        self._reader.join(timeout=2)


def server_arguments(
    options: ServeOptions, backends: Path, models: Path, regions: str
) -> list[str]:
    """What the server is told, secrets of this run included."""
    restricted = f"{_RESTRICTED}:x-saccade-admin={secrets.token_hex(16)}"
    return [
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


@contextmanager
def writable(folder: Path, variable: str) -> Iterator[None]:
    """What the server needs is written inside the block, in a folder that a variable chooses.

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
    source = resources.files("saccade.model_repository") / "onnxruntime_backend"
    for file in source.iterdir():
        if file.name.endswith(".py"):
            (folder / "onnxruntime" / file.name).write_bytes(file.read_bytes())
    return folder


def link_repository(repository: Path, folder: Path) -> None:
    """The repository as links, so that Python's caches do not land beside hashed files."""
    shutil.rmtree(folder, ignore_errors=True)
    source = repository.resolve()
    # Only folders are models; what lies beside them describes the repository.
    for path in source.glob("*/**/*"):
        if path.is_file() and "__pycache__" not in path.parts:
            link = folder / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def _stubs_in(group: int) -> list[Stub]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, IndexError):
            fields = _stat(int(entry.name))
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if int(fields[2]) == group and words[0].endswith(STUB.encode()):
                found.append(Stub(int(entry.name), int(fields[19]), _model_of(words)))
    return found


def _model_of(words: list[bytes]) -> str:
    # Among the stub's arguments is the instance: `nac-b0250-fp32_0_0`.
    for word in words[2:]:
        instance = re.fullmatch(r"([a-z0-9-]+)_\d+_\d+", word.decode(errors="replace"))
        if instance:
            return instance[1]
    return ""


def _stat(pid: int) -> list[str]:
    # The name in parentheses may itself hold spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _started(pid: int) -> int | None:
    """When the living process `pid` began, in clock ticks; None if it is gone or a zombie."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _wait_gone(stub: Stub) -> None:
    end = time.monotonic() + 3
    while _started(stub.pid) == stub.started:
        if time.monotonic() > end:
            raise ServerFailed(f"Process {stub.pid} of model {stub.model} does not end.")
        time.sleep(0.01)
