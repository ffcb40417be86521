# SPDX-License-Identifier: Apache-2.0
"""Inputs from a real S3 server, and answers into it."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from object_store import ObjectStore, program
from PIL import Image
from tiny_artefacts import artefacts

from saccade.core.errors import SaccadeError
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import Place

pytest.importorskip("pyarrow")
import pyarrow.parquet as pq

COUNT = 12


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    program()
    running = ObjectStore(tmp_path_factory.mktemp("store"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        running.start()
        try:
            yield running
        finally:
            running.stop()


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artefacts(tmp_path_factory.mktemp("bulk") / "artefact", checkpoint=False)


def fill(place: Place) -> None:
    for index in range(COUNT):
        file = io.BytesIO()
        pixels = np.random.default_rng(index).integers(0, 256, (9, 7), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "PNG")
        place.join(f"{index:02}.png").write(file.getvalue())


def test_from_and_into_a_bucket(store: ObjectStore, artefact: Path, tmp_path: Path) -> None:
    source, out = Place(store.address("images")), Place(store.address("out"))
    fill(source)
    options = BulkOptions(source.root, out.root, shard=5, workers="1")
    report = bulk(artefact, options)
    assert (report.answers, report.errors) == (COUNT, 0)
    assert [name for name, _ in out.join("answers").files()] == [
        f"part-{index:06}.parquet" for index in range(3)
    ]
    with out.join("answers/part-000002.parquet").open() as file:
        assert [row["id"] for row in pq.read_table(file).to_pylist()] == ["10.png", "11.png"]
    assert out.join("_SUCCESS").read() == f"{COUNT}\n".encode()
    out.join("answers/part-000001.parquet").remove()
    again = bulk(artefact, options)
    assert (again.answers, again.kept) == (COUNT, 7)
    assert "secret" not in str(out) + report.to_text()
    (tmp_path / "local").mkdir()
    fill(Place(str(tmp_path / "local")))
    bulk(
        artefact, BulkOptions(str(tmp_path / "local"), str(tmp_path / "out"), shard=5, workers="1")
    )
    for index in range(3):
        name = f"answers/part-{index:06}.parquet"
        assert out.join(name).read() == (tmp_path / "out" / name).read_bytes()


def test_wrong_buckets(store: ObjectStore, artefact: Path, tmp_path: Path) -> None:
    def refused(source: str, out: str, words: str) -> None:
        with pytest.raises(SaccadeError, match=words):
            bulk(artefact, BulkOptions(source, out, workers="1"))

    (tmp_path / "images").mkdir()
    fill(Place(str(tmp_path / "images")))
    out = str(tmp_path / "out")
    refused(store.address("nothing"), out, "no such file or folder")
    refused(
        store.address("images", bucket="nobodys"), out, "no such file or folder|cannot be listed"
    )
    refused("s5://bucket/x", out, "is not a supported address")
    refused(str(tmp_path / "images"), "s5://bucket/x", "is not a supported address")
    assert not Path(out).exists()
