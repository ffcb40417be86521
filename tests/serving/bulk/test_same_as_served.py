# SPDX-License-Identifier: Apache-2.0
"""Answers in bulk are those of the service, bit for bit: the same code answers both."""

import numpy as np
import pytest
from PIL import Image

from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.client.client import Client

pytest.importorskip("pyarrow")
import pyarrow.parquet as pq

COUNT = 24


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Photographs in three formats, none of them square."""
    folder = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(7)
    for index in range(COUNT):
        pixels = rng.integers(0, 256, (40 + index, 60, 3), dtype=np.uint8)
        suffix = ("png", "jpg", "webp")[index % 3]
        Image.fromarray(pixels).save(folder / f"{index:02}.{suffix}")
    return folder


@pytest.mark.parametrize("budget", [None, 0.5])
def test_of_a_classifier(server, tiny_folder, images, tmp_path, budget):
    out = tmp_path / "out"
    bulk(tiny_folder, BulkOptions(str(images), str(out), budget=budget, top=100, workers="1"))
    rows = pq.read_table(out / "answers").to_pylist()
    files = sorted(images.iterdir())
    assert [row["id"] for row in rows] == [file.name for file in files]
    with Client(server.url, server.model) as client:
        served = client.infer({"image": files}, ["probabilities", "variant_sha256"], budget=budget)
    in_bulk = np.array([row["probabilities"] for row in rows], np.float32)
    assert np.array_equal(in_bulk, -np.sort(-served["probabilities"], axis=1))
    sha256 = [row[0].decode() for row in served["variant_sha256"]]
    assert [row["variant_sha256"] for row in rows] == sha256
