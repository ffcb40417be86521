# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping: what is refused before anything starts, and what is left afterwards."""

import dataclasses
import hashlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from saccade.core.errors import MissingPackage, SaccadeError, ServerFailed
from saccade.serving.repository import installation
from saccade.serving.server import process as server_process
from saccade.serving.server import server as server_module
from saccade.serving.server.addresses import with_ports
from saccade.serving.server.process import server_arguments
from saccade.serving.server.serve import serve
from saccade.serving.server.server import ServeOptions, Server

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}


def get(url: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, str]:
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request(method, "/" + path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_ready_url_names_every_variant(server, eventually):
    # Tests of other files share this server; a starved machine may make one probe late.
    answers = []
    eventually(lambda: answers.append(get(server.ready_url)) or answers[-1][0] == 200, 5)
    answer = json.loads(answers[-1][1])
    assert answer["ready"] is True
    assert answer["variants"] == dict.fromkeys(server.variants, True)
    assert len(server.variants) == 4
    description = (server.repository / "saccade.json").read_bytes()
    assert answer["repository"] == hashlib.sha256(description).hexdigest()
    assert get(server.ready_url.replace("/ready", "/secret"))[0] == 404
    assert get(server.metrics_url)[0] == 200


@pytest.mark.parametrize(
    "path", ["repository/index", "systemsharedmemory/region/x/register", "logging", "trace/setting"]
)
def test_administration_is_closed_over_http(server, path):
    name, _, value = server_process.CLOSED.partition("=")
    short = name.partition(":")[0]
    for header in (name, f"{name} ", f'"{name}"', short, f"{short}\\", "x-saccade-admin"):
        head = f"POST /v2/{path} HTTP/1.1\r\nHost: x\r\n{header}: {value}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.options.http_port), 10) as raw:
            raw.sendall(head.encode())
            said = raw.recv(4096)
        assert said.startswith(b"HTTP/1.1 403 ") and f"header '{name}'".encode() in said


def test_the_repository_stays_as_it_was(server, tiny_repository):
    assert not list(tiny_repository.rglob("__pycache__"))


@pytest.mark.parametrize("option", ["grpc_port", "http_port", "metrics_port", "ready_port"])
def test_taken_port_is_named_before_anything_starts(option, tiny_repository, monkeypatch):
    monkeypatch.setattr(server_process.subprocess, "Popen", None)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        options = ServeOptions(**{**FREE_PORTS, option: port}, http=True)
        with pytest.raises(SaccadeError, match=str(port)) as error:
            Server(tiny_repository, options).__enter__()
    assert "--" + option.replace("_", "-") in str(error.value)


def test_a_missing_repository_is_named_before_a_taken_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        options = ServeOptions(**{**FREE_PORTS, "grpc_port": holder.getsockname()[1]})
        with pytest.raises(SaccadeError, match="nowhere"):
            Server(tmp_path / "nowhere", options).__enter__()


def test_ports_are_distinct_and_given_ones_kept():
    options = with_ports(ServeOptions(**FREE_PORTS, http=True))
    assert (
        len({options.grpc_port, options.http_port, options.metrics_port, options.ready_port}) == 4
    )
    assert with_ports(options) == options
    with pytest.raises(SaccadeError, match="both"):
        with_ports(dataclasses.replace(options, http_port=options.grpc_port))
    assert with_ports(ServeOptions(host="localhost", **FREE_PORTS)).host == "127.0.0.1"
    for host in ("::1", "no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(SaccadeError, match=f"--host {host}"):
            with_ports(ServeOptions(host=host, **FREE_PORTS))
    with pytest.raises(SaccadeError, match="70000"):
        ServeOptions(grpc_port=70000)
    with pytest.raises(SaccadeError, match="start-timeout-s"):
        ServeOptions(start_timeout_s=0)


def test_http_is_off_unless_asked_for():
    arguments = server_arguments(ServeOptions(), Path("b"), Path("m"), "r-")
    assert "--allow-http=false" in arguments
    assert not any(argument.startswith("--http") for argument in arguments)
    over_http = server_arguments(ServeOptions(http=True), Path("b"), Path("m"), "r-")
    assert {"--http-address=127.0.0.1", "--http-port=8000"} < set(over_http)
    assert with_ports(ServeOptions(**FREE_PORTS)).http_port == 0
    with pytest.raises(SaccadeError, match=r"--http-port 9000: HTTP is off\. Pass --http"):
        with_ports(ServeOptions(**{**FREE_PORTS, "http_port": 9000}))
    with pytest.raises(SaccadeError, match="HTTP is off"):
        _ = Server("nowhere", ServeOptions()).http_url


def test_exposure_needs_consent(tiny_repository):
    options = ServeOptions(host="0.0.0.0", **FREE_PORTS)
    for call in (serve, lambda *given: Server(*given).__enter__()):
        with pytest.raises(SaccadeError, match="--accept-risk") as error:
            call(tiny_repository, options)
        assert "24.10" in str(error.value)
        assert error.value.exit_code == 2


def test_the_bundled_servers_http_stays_on_this_machine(needs_server, tiny_repository):
    options = ServeOptions(host="0.0.0.0", accept_risk=True, http=True, **FREE_PORTS)
    with pytest.raises(SaccadeError, match=r"one request of 150 kB\. Drop --http") as error:
        Server(tiny_repository, options).__enter__()
    assert "--accept-risk" not in str(error.value)


def test_without_http_another_program_may_have_its_port(needs_server, hand_made, eventually):
    ports = {name: 0 for name in FREE_PORTS if name != "http_port"}
    with ExitStack() as stack:
        with suppress(OSError):  # else there is such a program already
            stack.enter_context(socket.create_server(("127.0.0.1", ServeOptions.http_port)))
        server = stack.enter_context(Server(hand_made(), ServeOptions(**ports)))
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: server.restarts == 1 and server.ready(), 10)


@pytest.mark.parametrize("answer, starts", [("y\n", True), ("n\n", False), ("", False)])
def test_consent_is_asked_on_a_terminal(answer, starts, needs_server, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    options = ServeOptions(host="0.0.0.0", **FREE_PORTS)
    # With consent it goes on, to a repository that is not there.
    with pytest.raises(SaccadeError, match="no-such-folder" if starts else "--accept-risk"):
        serve("no-such-folder", options)
    assert "24.10" in capsys.readouterr().err


def test_missing_server_names_the_pip_command(tiny_repository, monkeypatch, tmp_path):
    monkeypatch.setattr(installation.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackage, match=r"pip install '\S+\[serve\]'"):
        Server(tiny_repository, ServeOptions(**FREE_PORTS)).__enter__()


@pytest.mark.parametrize(
    "name, value, words",
    [("glibc_version", lambda: (2, 31), "2.31"), ("glibc_version", lambda: None, "no glibc")],
)
def test_old_system_can_still_call(monkeypatch, name, value, words):
    monkeypatch.setattr(installation, name, value)
    with pytest.raises(SaccadeError, match=words) as error:
        installation.find_installation()
    assert "2.35" in str(error.value) and "export" in str(error.value)


def test_missing_libpython_is_found_before_the_server_hangs(
    needs_server, tiny_repository, monkeypatch, tmp_path
):
    # The loader really is asked: for a stub that wants a Python nobody has.
    installed = installation.find_installation()
    wanted = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0".encode()
    stub = tmp_path / "stub"
    stub.write_bytes(installed.stub.read_bytes().replace(wanted, wanted.replace(b"3.1", b"3.9")))
    stub.chmod(0o755)
    broken = dataclasses.replace(installed, stub=stub)
    monkeypatch.setattr(server_module, "find_installation", lambda: broken)
    with pytest.raises(SaccadeError, match=r"libpython3\.9\d\.so\.1\.0 was not found") as error:
        Server(tiny_repository, ServeOptions(**FREE_PORTS)).__enter__()
    assert "apt-get install libpython3" in str(error.value)


def test_numpy_2_is_refused(needs_server, monkeypatch):
    monkeypatch.setattr(installation.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(MissingPackage, match=r"numpy 2\.1\.0.*\S+\[serve\]"):
        installation.check_installation(installation.find_installation())


def test_a_full_disk_is_named(needs_server, hand_made, leavings, monkeypatch):
    def full(*_, **__):
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])

    monkeypatch.setattr(server_process.shutil, "copytree", full)
    with pytest.raises(SaccadeError, match=r"No space left on device.*TMPDIR"):
        Server(hand_made(), ServeOptions(**FREE_PORTS)).__enter__()
    assert not leavings()


def test_server_that_dies_while_starting_shows_its_last_lines(needs_server, hand_made, leavings):
    broken = hand_made(initialize="raise ValueError('the weights are upside down')")
    with pytest.raises(ServerFailed, match="upside down") as error:
        Server(broken, ServeOptions(**FREE_PORTS)).__enter__()
    assert error.value.exit_code == 3
    assert "exit code 1" in str(error.value)
    assert not leavings()


def test_server_that_hangs_while_starting_meets_its_deadline(needs_server, hand_made, leavings):
    hanging = hand_made(initialize="time.sleep(1000)")
    began = time.monotonic()
    with pytest.raises(ServerFailed, match="--start-timeout-s") as error:
        Server(hanging, ServeOptions(start_timeout_s=1.5, **FREE_PORTS)).__enter__()
    assert time.monotonic() - began < 100  # of the 1,000 that it would take
    assert "without progress, expected at most 1.5" in str(error.value)
    assert not leavings()


def test_port_lost_between_choice_and_start_is_chosen_again(needs_server, hand_made, monkeypatch):
    choices = []
    with socket.create_server(("127.0.0.1", 0)) as holder:

        def choose(options):
            chosen = with_ports(options)
            if not choices:
                chosen = dataclasses.replace(chosen, grpc_port=holder.getsockname()[1])
            choices.append(chosen.grpc_port)
            return chosen

        monkeypatch.setattr(server_module, "with_ports", choose)
        with Server(hand_made(), ServeOptions(**FREE_PORTS)) as server:
            assert server.ready()
    assert len(choices) == 2


def test_models_are_compiled_where_the_server_looks(tmp_path, monkeypatch):
    # Else the server would compile them on its own, beside them, and take that for a change.
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "elsewhere"))
    source = tmp_path / "m" / "1" / "model.py"
    source.parent.mkdir(parents=True)
    source.write_text("answer = 42\n")
    (source.parent / "broken.py").write_text("def\n")
    server_process.compile_models(tmp_path)
    (made,) = tmp_path.rglob("*.pyc")
    assert made.parent == source.parent / "__pycache__"
    installed = installation.Installation(tmp_path, tmp_path, tmp_path, (), True)
    environment = installed.environment()
    assert "PYTHONPYCACHEPREFIX" not in environment and "PATH" in environment
