# SPDX-License-Identifier: Apache-2.0
"""Commands killed at a few moments each; many more of all of them: `make check-killed`."""

import json
import subprocess
import sys

import pytest
from places import TESTS

pytest.importorskip("torch", reason="torch is not installed: pip install 'saccade[export]'")
pytest.importorskip("onnx", reason="onnx is not installed: pip install 'saccade[export]'")

CHECK = TESTS / "killed" / "check.py"


@pytest.fixture(scope="module")
def result():
    # A process of its own: this one has threads, which a fork would lose.
    words = ["--moments", "4", "--full", "4", "--commands", "convert", "repository", "--json"]
    done = subprocess.run(
        [sys.executable, CHECK, *words], capture_output=True, text=True, timeout=550
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM", "SIGINT", "ENOSPC"])
def test_nothing_half_made_is_seen_and_the_next_run_ends_well(result, fault):
    found = [each for each in result["results"] if each["fault"] == fault]
    assert [each["faults"] for each in found] == [[]] * len(found)
    assert sum(each["took_effect"] for each in found) >= len(found)
