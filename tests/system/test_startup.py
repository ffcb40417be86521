# SPDX-License-Identifier: Apache-2.0
"""Helps and refused requests end before anything slow is imported.

Nothing here is timed.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from places import ROOT

SLOW = (
    "torch", "onnx", "onnxruntime", "onnxscript", "sklearn", "scipy", "matplotlib",
    "tritonclient", "grpc", "pyarrow", "tensorrt_rtx",
)  # fmt: skip
IMAGE = str(ROOT / "docs" / "examples" / "seven.png")
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


def commands(place: Path) -> dict[str, list[str]]:
    """Return command lines by what is wrong with them; their files are created in `place`."""
    text, folder, out = place / "text.txt", place / "folder", str(place / "out")
    text.write_text("no checkpoint")
    folder.mkdir()
    (torch_file := place / "vit_b32.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    (repository := place / "repository").mkdir()
    (repository / "saccade.json").write_text("{}")
    export = ["export", "shipped:digits-sum", "--out", out]
    return {
        "--help": ["--help"],
        "export --help": ["export", "--help"],
        "export: no such file": ["export", "nosuch", "--out", out],
        "export: no such shipped checkpoint": ["export", "shipped:nosuch", "--out", out],
        "export: no checkpoint": ["export", str(text), "--out", out],
        "export: a folder": ["export", str(folder), "--out", out],
        "export: budget that is no number": [*export, "--budget", "half"],
        "export: budget out of range": [*export, "--budget", "1.5"],
        "export: budget that keeps nothing": [*export, "--budget", "0.001"],
        "export: unknown precision": [*export, "--precision", "fp8"],
        "export: unknown threshold": [*export, "--threshold", "nosuch", "1"],
        "export: --out exists": ["export", "shipped:digits-sum", "--out", str(folder)],
        "bench: no such folder": ["bench", "nosuch", "--out", out],
        "bench: no artefact folder": ["bench", str(folder), "--out", out],
        "bench: --out exists": ["bench", "nosuch", "--out", str(folder)],
        "verify: no such folder": ["verify", "nosuch"],
        "verify: no artefact folder": ["verify", str(folder)],
        "verify: a file": ["verify", str(text)],
        "evaluate: no such file": ["evaluate", "nosuch"],
        "evaluate: budget that is no number": [
            "evaluate",
            "shipped:digits-sum",
            "--budget",
            "half",
        ],
        "sweep: no such file": ["sweep", "nosuch", "--out", out],
        "sweep: budget that is no number": [
            "sweep",
            "shipped:digits-sum",
            "--out",
            out,
            "--budget",
            "half",
        ],
        "models": ["models"],
        "models: no such family": ["models", "gpt"],
        "export: a foreign checkpoint": ["export", str(torch_file), "--out", out],
        "choose: a file": ["choose", str(text), "--budget", "1"],
        "verify: a repository": ["verify", str(repository)],
        "train: wrong ending": ["train", "nac", "--out", f"{out}.pt"],
        "train: unknown field": ["train", "nac", "--out", f"{out}.safetensors", "--set", "dmi=8"],
        "no such command": ["exprt", "nosuch"],
        "predict --help": ["predict", "--help"],
        "predict: no such folder": ["predict", "nosuch", IMAGE],
        "predict: no artefact folder": ["predict", str(folder), IMAGE],
        "classify: no such image": ["classify", "nosuch.png"],
        "classify: an address that is none": ["classify", IMAGE, "--url", "http://127.0.0.1:8000"],
        "convert: no such file": ["convert", "swin", "nosuch", "--out", out],
        "repository: no such folder": ["repository", "nosuch", "--out", out],
        "serve: no such folder": ["serve", "nosuch"],
    }


def answers(words: Sequence[str]) -> bool:
    """Whether there is nothing wrong with a command line."""
    return "--help" in words or list(words) == ["models"]


def test_helps_and_refusals_import_nothing_slow(tmp_path):
    lines = commands(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([SLOW, lines]), capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [what for what, (_, _, imported) in found.items() if imported][:1] == []
    for what, words in lines.items():
        code, told, _ = found[what]
        assert code == (0 if answers(words) else 2), f"{what}: {told}"
        # By the request's own fault, and not by a package that is missing.
        refused = "saccade: " in told and "pip install" not in told
        assert answers(words) or refused, told
