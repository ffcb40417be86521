# SPDX-License-Identifier: Apache-2.0
"""Helps and refused requests end before anything slow is imported.

Nothing here is timed: benchmarks/startup.py does that.
"""

import json
import subprocess
import sys
from unittest import mock

from places import ROOT, module_at

SLOW = (
    "torch", "onnx", "onnxruntime", "onnxscript", "sklearn", "scipy", "matplotlib",
    "tritonclient", "grpc", "pyarrow", "tensorrt_rtx",
)  # fmt: skip
# One process for all of them: what one imports, those behind it have too, so that the first
# that imports something is the one that is named.
RUN = """
import contextlib, io, json, sys
from saccade.serving.commands.cli import run
slow, lines = json.load(sys.stdin)
found = {"import": [1, "", [name for name in slow if name in sys.modules]]}
for what, words in lines.items():
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
        try:
            code = run(words)
        except SystemExit as ended:
            code = ended.code or 0
    found[what] = [code, told.getvalue(), [name for name in slow if name in sys.modules]]
print(json.dumps(found))
"""


def the_benchmark():
    """benchmarks/startup.py, which is no package."""
    with mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):
        return module_at(ROOT / "benchmarks" / "startup.py")


def test_helps_and_refusals_import_nothing_slow(tmp_path):
    benchmark = the_benchmark()
    lines = benchmark.commands(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([SLOW, lines]), capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [what for what, (_, _, imported) in found.items() if imported][:1] == []
    for what, words in lines.items():
        code, told, _ = found[what]
        assert code == (0 if benchmark.answers(words) else 2), f"{what}: {told}"
        # By the request's own fault, and not by a package that is missing.
        refused = "saccade: " in told and "pip install" not in told
        assert benchmark.answers(words) or refused, told
    measured = json.loads((ROOT / "benchmarks" / "results" / "startup.json").read_text())
    assert list(measured["cpu_seconds"]) == sorted(lines)
