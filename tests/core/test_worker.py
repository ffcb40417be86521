# SPDX-License-Identifier: Apache-2.0
"""A worker is held to its limits by the system, and its parent hears how it ended."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from saccade.worker import Limits, Worker

WORK = """
import os, resource, sys, time
def main(request, say):
    print("a library says something")
    say({"limits": [resource.getrlimit(resource.RLIMIT_CORE)[1], os.nice(0)]})
    exec(request["code"], {"say": say})
"""


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, Limits], Worker]]:
    """Starts a worker that runs a piece of code, once it has said its first message."""
    (tmp_path / "chores.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started: list[Worker] = []

    def run(code: str, limits: Limits) -> Worker:
        worker = Worker("chores", {"code": code}, limits)
        started.append(worker)
        assert worker.receive(120) == {"limits": [0, limits.niceness]}
        return worker

    yield run
    for worker in started:
        worker.close()


def test_says_what_it_likes_and_ends(start: Callable[[str, Limits], Worker]) -> None:
    worker = start("print('noise'); say({'a': [1]}); import sys; sys.exit(7)", Limits(niceness=3))
    assert [worker.receive(120), worker.receive(120)] == [{"a": [1]}, None]
    assert worker.ending() == "exit code 7"


ENDS: dict[str, tuple[str, Limits, str]] = {
    "time": ("while True: pass", Limits(cpu_s=1), "more than 1 s of CPU time"),
    "a signal": ("import os; os.kill(os.getpid(), 11)", Limits(), "killed by SIGSEGV"),
    "memory": (
        "try:\n bytearray(2**30)\nexcept MemoryError: sys = __import__('sys'); sys.exit(9)",
        Limits(memory_bytes=2**30),
        "exit code 9",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_parent_hears_how_it_ended(name: str, start: Callable[[str, Limits], Worker]) -> None:
    code, limits, said = ENDS[name]
    worker = start(code, limits)
    assert worker.receive(120) is None
    assert worker.ending() == said


def test_time_is_counted_from_the_last_message(start: Callable[[str, Limits], Worker]) -> None:
    turn = "end = time.process_time() + 0.7\nwhile time.process_time() < end: pass\n"
    code = "import time\n" + f"{turn}say({{'turn': 1}})\n" * 4
    worker = start(code, Limits(cpu_s=1))
    messages: list[Any] = [worker.receive(120) for _ in range(5)]
    assert messages == [{"turn": 1}] * 4 + [None] and worker.ending() == "exit code 0"


def test_silence_is_an_error_and_close_ends_it(start: Callable[[str, Limits], Worker]) -> None:
    worker = start("import time; time.sleep(1000)", Limits())
    with pytest.raises(TimeoutError), closing(worker):
        worker.receive(0.05)
    assert worker.ending() == "killed by SIGKILL"
