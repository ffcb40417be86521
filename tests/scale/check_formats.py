# SPDX-License-Identifier: Apache-2.0
"""Photographs in every format of --data: each one is trained on, scored, exported and served.

make check-scale
"""

import io
import json
import subprocess
import sys
from pathlib import Path

import labelled_sets
import numpy as np
import pytest
from labelled_sets import FORMATS, Sample
from picture_files import png
from PIL import Image

import saccade
from saccade.serving.client.client import Client
from saccade.serving.server.server import ServeOptions, Server

SIDE_PX = 48  # of the shipped trunk
FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}


@pytest.fixture(scope="module")
def photographs() -> list[Sample]:
    return labelled_sets.photographs(20)


def run(*words: str | Path) -> str:
    command = [sys.executable, "-m", "saccade", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _npz(folder: Path, samples: list[Sample]) -> str:
    """Arrays have one size: that of the model."""
    return labelled_sets.medmnist(
        folder, [one._replace(data=_resized(one.data)) for one in samples]
    )


def _resized(data: bytes) -> bytes:
    return png(Image.open(io.BytesIO(data)).resize((SIDE_PX, SIDE_PX)))


WRITERS = {**FORMATS, "npz": _npz}


@pytest.mark.parametrize("name", WRITERS)
def test_from_files_to_served_answers(name: str, tmp_path: Path, photographs: list[Sample]) -> None:
    (tmp_path / "data").mkdir()
    data = WRITERS[name](tmp_path / "data", photographs)
    model, artefact, repository = (tmp_path / part for part in ("m.safetensors", "m", "served"))
    run("train", "sot", "--data", data, "--init", "shipped:sot-shapes", "--freeze", "trunk",
        "--steps", "30", "--threads", "1", "--out", model)  # fmt: skip
    run("export", model, "--budget", "fast,class", "--out", artefact)
    found = json.loads(run("evaluate", artefact, "--data", data, "--json"))["found"]
    assert [(one["split"], one["scores"][0]["n"]) for one in found] == [("test", 2)] * 2
    run("repository", artefact, "--out", repository)
    tests = [one for one in photographs if one.split == "test"]
    images = [np.asarray(Image.open(io.BytesIO(one.data))) for one in tests]
    expected = [one.label for one in tests]
    if name == "npz":  # its images have one size, and its classes no names
        images = [np.asarray(Image.open(io.BytesIO(_resized(one.data)))) for one in tests]
        names = sorted({one.label for one in photographs})
        expected = [str(names.index(label)) for label in expected]
    local = saccade.load_artefact(artefact).classify(images, budget="class")
    with (
        Server(repository, ServeOptions(**FREE_PORTS)) as server,
        Client(server.url, "m") as client,
    ):
        served = client.classify(images, budget="class")
    assert [each.labels for each in served] == [each.labels for each in local]
    assert [each.labels[0][0] for each in served] == expected
