# SPDX-License-Identifier: Apache-2.0
"""A repository for GPUs is refused where there are none, before anything is started."""

import shlex
import socket

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[cpu]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny

from saccade.serving.commands import cli
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.installation import RELEASE
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server import process as server_process

FOUND = {"onnxruntime": "models whose instances are KIND_GPU", "tensorrt": "TensorRT plans"}


def starts(monkeypatch):
    """Starts from now on, of which there are none."""
    found = []
    monkeypatch.setattr(server_process.subprocess, "Popen", lambda *words, **_: found.append(words))
    return found


@pytest.mark.parametrize("runtime", FOUND)
def test_models_for_a_gpu_are_refused_before_a_port_or_a_start(
    needs_server, tmp_path, capsys, monkeypatch, runtime
):
    folder, out = tiny.artefacts(tmp_path / "artefacts"), tmp_path / "a repository"
    engines = (str(tiny.engines(folder, tmp_path / "engines")),) if runtime == "tensorrt" else ()
    deploy(folder, RepositoryOptions(out, runtime=runtime, engines=engines, instances="gpu"))
    found = starts(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = cli.run(["serve", str(out), "--grpc-port", port])
    seen = capsys.readouterr()
    assert (code, seen.out, found) == (2, "", [])
    # Not the port is what it stumbles over.
    assert f"{out}: has {FOUND[runtime]}, but the bundled server" in seen.err
    folder = shlex.quote(str(out))
    assert f"`saccade preflight {folder} --server-version {RELEASE}`" in seen.err
    assert f"`saccade serve {folder} --print-command --container`" in seen.err
    assert "--runtime onnxruntime --instances cpu" in seen.err
