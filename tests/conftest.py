# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by several test files: a tiny checkpoint and a folder exported from it."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

# There are as many test processes as cores: torch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if sys.dont_write_bytecode:
    # Otherwise every process that imports torch would compile it, which takes longer than most
    # tests. Compiled files are kept outside the tree and the environment.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(ROOT / "build" / "pycache")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores SIGINT in background processes, and child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# `make test-fast` skips tests that use these fixtures, and files that mostly start processes,
# compile or train.
SLOW_FIXTURES = {
    "envoy_binary", "needs_server", "nginx", "swept", "trained", "typed", "made", "wheel", "form",
}  # fmt: skip
SLOW_FILES = {
    "test_bisect.py",
    "test_bodies.py",
    "test_captioner.py",
    "test_captioner_training.py",
    "test_catalogue.py",
    "test_engines.py",
    "test_engines_doc.py",
    "test_engines_loading.py",
    "test_engines_tensorrt.py",
    "test_export.py",
    "test_fixed_order.py",
    "test_five_ops.py",
    "test_graph_limits.py",
    "test_help_examples.py",
    "test_inline_ops.py",
    "test_killed.py",
    "test_library.py",
    "test_listops.py",
    "test_nac_fold.py",
    "test_nac_inputs.py",
    "test_no_telemetry.py",
    "test_onnxruntime_library.py",
    "test_openvino.py",
    "test_precision.py",
    "test_production_doc.py",
    "test_rtx.py",
    "test_shipped.py",
    "test_slot_training.py",
    "test_sot_training.py",
    "test_sparo_training.py",
    "test_sweep_points.py",
    "test_tensorrt_plugin.py",
    "test_torch_ops.py",
    "test_torch_transforms.py",
    "test_train.py",
    "test_train_loop.py",
    "test_worker.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW_FILES or SLOW_FIXTURES & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def whole_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split calls alike on every machine: last digits depend on what shares a request."""
    sizes = "saccade.serving.client.request_sizes"
    monkeypatch.setattr(f"{sizes}.TARGET_S", 1e9)
    monkeypatch.setattr(f"{sizes}.FIRST_ROWS", 64)


@pytest.fixture
def saccade(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command line on a terminal of 80 columns; gives exit code, output and errors."""
    from saccade.serving.commands import cli

    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: object) -> tuple[Any, str, str]:
        try:
            code = cli.run([*map(str, words)])
        except SystemExit as end:
            code = end.code
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return call


@pytest.fixture(scope="session")
def tiny_nac() -> Callable[..., Any]:
    """Make tiny checkpoints: `tiny_nac(path, modules=8)`."""
    pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
    from tiny import tiny_nac

    return tiny_nac


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_nac: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 16 modules with random weights; treat it as read-only."""
    return tiny_nac(tmp_path_factory.mktemp("checkpoint") / "nac.safetensors").path


@pytest.fixture(scope="session")
def tiny_folder(tiny_checkpoint: Path) -> Path:
    """The checkpoint exported as `nac` at budgets 1, 0.5, 0.25, 0.125; copy it to change it."""
    from folder_store import stored
    from traced_graphs import traced_once

    from saccade.exporter.export import ExportOptions, export

    def make(place: Path) -> None:
        with traced_once():
            export(tiny_checkpoint, ExportOptions(place / "nac"))

    return stored("nac", make) / "nac"


@pytest.fixture
def traced_before() -> Iterator[None]:
    """Exports take graphs that were traced for other tests: tracing one takes seconds."""
    from traced_graphs import traced_once

    with traced_once():
        yield
