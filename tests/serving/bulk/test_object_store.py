# SPDX-License-Identifier: Apache-2.0
"""What bulk jobs list and refuse, and inputs from a real S3 server, and answers into it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_store import ObjectStore, program
from picture_files import png
from tiny_artefacts import artefacts

from saccade.core.errors import SaccadeError
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import Place
from saccade.serving.bulk.plan import Columns, ModelInputs
from saccade.serving.bulk.sources import BulkSource

pytest.importorskip("pyarrow")
pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402 - after it is known to be there

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
        pixels = np.random.default_rng(index).integers(0, 256, (9, 7), dtype=np.uint8)
        place.join(f"{index:02}.png").write(png(pixels))


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


IMAGE, NAMES = ModelInputs(("image",)), Columns()


def listed(source: Path, wanted: ModelInputs = IMAGE, columns: Columns = NAMES) -> Any:
    return BulkSource(Place(str(source)), columns, wanted).entries()


def test_lines_of_other_fields(tmp_path: Path) -> None:
    lines = [{"path": "a.png", "n": 1}, {"path": "b.png", "id": "x"}, {"path": "c.png", "id": 7}]
    table = tmp_path / "list.jsonl"
    table.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SaccadeError, match="1 of 3 inputs has no id"):
        listed(table)
    with pytest.raises(SaccadeError, match="no column 'key'; it has 'path', 'n', 'id'"):
        listed(table, columns=Columns(id="key"))
    table.write_text("\n".join(map(json.dumps, lines[1:])))
    assert listed(table)["id"].to_pylist() == ["x", "7"]
    assert listed(table, columns=Columns(id="path"))["id"].to_pylist() == ["b.png", "c.png"]


def test_a_table_without_rows_beside_others(tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("id,path\n")
    with pytest.raises(SaccadeError, match="found no input"):
        listed(tmp_path)
    (tmp_path / "some.csv").write_text("id,path\nx,a.png\n")
    table = listed(tmp_path)
    assert (table["id"].to_pylist(), table["file"].to_pylist()) == (["x"], ["some.csv"])
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(SaccadeError, match=r"empty.csv: .*the file is empty"):
        listed(tmp_path)


def test_a_number_has_the_name_of_its_input(tmp_path: Path) -> None:
    wanted = ModelInputs((), ("bounds",))
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "x.parquet")
    np.savez(tmp_path / "x.npz", id=np.array(["a"]))
    for name in ("x.parquet", "x.npz"):
        with pytest.raises(
            SaccadeError, match=r"'bounds'; it has 'id'. Write it under that name.$"
        ):
            listed(tmp_path / name, wanted)
