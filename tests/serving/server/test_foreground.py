# SPDX-License-Identifier: Apache-2.0
"""`saccade serve` as a process: signals end it cleanly at any stage, and nothing outlives it."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
KILLED_S = 2  # what docs/serving.md promises
LONG_S = 300
SERVE = (
    "import sys; from saccade.serving.server.serve import ServeOptions, serve;"
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
    pids, size = {pid}, 0
    while len(pids) > size:
        size = len(pids)
        pids |= {child for child, parent in parents.items() if parent in pids}
    return pids


def gone(pids: set[int]) -> bool:
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                return False
        except OSError:
            continue
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_while_starting_leaves_nothing(
    number, needs_server, hand_made, leavings, eventually
):
    process = run_serve(hand_made(initialize="time.sleep(1000)"))
    eventually(lambda: len(descendants(process.pid)) >= 4 and leavings(), 20)
    pids = descendants(process.pid)
    process.send_signal(number)
    _, error = process.communicate(timeout=LONG_S)
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in error  # `saccade serve` turns it into exit code 130
    assert gone(pids) and not leavings()


def test_a_terminal_that_is_closed_ends_it(needs_server, hand_made, leavings, eventually):
    # The system says so by SIGHUP as well, which else means: read the repository again.
    repository = hand_made(initialize="time.sleep(1000)")
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
        os.execv(sys.executable, [sys.executable, "-c", SERVE, str(repository)])
    try:
        eventually(lambda: len(descendants(pid)) >= 4 and leavings(), 20)
        pids = descendants(pid)
        os.kill(pid, signal.SIGHUP)  # while the terminal is there
        eventually(lambda: b"still starting" in os.read(terminal, 4096), 10)
        assert not gone({pid})
    finally:
        os.close(terminal)
    eventually(lambda: os.waitpid(pid, os.WNOHANG)[0], 60)
    assert gone(pids) and not leavings()


def test_serve_announces_itself_hears_hang_ups_and_ends_cleanly(
    needs_server, hand_made, leavings, eventually
):
    process = run_serve(hand_made())
    seen = read_to(process, "ready: http")
    pids = descendants(process.pid)
    assert len(pids) == 5  # this process, the server, two models, and what cleans up after all
    assert len(leavings()) == 3  # the folder, and shared memory of two models
    process.send_signal(signal.SIGHUP)
    # What was made by hand has no manifests, so that it is found unfit.
    text = "".join(read_to(process, "still served."))
    assert "The update failed" in text and "not ready to serve" in text
    assert pids <= descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    assert any("m-b1000-fp32" in line for line in seen)
    assert not any("HTTP" in line for line in seen)  # off by default
    assert any("MemoryMax" in line for line in seen)  # what stays open is said
    assert gone(pids) and not leavings()


@pytest.mark.parametrize("victim", ["serve", "reaper first"])
def test_nothing_outlives_a_killed_supervisor(
    victim, needs_server, small_repository, leavings, eventually, load
):
    process = run_serve(small_repository)
    where = SimpleNamespace(url=url_in(read_to(process, "gRPC ")[-1]), model="tiny")
    read_to(process, "ready: http")
    with load(where, 1.0, 0.5, timeout_s=1) as calls:
        eventually(lambda: len(calls[0.5].errors) > 20, 10)
        if victim == "reaper first":
            before = reapers(process.pid)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: reapers(process.pid) - before, 5)
            assert not any(calls[1.0].errors + calls[0.5].errors)
        pids = descendants(process.pid)
        assert len(pids) == 6 and leavings()
        process.kill()
        process.wait()
        eventually(lambda: gone(pids) and not leavings(), KILLED_S)
    process.communicate(timeout=LONG_S)


def reapers(pid: int) -> set[int]:
    return {descendant for descendant in descendants(pid) if b"\0reaper\0" in cmdline(descendant)}


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def read_to(process: "subprocess.Popen[str]", text: str) -> list[str]:
    """The lines up to the first that holds `text`."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def url_in(line: str) -> str:
    return line.partition("gRPC ")[2].split()[0]
