# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime is told to report nothing: what it would write to do so is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime", reason="not installed: pip install '.[cpu]'")
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
