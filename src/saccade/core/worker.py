# SPDX-License-Identifier: Apache-2.0
"""A separate process for work that may crash, hang or use up all memory.

A `Worker` calls a module's `main(request)` in a new interpreter and returns its result. Both are
JSON of the types that `main` is annotated with. A SaccadeError raised by `main` is raised here. If
the process exits instead, `WorkerEnded` is raised, and the next request gets a new process. The
worker dies with its parent. Its limits are enforced by the system: no library inside the process
can lift them.

The parent writes a line with sizes, then the request and the bytes that belong to it. The worker
writes lines of `[kind, content]`: ready (for a request), said (on the way), answer, or error.
"""

import json
import math
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self, TypeVar, get_type_hints

from saccade.core import errors
from saccade.core.die_with_parent import dying_with_parent
from saccade.core.errors import SaccadeError
from saccade.core.schema import typed

START_S = 120.0  # a busy machine may need this long to start Python and import modules
_KEPT_LINES = 2
_KEPT_CHARACTERS = 400
_OF_A_TRACE = (" ", "\t", "Traceback")
_POLL_S = 0.05
_BYTES = "$bytes"  # placeholder in a request: the index of the bytes that follow it

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits of a worker; None means no limit. With a niceness, other processes go first.

    Units: memory is the size of its address space; cpu_s is the CPU time for one request.
    """

    memory_bytes: int | None = None
    cpu_s: int | None = None
    niceness: int = 0


class WorkerEnded(Exception):
    """The process ended before it answered; `last_words` is what it wrote to standard error."""

    def __init__(self, how: str, last_words: str) -> None:
        super().__init__(how)
        self.last_words = last_words


class WorkerNotStarted(SaccadeError):
    """The process exited, or did not respond, before it could take a request."""


class WorkRefused(Exception):
    """Refusal by a program that does not know SaccadeError and has its own kinds of errors."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Program:
    """A file that uses the worker protocol without importing saccade, and how to run it."""

    path: Path
    folder: Path
    environment: Mapping[str, str]


class Worker:
    """A process that answers one request after the other: a module's `main`, or a program."""

    def __init__(
        self,
        work: str | Program,
        limits: Limits | None = None,
        environment: Mapping[str, str] | None = None,  # additional variables, for a module
    ) -> None:
        self._work = work
        self._limits = limits or Limits()
        self._environment = environment or {}
        self._process: _Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self,
        request: Any,
        kind: type[T],
        timeout_s: float | None = None,
        said: Callable[[Any], None] | None = None,
    ) -> T:
        """Send a request and return the answer; call `said` with messages that come before it.

        Raises: WorkerEnded if the process exits or does not answer in time; errors of the work.
        """
        self.send(request)
        return self.answer(kind, timeout_s, said)

    def send(self, request: Any) -> None:
        """Send a request, to a new process if there is none."""
        if self._process is None:
            self._process = self._started()
        with suppress(BrokenPipeError):  # it died: `answer` finds the end of its output
            _write(self._process.stdin, request)

    @property
    def has_answered(self) -> bool:
        """True if `answer` would return immediately."""
        return self._process is not None and not self._process.lines.empty()

    def answer(
        self,
        kind: type[T],
        timeout_s: float | None = None,
        said: Callable[[Any], None] | None = None,
    ) -> T:
        """Return the answer to the request that was sent.

        Raises: as `ask`.
        """
        assert self._process is not None, "nothing was sent"
        if not self._process.is_up.wait(START_S):
            raise self._ended(f"no response within {START_S:g} s")
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            wait_s = None if end is None else max(0.0, end - time.monotonic())
            try:
                line = self._process.lines.get(timeout=wait_s)
            except queue.Empty:
                raise self._ended(f"no answer within {timeout_s:g} s") from None
            if line is None:
                raise self._ended(None)
            try:
                what, content = json.loads(line)
                failed = _error(*content) if what == "error" else None
            except (ValueError, TypeError):
                raise self._ended("an answer that cannot be read") from None
            if failed is not None:
                raise failed
            if what == "answer":
                answer: T = typed(kind, content, "the answer of a worker: ")
                return answer
            if said is not None:
                said(content)

    def close(self) -> None:
        """Stop the process if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _ended(self, how: str | None) -> WorkerEnded | SaccadeError:
        """Stop the process and return the error to raise for it."""
        process = self._process
        assert process is not None
        how = how or process.ending(self._limits)
        self.close()
        if process.was_ready:
            return WorkerEnded(how, process.last_words)
        return WorkerNotStarted(
            f"A saccade process exited before it started to work ({how}). {process.last_words} "
            "Try again."
        )

    def _started(self) -> "_Process":
        if isinstance(self._work, Program):
            command, folder = [str(self._work.path)], self._work.folder
            return _Process(command, folder, self._work.environment)
        task = json.dumps({"module": self._work, **asdict(self._limits)})
        # Workers share the cores, so more threads in each would wait for each other.
        usual = {"OMP_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}
        environment = {**os.environ, **usual, **self._environment}
        return _Process(["-m", "saccade.core.worker", task], None, environment)


def each_alone(
    module: str, requests: Mapping[str, Any], kind: type[T], *, at_a_time: int
) -> Iterator[tuple[str, T | SaccadeError | WorkerEnded]]:
    """Run each request in its own worker, `at_a_time` in parallel; yield results as they finish.

    The workers are stopped when the caller stops iterating.
    """
    waiting = list(requests.items())
    running: dict[str, Worker] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                key, request = waiting.pop(0)
                running[key] = Worker(module)
                running[key].send(request)
            ended = [key for key, worker in running.items() if worker.has_answered]
            for key in ended:
                with running.pop(key) as worker:
                    yield key, _outcome(worker, kind)
            if not ended:
                time.sleep(_POLL_S)
    finally:
        for worker in running.values():
            worker.close()


def _outcome(worker: Worker, kind: type[T]) -> T | SaccadeError | WorkerEnded:
    try:
        return worker.answer(kind)
    except (SaccadeError, WorkerEnded) as error:
        return error


@dataclass
class _Process:
    """The parent's end of one process, and the threads that read what it writes."""

    arguments: list[str]
    folder: Path | None
    environment: Mapping[str, str]
    lines: "queue.SimpleQueue[str | None]" = field(default_factory=queue.SimpleQueue)
    is_up: threading.Event = field(default_factory=threading.Event)  # ready, or exited
    was_ready: bool = False
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A separate session: Ctrl-C reaches only the parent, which then stops this process.
        self._popen = subprocess.Popen(
            dying_with_parent([sys.executable, "-P", *self.arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=self.environment,
            start_new_session=True,
        )
        assert self._popen.stdin and self._popen.stdout and self._popen.stderr
        self.stdin = self._popen.stdin
        self._readers = [
            threading.Thread(target=self._read, args=(self._popen.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(self._popen.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def last_words(self) -> str:
        """Return the end of what it wrote to standard error."""
        return " ".join(self.errors)

    def ending(self, limits: Limits) -> str:
        """Describe how the process ended, after its output has closed."""
        try:
            code = self._popen.wait(START_S)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        if code >= 0:
            return f"exit code {code}"
        if -code == signal.SIGXCPU:
            return f"more than {limits.cpu_s} s of CPU time"
        return f"killed by {signal.Signals(-code).name}"

    def end(self) -> None:
        """Kill the process if it is still running, and read the rest of its output."""
        self._popen.kill()
        self._popen.wait()
        for reader in self._readers:
            reader.join(timeout=5)

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace")
            if text.startswith('["ready"'):
                self.was_ready = True
                self.is_up.set()
            else:
                self.lines.put(text)
        self.lines.put(None)
        self.is_up.set()

    def _listen(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip()[:_KEPT_CHARACTERS]
            if text and not text.startswith(_OF_A_TRACE):
                self.errors = [*self.errors[1 - _KEPT_LINES :], text]


def _error(kind: str, *arguments: str) -> Exception:
    kind_of_error = getattr(errors, kind, None)
    if isinstance(kind_of_error, type) and issubclass(kind_of_error, SaccadeError):
        return kind_of_error(*arguments)
    return WorkRefused(kind, *arguments)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _write(stream: IO[bytes], request: Any) -> None:
    attached: list[bytes] = []

    def plain(value: Any) -> dict[str, Any]:
        if not isinstance(value, bytes):
            return _fields(value)
        attached.append(value)
        return {_BYTES: len(attached) - 1}

    parts = [json.dumps(request, default=plain).encode(), *attached]
    for part in parts:
        stream.write(b"%d " % len(part))
    stream.write(b"\n")
    for part in parts:
        stream.write(part)
    stream.flush()


def _requests(stream: IO[bytes]) -> Iterator[Any]:
    while line := stream.readline():
        text, *attached = [stream.read(int(size)) for size in line.split()]

        def with_bytes(content: dict[str, Any], held: list[bytes] = attached) -> Any:
            return held[content[_BYTES]] if content.keys() == {_BYTES} else content

        yield json.loads(text, object_hook=with_bytes)


_TELL: ContextVar[Callable[[str, Any], None] | None] = ContextVar("saccade_worker", default=None)


def say(content: Any) -> None:
    """Send a message to the process that asked, before the answer; elsewhere nothing happens."""
    if (tell := _TELL.get()) is not None:
        tell("said", content)


def main() -> None:
    """Answer the parent's requests until there are no more."""
    task = json.loads(sys.argv[1])
    os.nice(task["niceness"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (most := task["memory_bytes"]) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # Loaded code may print, so keep only messages in the stream that the parent reads.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(what: str, content: Any) -> None:
        print(json.dumps([what, content], default=_fields), file=lines)
        _allow(task["cpu_s"])

    work = import_module(task["module"]).main
    takes = next(iter(get_type_hints(work).values()))
    # This module runs as `__main__`; the work imports it by its name.
    import_module("saccade.core.worker")._TELL.set(tell)
    tell("ready", None)
    for request in _requests(sys.stdin.buffer):
        try:
            tell("answer", work(typed(takes, request, "the request to a worker: ")))
        except SaccadeError as error:
            known = (base for base in type(error).__mro__ if base.__module__ == errors.__name__)
            tell("error", [next(known).__name__, *error.args])


def _allow(cpu_s: int | None) -> None:
    if cpu_s is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
