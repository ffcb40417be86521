# SPDX-License-Identifier: Apache-2.0
"""Without the packages of the extras no command ends in a stack trace, and each names its extra."""

import json
import re
import subprocess
import sys
import tomllib

import pytest
from places import ROOT

from saccade.core.errors import _EXTRAS, missing_package
from saccade.serving.commands import cli

IMAGE = str(ROOT / "docs" / "examples" / "seven.png")
MODULES = {
    "onnx-graphsurgeon": "onnx_graphsurgeon", "instant-clip-tokenizer": "instant_clip_tokenizer",
    "onnxruntime-gpu": "onnxruntime", "tensorrt-cu13": "tensorrt", "nvidia-pytriton": "pytriton",
    "scikit-learn": "sklearn", "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry", "tensorrt-rtx-cu13": "tensorrt_rtx",
    "pyyaml": "yaml", "huggingface-hub": "huggingface_hub",
}  # fmt: skip
TOOLS = ("dev", "scale")  # which no command imports
# Packages that are there cannot be removed, but need not be found.
RUN = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder
hidden, lines = json.load(sys.stdin)
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in hidden
        return None if absent else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
from saccade.serving.commands.cli import run
found = {}
for what, words in lines.items():
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
        try:
            code = run(words)
        except SystemExit as ended:
            code = f"exit {ended.code}"
    found[what] = [code, told.getvalue()]
print(json.dumps(found))
"""


def lines(artefact, out):
    """A command line of every verb, and the extra without which it cannot run."""
    at = ["--url", "127.0.0.1:9"]
    shipped = "shipped:digits-sum"
    return {
        "train": (["nac", "--data", "digits", "--out", f"{out}/t.safetensors"], "export"),
        "convert": (
            ["sot", artefact + "/nac.safetensors", "--out", f"{out}/c.safetensors"],
            "export",
        ),
        "upload": (["no-folder", "--repo", "a/b"], None),
        "download": (["a/b", "--out", f"{out}/hub"], "hub"),
        "models": (["nac"], None),
        "select": (["shipped:sparo-shapes", "--data", "shapes", "--out", f"{out}/s"], "export"),
        "evaluate": ([shipped], "export"),
        "export": ([shipped, "--out", f"{out}/e"], "export"),
        "verify": ([artefact], "export"),
        "build": ([artefact, "--out", f"{out}/b"], "rtx"),
        "bench": ([artefact, "--out", f"{out}/r"], "bench"),
        "sweep": ([shipped, "--out", f"{out}/w"], "export"),
        "choose": ([artefact, "--budget", "1"], None),
        "calibrate": ([artefact, "--data", "digits"], "bench"),
        "plan": ([artefact, "--rps", "1", "--slo-ms", "9"], None),
        "repository": ([artefact, "--out", f"{out}/repo"], None),
        "preflight": ([f"{out}/repo"], None),
        "serve": ([f"{out}/repo"], "serve"),
        "proxy": (["127.0.0.1:9", "--out", f"{out}/envoy.yaml"], None),
        "bulk": ([artefact, "--input", f"{out}", "--out", f"{out}/u"], "bulk"),
        "predict": ([artefact, IMAGE], "cpu"),
        "classify": ([IMAGE, "--model", "nac", *at], None),
        "embed": ([IMAGE, "--model", "nac", "--out", f"{out}/n.npz", *at], None),
        "segment": ([IMAGE, "--model", "nac", "--out", f"{out}/g", *at], None),
        "answer": ([IMAGE, "--question", "what", "--model", "nac", *at], None),
        "caption": ([IMAGE, "--model", "nac", *at], None),
        "edit": ([IMAGE, "--model", "nac", "--out", f"{out}/i.png", *at], None),
        "show": ([IMAGE, "--model", "nac", "--out", f"{out}/h.png", *at], None),
        "explore": (["--url", "127.0.0.1:9"], "explore"),
        "inspect": ([artefact], None),
        "completion": (["bash"], None),
        "demo": (["--out", f"{out}/demo"], "export"),
        "ops": ([], None),
        "doctor": ([], None),
    }


def test_no_command_ends_in_a_trace_without_the_extras(tiny_folder, tmp_path):
    verbs = lines(str(tiny_folder), str(tmp_path))
    assert set(verbs) >= set(cli.COMMANDS), "give every command a line here"
    words = {verb: [verb, *given] for verb, (given, _) in verbs.items() if verb in cli.COMMANDS}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps([list(_EXTRAS), words]),
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for verb, (code, told) in json.loads(done.stdout).items():
        assert code in (0, 1, 2, 3) and "Traceback" not in told, f"{verb}: {code}: {told}"
        if extra := verbs[verb][1]:
            assert code == 2 and f"pip install 'saccade-serving[{extra}]'" in told, (
                f"{verb}: {told}"
            )


def test_every_package_of_an_extra_is_known_by_that_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {
        MODULES.get(name, name): {
            extra
            for extra, packages in extras["optional-dependencies"].items()
            if extra not in TOOLS and name in {re.split(r"[<>=;\[]", each)[0] for each in packages}
        }
        for extra, packages in extras["optional-dependencies"].items()
        if extra not in TOOLS
        for name in (re.split(r"[<>=;\[]", package)[0] for package in packages)
        if name != "numpy"
    }
    names["onnxruntime"] = {"cpu", "gpu"}
    for module, own in names.items():
        assert _EXTRAS[module] in own, module


@pytest.mark.parametrize("module", ["onnx.helper", "scipy"])
def test_an_import_that_fails_anywhere_names_its_extra(module, monkeypatch, capsys):
    def fails(arguments):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(cli, "_dispatch", fails)
    assert cli.run(["verify", "a"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert f"[{_EXTRAS[module.partition('.')[0]]}]'" in told


def test_an_import_of_ours_that_fails_is_a_bug():
    assert missing_package(ModuleNotFoundError("no", name="saccade.nothing")) is None
    assert missing_package(ImportError("no name")) is None
    assert missing_package(ValueError("torch")) is None
