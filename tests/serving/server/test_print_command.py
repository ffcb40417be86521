# SPDX-License-Identifier: Apache-2.0
"""The printed command is the one that runs: here it is run, and its words are compared."""

import csv
import json
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_places import ADA

from saccade.core.errors import SaccadeError
from saccade.serving.client.client import Client
from saccade.serving.client.connection import connect_alone
from saccade.serving.commands import cli
from saccade.serving.repository import installation as requirements_module
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.installation import Requirements, find_installation, requirements_of
from saccade.serving.server.addresses import ServeOptions, with_ports
from saccade.serving.server.serve import as_text, container_arguments, print_command

READ = SimpleNamespace(runtime="onnxruntime")
PORTS = ("grpc_port", "http_port", "metrics_port", "ready_port")
CPU = 'name: "m" backend: "onnxruntime" instance_group { count: 1 kind: KIND_CPU }'
GPU = 'name: "m" backend: "onnxruntime" instance_group { count: 1 kind: KIND_GPU }'
PLAN = 'name: "m" platform: "tensorrt_plan" instance_group { count: 1 kind: KIND_AUTO }'
SHARED = """name: "m" platform: "tensorrt_plan" instance_group {
  kind: KIND_GPU rate_limiter { resources { name: "gpu" count: 1 } } }"""
WITH_LIBRARY = 'name: "m" backend: "onnxruntime" model_operations { op_library_filename: "%s" }'


def says_ready(url, timeout_s=1):
    """True if the server says over gRPC that every model is loaded."""
    from tritonclient.utils import InferenceServerException

    connection = connect_alone(url)
    with suppress(InferenceServerException):
        return bool(connection.is_server_ready(client_timeout=timeout_s))
    return False


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A folder with one model of this config; that its files are whole is tested elsewhere."""

    def write(config: str) -> Path:
        folder = tmp_path / "a, repository"
        (folder / "m" / "1").mkdir(parents=True)
        (folder / "m" / "config.pbtxt").write_bytes(config.encode("utf-8", "surrogatepass"))
        monkeypatch.setattr("saccade.serving.server.serve.read_repository", lambda folder: READ)
        monkeypatch.setattr("saccade.serving.server.serve.link_models", lambda *places: None)
        return folder

    return write


def split(text):
    """As a shell does, which takes a line that goes on for one line."""
    return shlex.split(text.replace("\\\n", " "))


def options_of(words):
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_the_printed_command_serves(
    needs_server, tiny_repository, tmp_path, monkeypatch, capsys, digit, eventually
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ports = with_ports(ServeOptions(**dict.fromkeys(PORTS, 0)))
    flags = [
        word
        for name in PORTS
        for word in (f"--{name.replace('_', '-')}", str(getattr(ports, name)))
    ]
    assert cli.run(["serve", str(tiny_repository), *flags, "--print-command"]) == 0
    text = capsys.readouterr().out
    with subprocess.Popen(
        ["bash", "-c", f"exec {text}"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as process:
        try:
            eventually(
                lambda: says_ready(f"127.0.0.1:{ports.grpc_port}") or process.poll() is not None, 30
            )
            with Client(
                f"127.0.0.1:{ports.grpc_port}", read_repository(tiny_repository).model
            ) as c:
                assert len(c.classify([digit])) == 1
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    read_repository(tiny_repository)  # nothing was left beside the hashed files


def test_json_is_the_same_words(tiny_repository, capsys):
    words = ["serve", str(tiny_repository), "--print-command", "--container"]
    assert cli.run([*words, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["command"]
    assert cli.run([*words, "--grpc-port", "1234"]) == 0
    shown = split(capsys.readouterr().out)
    # Ports are numbers, not pictures of them.
    assert "--publish=127.0.0.1:1234:8001" in shown
    differing = {word.partition("=")[0] for word in set(listed) ^ set(shown)}
    assert differing == {"--publish"}


def test_every_option_is_one_of_the_server(needs_server):
    installation = find_installation()
    done = subprocess.run(
        [installation.binary, "--help"],
        env=installation.environment(),
        capture_output=True,
        text=True,
    )
    help_text = done.stdout + done.stderr
    known = {line.split()[0] for line in help_text.splitlines() if line.startswith("  --")}
    everything = container_arguments(
        Requirements(gpu=True, runtimes=("tensorrt",), rate_limit=True)
    )
    assert len(known) > 50
    assert options_of(everything) <= known
    assert not options_of([*everything, "--no-such-option=1"]) <= known


def test_the_container_is_closed_and_small(written):
    words = print_command(written(CPU), container=True)
    assert {"--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"} < set(words)
    assert "--user=1000:1000" in words and "--shm-size=256m" in words
    published = [word for word in words if word.startswith("--publish")]
    assert published == [f"--publish=127.0.0.1:{port}:{port}" for port in (8001, 8000, 8002)]
    assert not {"--gpus", "--rate-limit"} & options_of(words)
    assert not any("tensorrt" in word for word in words)
    assert {"--model-control-mode=none", "--disable-auto-complete-config"} < set(words)
    restricted = [word for word in words if "-restricted-" in word]
    assert len(restricted) == 2
    closed = "=shared-memory,model-repository,logging,trace:closed:for-all=closed"
    assert all(word.endswith(closed) for word in restricted)
    # Nobody's image of that name is fetched, and a fork bomb ends at home.
    assert {"--pull=never", "--pids-limit=4096"} < set(words)
    assert split(as_text(words)) == list(words)


@pytest.mark.parametrize("config", ['name: "m" unknown: 1', "\ud800"])
def test_a_configuration_that_is_none_is_named(written, config):
    with pytest.raises(SaccadeError, match=r"m: config\.pbtxt .*saccade preflight '"):
        print_command(written(config), container=True)


def test_a_path_with_a_comma_is_one_field(written):
    folder = written(CPU)
    words = print_command(folder, container=True)
    mount = next(word for word in words if word.startswith("--mount=")).removeprefix("--mount=")
    assert next(csv.reader([mount])) == [
        *("type=bind", f"source={folder}", "target=/models", "readonly")
    ]


@pytest.mark.parametrize(
    "config, requirements",
    [
        (CPU, Requirements(calls=1)),
        (CPU.replace("count: 1", "count: 16"), Requirements(calls=18)),
        (GPU, Requirements(gpu=True, calls=1)),
        (PLAN, Requirements(gpu=True, runtimes=("tensorrt",), calls=1)),
        (SHARED, Requirements(gpu=True, runtimes=("tensorrt",), rate_limit=True, calls=1)),
        (WITH_LIBRARY % "lib.so", Requirements(op_libraries=("lib.so",))),
    ],
)
def test_requirements_are_read_from_the_configs(written, config, requirements):
    folder = written(config)
    assert requirements_of(folder) == requirements
    words = set(print_command(folder, container=True))
    plugins = "--backend-config=tensorrt,plugins=/opt/saccade/lib/libsaccade_tensorrt.so"
    assert ("--gpus=all" in words) == requirements.gpu
    assert (plugins in words) == bool(requirements.runtimes)
    assert ("--rate-limit=execution_count" in words) == requirements.rate_limit


@pytest.mark.parametrize(
    "config, container, options, words",
    [
        (CPU, True, {"grpc_port": 0}, ("--grpc-port 0", "Pass a port")),
        (CPU, True, {"http_port": 8001}, ("--http-port and --grpc-port are both 8001",)),
        (CPU, True, {"host": "0.0.0.0"}, ("0.0.0.0", "proxy", "--accept-risk")),
        (CPU, False, {"host": "0.0.0.0"}, ("0.0.0.0", "24.10", "--accept-risk")),
        (GPU, False, {}, ("has models whose instances are KIND_GPU", "--container")),
        (PLAN, False, {}, ("has TensorRT plans", "bundled server", "--container")),
        (WITH_LIBRARY % "/there/lib.so", True, {}, ("/there/lib.so", "/opt/saccade/lib")),
    ],
)
def test_what_cannot_run_is_not_printed(needs_server, written, config, container, options, words):
    with pytest.raises(SaccadeError) as error:
        print_command(written(config), replace(ServeOptions(), **options), container=container)
    assert all(word in str(error.value) for word in words)


def test_a_server_that_saccade_does_not_bring_is_told_what_plans_need(
    needs_server, written, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    foreign = replace(find_installation(), bundled=False)
    monkeypatch.setattr("saccade.serving.server.serve.find_installation", lambda: foreign)
    folder = written(SHARED)
    (folder / "saccade.json").touch()
    monkeypatch.setattr(requirements_module, "gpus", tuple)
    with pytest.raises(SaccadeError, match="needs a GPU for them, and the driver reports none"):
        print_command(folder)
    monkeypatch.setattr(requirements_module, "gpus", lambda: (ADA,))
    words = print_command(folder, ServeOptions(host="localhost"))
    assert "--grpc-address=127.0.0.1" in words
    assert words[-2:] == tuple(container_arguments(requirements_of(folder))[-2:])
    assert words[-1] == "--rate-limit=execution_count"
    # Each group in flight takes a thread of the server, and so does each answer that is sent.
    assert "--backend-config=python,thread-pool-size=5" in words


def test_a_cache_that_cannot_be_used_is_refused(
    needs_server, tiny_repository, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = print_command(tiny_repository)
    assert any(word.startswith(f"--model-repository={tmp_path}/saccade/") for word in words)
    (tmp_path / "saccade").chmod(0o777)
    with pytest.raises(SaccadeError, match=r"other users can write to it.*XDG_CACHE_HOME"):
        print_command(tiny_repository)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SaccadeError, match=r"cannot be written there .*XDG_CACHE_HOME"):
        print_command(tiny_repository)
    # A service starts in a folder of its own.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    words = print_command(tiny_repository)
    assert any(word.startswith(f"--model-repository={tmp_path}/cache/") for word in words)


def test_container_alone_and_a_changed_repository_are_refused(tiny_repository, tmp_path, capsys):
    assert cli.run(["serve", str(tiny_repository), "--container"]) == 2
    assert "--print-command" in capsys.readouterr().err
    copy = shutil.copytree(tiny_repository, tmp_path / "copy")
    config = next(copy.glob("*/config.pbtxt"))
    config.write_text(config.read_text() + "\n")
    assert cli.run(["serve", str(copy), "--print-command", "--container"]) == 2
    seen = capsys.readouterr()
    assert config.name in seen.err and not seen.out
    assert list(tmp_path.iterdir()) == [copy]
