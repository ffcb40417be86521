# SPDX-License-Identifier: Apache-2.0
"""`saccade serve` as a process: signals end it cleanly at any stage, and nothing outlives it."""

import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from chaos.processes import below, command_of, process
from tiny_artefacts import rehash
from tritonclient.grpc import InferenceServerClient, InferInput

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


def gone(pids: set[int]) -> bool:
    return not any(map(process, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_while_starting_leaves_nothing(
    number, needs_server, hand_made, leavings, eventually
):
    child = run_serve(hand_made(initialize="time.sleep(1000)"))
    eventually(lambda: len(below({child.pid})) >= 4 and leavings(), 20)
    pids = below({child.pid})
    child.send_signal(number)
    _, error = child.communicate(timeout=LONG_S)
    assert child.returncode not in (0, None)
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
        eventually(lambda: len(below({pid})) >= 4 and leavings(), 20)
        pids = below({pid})
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
    child = run_serve(hand_made())
    seen = read_to(child, "ready: http")
    pids = below({child.pid})
    assert len(pids) == 5  # this process, the server, two models, and what cleans up after all
    assert len(leavings()) == 3  # the folder, and shared memory of two models
    child.send_signal(signal.SIGHUP)
    # What was made by hand has no manifests, so that it is found unfit.
    text = "".join(read_to(child, "still served."))
    assert "The update failed" in text and "not ready to serve" in text
    assert pids <= below({child.pid})
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=LONG_S)
    assert child.returncode == 0, error
    assert "Traceback" not in error
    assert any("m-b1000-fp32" in line for line in seen)
    assert not any("HTTP" in line for line in seen)  # off by default
    assert any("MemoryMax" in line for line in seen)  # what stays open is said
    assert gone(pids) and not leavings()


WAITS = """if pb.get_input_tensor_by_name(requests[0], "image").as_numpy().any():
            open({place!r}, "w").close()
            time.sleep(3)
"""


@pytest.mark.parametrize(
    ("number", "instances"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)]
)
def test_a_call_straight_to_a_variant_is_answered_before_the_end(
    number, instances, needs_server, hand_made, tmp_path, eventually
):
    runs = tmp_path / "runs"
    repository = hand_made(execute=WAITS.format(place=str(runs)))
    config = repository / "m-b1000-fp32" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", f"count: {instances}"))
    rehash(repository)
    child = run_serve(repository)
    url = url_in(read_to(child, "gRPC ")[-1])
    read_to(child, "ready: http")
    given = InferInput("image", [1, 2], "UINT8")
    given.set_data_from_numpy(np.ones((1, 2), np.uint8))
    with ThreadPoolExecutor() as pool, InferenceServerClient(url) as caller:
        call = pool.submit(caller.infer, "m-b1000-fp32", [given])
        eventually(runs.exists, 5)
        child.send_signal(number)
        assert call.result(LONG_S).as_numpy("logits").shape == (1, 2)
    _, error = child.communicate(timeout=LONG_S)
    assert child.returncode == 0, error


@pytest.mark.parametrize("victim", ["serve", "reaper first"])
def test_nothing_outlives_a_killed_supervisor(
    victim, needs_server, small_repository, leavings, eventually, load
):
    child = run_serve(small_repository)
    where = SimpleNamespace(url=url_in(read_to(child, "gRPC ")[-1]), model="tiny")
    read_to(child, "ready: http")
    with load(where, 1.0, 0.5, timeout_s=1) as calls:
        eventually(lambda: len(calls[0.5].errors) > 20, 10)
        if victim == "reaper first":
            before = reapers(child.pid)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: reapers(child.pid) - before, 5)
            assert not any(calls[1.0].errors + calls[0.5].errors)
        pids = below({child.pid})
        assert len(pids) == 6 and leavings()
        child.kill()
        child.wait()
        eventually(lambda: gone(pids) and not leavings(), KILLED_S)
    child.communicate(timeout=LONG_S)


def reapers(pid: int) -> set[int]:
    return {each for each in below({pid}) if "reaper" in command_of(each)}


def read_to(child: "subprocess.Popen[str]", text: str) -> list[str]:
    """The lines up to the first that holds `text`."""
    lines = []
    for line in child.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def url_in(line: str) -> str:
    return line.partition("gRPC ")[2].split()[0]
