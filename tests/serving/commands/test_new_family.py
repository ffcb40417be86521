# SPDX-License-Identifier: Apache-2.0
"""A new family is a folder and a line: one of the tests goes through every verb, unchanged."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT, TESTS, package_files

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="not installed: pip install '.[cpu]'")
pytest.importorskip("matplotlib", reason="not installed: pip install '.[bench]'")

from fakes.stripes.data import stripes
from PIL import Image
from quick_gate import quick_gate

from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.export import export
from saccade.exporter.export_options import ExportOptions
from saccade.exporter.gate.gate import verify
from saccade.models.catalogue import list_models
from saccade.models.families import FAMILIES
from saccade.models.training.train import TrainOptions, train
from saccade.serving.bench.bench import bench
from saccade.serving.bench.options import BenchOptions
from saccade.serving.client.call_options import ShowOptions
from saccade.serving.client.client import Client
from saccade.serving.commands.calls import show
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.server import ServeOptions, Server

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}


@pytest.fixture(scope="module")
def registered():
    """The one line, here and in the processes that are started from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "stripes", "fakes.stripes")
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        patch.setenv("PYTHONPATH", str(TESTS / "fakes" / "registered"), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def few(registered):
    """The gate has tests of its own, so it looks at few samples here."""
    with quick_gate():
        yield


@pytest.fixture(scope="module")
def folder(few, tmp_path_factory) -> Path:
    """A trained and exported model of stripes."""
    place = tmp_path_factory.mktemp("stripes")
    checkpoint = train("stripes", TrainOptions(place / "stripes.safetensors"))
    assert checkpoint.card["validation"]["direction"] > 0.9
    return export(checkpoint.path, ExportOptions(place / "out", outputs=("weights",))).folder


def test_it_is_verified_scored_and_measured(folder, tmp_path):
    assert [row.name for row in list_models("stripes")] == ["stripes-tiny"]
    assert verify(folder).passed
    results = evaluate(folder, EvaluateOptions(limit=64)).results
    assert [(result.task, result.scores[0].value > 0.9) for result in results] == [
        ("direction", True)
    ] * 2
    with pytest.raises(SaccadeError, match="'vqa', expected one of direction, top1"):
        evaluate(folder, EvaluateOptions(task="vqa"))
    options = BenchOptions(tmp_path / "report", server=False, limit=32, seconds=0.05, rounds=1)
    full = bench(folder, options).full
    assert [variant["score"]["name"] for variant in full["variants"]] == ["right directions"] * 2


def test_it_is_served_and_shown(needs_server, folder, tmp_path):
    deploy(folder, RepositoryOptions(out=tmp_path / "repository"))
    images, labels = stripes("test", 16)
    Image.fromarray(images[0, :, :, 0]).save(tmp_path / "image.png")
    # Where it starts, a process of its own checks the repository.
    with (
        Server(tmp_path / "repository", ServeOptions(**FREE_PORTS)) as server,
        Client(server.url, "stripes") as client,
    ):
        logits = client.infer({"image": list(images)}, ["logits"])["logits"]
        assert np.mean(logits.argmax(1) == labels) > 0.9
        sign = np.full((16, 1), -1, np.float32)
        given = client.infer({"image": list(images), "sign": sign}, ["logits"])["logits"]
        inputs, parameters = {"image": list(images)}, {"negative": "1"}
        drawn = client.infer(inputs, ["logits"], parameters=parameters)["logits"]
        np.testing.assert_allclose(drawn, given, rtol=1e-5)
        assert not np.allclose(drawn, logits)
        with pytest.raises(SaccadeError, match="expected a whole number from 0 to 1"):
            client.infer(inputs, ["logits"], parameters={"negative": "2"})
        with pytest.raises(SaccadeError, match="unknown parameter 'beam'"):
            client.infer(inputs, ["logits"], parameters={"beam": "2"})
        with pytest.raises(SaccadeError, match="captioning needs family captioner"):
            client.caption(images)
        shown = ShowOptions("stripes", url=server.url, out=tmp_path / "shown.png")
        assert show(tmp_path / "image.png", shown).to_dict()["side"] == 8
    assert shown.out.read_bytes()[:4] == b"\x89PNG"


def test_contributing_names_its_files_and_the_line(registered):
    """The page says which files a family has: the one of the tests has these and its own data."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("## Add a model: one folder and one line\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^(?:\d\.|\*) `(\w+\.py)`:", section, re.MULTILINE)
    there = {path.name for path in (TESTS / "fakes" / "stripes").glob("*.py")}
    assert {*steps, "data.py"} == there and len(steps) == len(there) - 1
    own = re.compile(r"fakes\.stripes|[\"']stripes[\"']")
    named = [path for path in package_files() if own.search(path.read_text())]
    assert not named, "a new family edits the registry alone"


def test_the_command_line_knows_it_and_loads_no_torch(registered):
    code = """if True:
        import contextlib, sys
        from saccade.models.families import entries
        from saccade.serving.commands.cli import run
        found = dict(entries())
        print([name for name in ("torch", "onnx", "onnxruntime") if name in sys.modules])
        for command in ("train", "evaluate"):
            with contextlib.suppress(SystemExit):
                run([command, "--help"])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[]\n")
    assert "stripes" in done.stdout and "direction" in done.stdout
