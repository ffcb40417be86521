# SPDX-License-Identifier: Apache-2.0
"""`saccade serve` as a process: signals end it cleanly at any stage, and nothing outlives it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.serving.run_folder import RunFolder

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
SERVE = (
    "import sys; from saccade.serving.server import ServeOptions, serve;"
    f"sys.exit(serve(sys.argv[1], ServeOptions(**{FREE_PORTS})))"
)


def run_serve(repository: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, repository],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def descendants(pid: int) -> set[int]:
    """Processes below `pid`, itself included."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def program_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].rpartition("/")[2]


def gone(pids: set[int]) -> bool:
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                return False
        except OSError:
            continue
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_while_starting_leaves_nothing(
    number, needs_server, hand_made, leavings, eventually
):
    process = run_serve(hand_made(initialize="time.sleep(1000)"))
    eventually(lambda: len(descendants(process.pid)) >= 3 and leavings(), 20)
    pids = descendants(process.pid)
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in error  # `saccade serve` turns it into exit code 130
    assert gone(pids) and not leavings()


def test_serve_announces_itself_and_ends_cleanly(needs_server, hand_made, leavings):
    process = run_serve(hand_made())
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "ready: http" in line:
            break
    pids = descendants(process.pid)
    assert len(pids) == 4  # this process, the server, two models
    assert len(leavings()) == 3  # the folder, and shared memory of two models
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=15)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    assert any("m-b1000-fp32" in line for line in seen)
    assert not any("HTTP" in line for line in seen)  # off by default
    assert any("MemoryMax" in line for line in seen)  # what stays open is said
    assert gone(pids) and not leavings()


def test_killed_supervisor_takes_the_server_with_it(needs_server, hand_made, leavings, eventually):
    process = run_serve(hand_made())
    while "ready: http" not in process.stderr.readline():
        assert process.poll() is None
    pids = descendants(process.pid)
    running = next(pid for pid in pids if "tritonserver" in program_of(pid))
    assert leavings()
    process.kill()
    process.communicate(timeout=10)
    eventually(lambda: gone({running}), 2)
    with RunFolder():
        pass  # the next run removes what the killed one could not
    assert not leavings()
    eventually(lambda: gone(pids), 2)
