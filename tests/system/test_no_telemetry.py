# SPDX-License-Identifier: Apache-2.0
"""Runtimes are told to report nothing: what they would write to do so is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import PACKAGE

pytest.importorskip("onnxruntime", reason="not installed: pip install '.[cpu]'")
SERVED = [
    str(PACKAGE / "model_repository" / name) for name in ("openvino_backend", "backend", "router")
]
SILENCERS = {"ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "CI"}


def leaves(code: str, place: Path, **said: str) -> list[str]:
    """The files that a Python process leaves where telemetry keeps its own."""
    place.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in SILENCERS}
    environment = {**kept, "TMPDIR": str(place), "HOME": str(place), **said}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=place)
    return [path.name for path in place.rglob("*")]


def test_importing_saccade_silences_it(tmp_path: Path) -> None:
    if not leaves("import onnxruntime", tmp_path / "without"):
        pytest.skip("this ONNX Runtime has no telemetry, or the system silences it")
    assert not leaves("import saccade, onnxruntime", tmp_path / "with")


def test_who_wants_it_keeps_it(tmp_path: Path) -> None:
    code = "import saccade, os; assert os.environ['ORT_DISABLE_TELEMETRY'] == '0'"
    assert not leaves(code, tmp_path / "asked", ORT_DISABLE_TELEMETRY="0")


@pytest.mark.parametrize("code", ["served", "exported"])
def test_openvino_is_imported_without_it(code: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="not installed: pip install '.[openvino]'")
    if not leaves("import openvino", tmp_path / "without"):
        pytest.skip("this OpenVINO has no telemetry, or the system silences it")
    given = {
        "exported": "from saccade.exporter.runtimes.openvino.runtime import openvino_module; "
        "openvino_module()",
        "served": f"import sys, types; sys.path[:0] = {SERVED!r}; "
        "sys.modules['triton_python_backend_utils'] = types.ModuleType('server'); import model",
    }
    assert not leaves(given[code], tmp_path / "with")
