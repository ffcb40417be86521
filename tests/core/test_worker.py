# SPDX-License-Identifier: Apache-2.0
"""A worker answers with values or errors, is held to its limits, and its parent hears its end."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from saccade.core.errors import Damaged, GateFailed, SaccadeError
from saccade.core.schema import typed
from saccade.core.worker import Limits, Program, Worker, WorkerEnded, WorkRefused, each_alone

WORK = """
import os, resource, sys, time
from dataclasses import dataclass
from saccade.core.errors import Damaged, GateFailed

@dataclass(frozen=True)
class Task:
    code: str
    data: tuple[bytes, ...] = ()

def main(task: Task) -> dict[str, object]:
    print("a library says something")
    found = {"data": task.data}
    exec(task.code, globals(), found)
    del found["data"]
    return found
"""
# The file that `Program` runs: it answers the first request, then refuses.
PROGRAM = """
import json, os, sys
def tell(*line): print(json.dumps(line), flush=True)
tell("ready", None)
while size := sys.stdin.buffer.readline():
    tell("said", os.getcwd())
    request = json.loads(sys.stdin.buffer.read(int(size)))
    tell("answer", {request: os.environ["ONLY"]}) if request else tell("error", ["disk", "is full"])
"""


@dataclass(frozen=True)
class Task:
    code: str
    data: tuple[bytes, ...] = ()


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Limits | None], Worker]]:
    """Makes a worker that runs pieces of code."""
    (tmp_path / "chores.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[Worker] = []

    def make(limits: Limits | None = None) -> Worker:
        made.append(Worker("chores", limits))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def ask(worker: Worker, code: str, *data: bytes, timeout_s: float = 120) -> dict[str, Any]:
    return worker.ask(Task(code, data), dict[str, Any], timeout_s)


def test_answers_request_after_request_in_one_process(start: Callable[..., Worker]) -> None:
    worker = start(Limits(niceness=3))
    code = "x = [resource.getrlimit(resource.RLIMIT_CORE)[1], os.nice(0)]; pid = os.getpid()"
    found = ask(worker, code)
    assert found["x"] == [0, min(19, os.nice(0) + 3)]
    assert ask(worker, "pid = os.getpid()") == {"pid": found["pid"]}
    given = b"\x00\n\xff", b"", b"x" * 200_000  # more than a pipe holds
    sums = ask(worker, "y = [len(each) for each in data]; z = data[0] == b'\\x00\\n\\xff'", *given)
    assert sums == {"y": [3, 0, 200_000], "z": True}


def test_errors_of_the_work_are_raised_and_end_nothing(start: Callable[..., Worker]) -> None:
    worker = start()
    pid = ask(worker, "pid = os.getpid()")
    with pytest.raises(GateFailed, match=r"^it says no$"):
        ask(worker, "raise GateFailed('it says no')")
    with pytest.raises(GateFailed, match=r"^so does a kind of it$"):
        ask(worker, "raise type('Own', (GateFailed,), {})('so does a kind of it')")
    with pytest.raises(Damaged, match=r"^a\.bin: is empty\. Copy it again .* with: saccade train$"):
        ask(worker, "raise Damaged('a.bin', 'is empty', 'saccade train')")
    assert ask(worker, "pid = os.getpid()") == pid
    with pytest.raises(WorkerEnded, match="exit code 1") as ended:
        ask(worker, "1 / 0")
    assert ended.value.last_words == "a library says something ZeroDivisionError: division by zero"


ENDS: dict[str, tuple[str, Limits, str]] = {
    "time": ("while True: pass", Limits(cpu_s=1), "more than 1 s of CPU time"),
    "a signal": ("os.kill(os.getpid(), 11)", Limits(), "killed by SIGSEGV"),
    "leaving": ("os._exit(0)", Limits(), "exit code 0"),
    "memory": (
        "try:\n bytearray(2**30)\nexcept MemoryError: sys.exit(9)",
        Limits(memory_bytes=2**30),
        "exit code 9",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_parent_hears_how_it_ended_and_the_next_request_has_another(
    name: str, start: Callable[..., Worker]
) -> None:
    code, limits, said = ENDS[name]
    worker = start(limits)
    with pytest.raises(WorkerEnded, match=f"^{said}$"):
        ask(worker, code)
    assert ask(worker, "x = 1") == {"x": 1}


def test_time_is_counted_for_each_request(start: Callable[..., Worker]) -> None:
    worker = start(Limits(cpu_s=1))
    code = (
        "pid, end = os.getpid(), time.process_time() + 0.7\nwhile time.process_time() < end: pass"
    )
    assert len({ask(worker, code)["pid"] for _ in range(4)}) == 1


def test_silence_is_an_error_and_ends_it(start: Callable[..., Worker]) -> None:
    worker = start()
    pid = ask(worker, "pid = os.getpid()")["pid"]
    with pytest.raises(WorkerEnded, match=r"^no answer within 0\.05 s$"):
        ask(worker, "time.sleep(1000)", timeout_s=0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_cannot_start_is_no_end_of_the_work(start: Callable[..., Worker]) -> None:
    with pytest.raises(SaccadeError, match=r"before it started to work .*No module named 'none'"):
        Worker("none").ask({}, dict)


@pytest.mark.parametrize("line", ["[1, 2", "3", '["error", 4]'])
def test_what_a_library_writes_among_the_answers_is_none(
    line: str, start: Callable[..., Worker]
) -> None:
    with pytest.raises(WorkerEnded, match="an answer that cannot be read"):
        ask(start(), f"os.write(3, b'{line}\\n')")  # where the answers are written


def test_several_at_a_time_and_none_is_left(start: Callable[..., Worker], tmp_path: Path) -> None:
    start()
    tasks = {
        "fine": Task("x = 1"),
        "refused": Task("raise GateFailed('no')"),
        "dead": Task("os.abort()"),
    }
    found = dict(each_alone("chores", tasks, dict[str, Any], at_a_time=2))
    assert found.pop("fine") == {"x": 1}
    assert {name: (type(each), str(each)) for name, each in found.items()} == {
        "refused": (GateFailed, "no"),
        "dead": (WorkerEnded, "killed by SIGABRT"),
    }
    mark = tmp_path / "pid"
    hangs = Task(f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(1000)")
    slow = Task(f"while not os.path.exists({str(mark)!r}): time.sleep(0.01)")
    running = each_alone("chores", {"slow": slow, "hangs": hangs}, dict, at_a_time=2)
    assert next(running)[0] == "slow"
    running.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_program_that_imports_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    heard: list[str] = []
    program = Program(tmp_path / "program.py", tmp_path, {"ONLY": "this"})
    with Worker(program) as worker:
        assert worker.ask("one", dict, 120, heard.append) == {"one": "this"}
        with pytest.raises(WorkRefused, match="is full") as refused:
            worker.ask("", dict, 120)
    assert (refused.value.kind, heard) == ("disk", [str(tmp_path)])


_PARENT = """
import sys, threading
from saccade.core.worker import Worker
code = f"open({sys.argv[1]!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
worker = Worker("chores")
worker.send({"code": code, "data": []})
threading.Event().wait()
"""


def test_dies_with_its_parent(start: Callable[..., Worker], tmp_path: Path) -> None:
    start()
    told = tmp_path / "pid"
    os.mkfifo(told)
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(told)])
    worker = os.pidfd_open(int(told.read_text()))
    assert select.select([worker], [], [], 0)[0] == []
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert select.select([worker], [], [], 120)[0] == [worker]
    os.close(worker)


def test_words_of_a_choice_are_checked() -> None:
    kind = Literal["passed", "failed"] | None
    assert [typed(kind, each, "") for each in ("failed", None)] == ["failed", None]
    with pytest.raises(SaccadeError, match=r"^verdict: found 'fine', expected one of passed"):
        typed(kind, "fine", "verdict: ")
