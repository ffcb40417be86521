# SPDX-License-Identifier: Apache-2.0
"""Preflight as a command: exit codes, the process that is thrown away, a server beside it."""

import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[cpu]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import numpy as np
import tiny_artefacts as tiny
from broken_changes import other_answer, with_library
from ops_implementations import built_library
from tiny_artefacts import FULL, HALF

from saccade.core.errors import SaccadeError
from saccade.plugins.native import library as native
from saccade.serving.client.client import Client
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.verb import PreflightOptions, preflight
from saccade.serving.server.server import ServeOptions, Server

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
# What a library may do to whoever loads it.
HOSTILE = {
    "aborts": ("abort();", r"stopped the process \(killed by SIGABRT\)", 300),
    "leaves": ("_exit(0);", r"stopped the process \(exit code 0\)", 300),
    "never returns": ("for (;;) pause();", r"stopped the process \(no answer within 4 s\)", 4),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A good repository; copy it to break it."""
    place = tmp_path_factory.mktemp("preflight")
    folder = tiny.artefacts(place / "artefacts")
    options = RepositoryOptions(
        place / "repository", max_queue=64, queue_timeout_ms=9000, priority_levels=2,
        rate_limit="cores", instance_count=2, routers=2, threads=2, graph_level=1,
    )  # fmt: skip
    deploy(folder, options)
    return place / "repository"


@pytest.fixture
def repository(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "repository"))


@pytest.fixture
def library(tmp_path):
    """Compile a library that does something as soon as it is loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler: apt-get install gcc")

    def make(words):
        source, built = tmp_path / "hostile.c", tmp_path / "hostile.so"
        head = "#include <fcntl.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        source.write_text(
            head + f"__attribute__((constructor)) static void f(void) {{ {words} }}\n"
        )
        subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source], check=True)
        return built.read_bytes()

    return make


def test_exit_codes_and_answers(saccade, repository, tmp_path):
    words = ("preflight", repository, "--server-version", "26.07")
    code, out, _ = saccade(*words)
    assert code == 0 and "ready to serve. " in out
    other_answer(repository)
    tiny.rehash(repository)
    code, out, _ = saccade(*words, "--json")
    report = json.loads(out)
    failed = [finding for finding in report["findings"] if finding["verdict"] == "failed"]
    assert (code, report["passed"]) == (1, False)
    assert [(failure["check"], failure["model"]) for failure in failed] == [("answer", FULL)]
    code, out, _ = saccade(*words)
    assert code == 1 and f"FAILED {FULL}: answer: output 'logits'" in out
    code, out, err = saccade("preflight", tmp_path)
    assert (code, out) == (2, "") and "is not a model repository" in err


@pytest.mark.parametrize("version", ["24.09", "2.40", "latest", "26.13"])
def test_a_server_that_is_not_known_is_refused(made, version):
    with pytest.raises(SaccadeError, match="--server-version is"):
        preflight(made, PreflightOptions(server_version=version))


def test_a_library_is_compared_before_it_is_loaded(repository, library, tmp_path):
    mark = tmp_path / "loaded"
    hostile = library(f'creat("{mark}", 0600); _exit(0);')
    with_library(lambda: hostile)(repository)
    tiny.rehash(repository)
    report = preflight(repository, PreflightOptions("24.10"))
    verdicts = {(finding.check, finding.model): finding for finding in report.findings}
    assert "was not loaded" in verdicts["library", FULL].reasons[0]
    assert verdicts["answer", FULL].verdict == "not checked"
    assert verdicts["answer", HALF].verdict == "passed"
    assert not mark.exists()


@pytest.mark.parametrize("case", HOSTILE)
def test_what_ends_the_process_is_named_and_the_rest_is_checked(
    repository, library, case, tmp_path, monkeypatch
):
    if (native.PACKAGED / native.RECORD).exists():
        pytest.skip("a library is packaged here, before which none of the cache is taken")
    words, expected, timeout_s = HOSTILE[case]
    hostile = library(words)
    with_library(lambda: hostile)(repository)
    # Ours itself, as a broken build of it: another one would not be loaded.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = native.cached_folder()
    own.mkdir(parents=True, mode=0o700)
    (own / native.NAME).write_bytes(hostile)
    (own / native.NAME).chmod(0o700)
    native.write_record(own)
    tiny.rehash(repository)
    report = preflight(repository, PreflightOptions("24.10", timeout_s=timeout_s))
    actual = {(finding.check, finding.model): finding for finding in report.findings}
    assert len(actual) == len(report.findings), "a check was made twice"
    assert re.search(expected, actual["library", FULL].reasons[0])
    assert actual["answer", FULL].verdict == "not checked", "it was loaded again"
    assert actual["answer", HALF].verdict == "passed"
    assert report.findings[-1].check == "memory"


def test_a_running_server_with_our_ops_is_not_disturbed(needs_server, repository):
    made, image = repository, np.zeros((4, 4, 1), np.uint8)
    # By its bare name the server has to find the library beside the model.
    with_library(lambda: Path(built_library()).read_bytes())(made)
    tiny.rehash(made)
    before = {path.name: path.stat().st_mtime_ns for path in made.rglob("*")}
    with Server(made, ServeOptions(**FREE_PORTS)) as server:
        stop, errors, answers = threading.Event(), [], []

        def ask():
            with Client(server.url, server.model, timeout_s=10) as client:
                while not stop.is_set():
                    try:
                        answers.append(client.classify([image])[0].variant)
                    except SaccadeError as error:
                        errors.append(str(error))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            report = preflight(made)
        finally:
            stop.set()
            asking.join()
        assert report.passed, report.failed
        assert errors == [] and set(answers) == {FULL} and len(answers) > 10
        assert server.ready()
        started_with = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
        # Without it the resource of the instance groups would hold nobody back.
        assert b"--rate-limit=execution_count" in started_with
    assert {path.name: path.stat().st_mtime_ns for path in made.rglob("*")} == before
