# SPDX-License-Identifier: Apache-2.0
"""Inputs of `saccade bulk` that are no files, lead elsewhere, or name another host."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import picture_files
import pytest
from bulk_jobs import in_this_process
from tiny_artefacts import artefacts

from saccade.core.errors import SaccadeError
from saccade.models.data.samples.source import RowUnreadable
from saccade.serving.bulk import place as place_module
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import Place
from saccade.serving.bulk.plan import Columns, ModelInputs
from saccade.serving.bulk.sources import BulkSource

pytest.importorskip("pyarrow")
import pyarrow.fs
import pyarrow.parquet as pq


def png(seed: int) -> bytes:
    return picture_files.png(np.random.default_rng(seed).integers(0, 256, (9, 7), dtype=np.uint8))


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artefacts(tmp_path_factory.mktemp("bulk") / "artefact", checkpoint=False)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for index in range(4):
        path = folder / ("even" if index % 2 == 0 else "odd") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(index))
    return folder


@pytest.fixture
def run(artefact: Path, tmp_path: Path) -> Callable[..., Any]:
    def go(source: Path, **options: Any) -> Any:
        with in_this_process():
            given = {"out": str(tmp_path / "out"), "workers": "1", **options}
            return bulk(artefact, BulkOptions(input=str(source), **given))

    return go


def reasons(out: Path) -> dict[str, str]:
    return {row["id"]: row["reason"] for row in pq.read_table(out / "errors").to_pylist()}


def test_what_is_no_file_is_an_error_and_a_linked_folder_is_named(run, images, tmp_path, capsys):
    (images / "gone.png").symlink_to("nowhere")
    (images / "zeros.png").symlink_to("/dev/zero")
    os.mkfifo(images / "odd" / "pipe.png")
    with (images / "large.png").open("wb") as file:
        file.truncate(5 * 2**30)
    (images / "album").symlink_to(images / "even")
    (images / "here.png").symlink_to(images / "even" / "0.png")
    report = run(images)
    assert (report.answers, report.errors) == (5, 4)
    assert reasons(tmp_path / "out") == {
        "gone.png": "no such file",
        "zeros.png": "found a pipe or device, expected a file",
        "odd/pipe.png": "found a pipe or device, expected a file",
        "large.png": "found 5368709120 bytes, expected at most 16777216",
    }
    assert "images: left out 1 link to folders, such as album." in capsys.readouterr().err


def test_a_table_names_files_below_its_folder_alone(run, images, tmp_path):
    (tmp_path / "secret.png").write_bytes(png(0))
    (images / "leads_out.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(images / "pipe.png")
    inside = ["even/0.png", str(images / "even" / "2.png"), f"file://{images}/even/../odd/1.png"]
    outside = dict.fromkeys(
        ["../secret.png", str(tmp_path / "secret.png"), "/etc/hostname", "leads_out.png",
         "file:///etc/hostname", "even/../../secret.png"],
        f"leads out of {images}. Move the file into this folder, or name the folder that contains "
        "all images with --data-root",
    )  # fmt: skip
    absent = ["none.png", "s3://b/k.png?endpoint_override=127.0.0.1:9&scheme=http"]
    rows = [{"path": path} for path in (*inside, *outside, *absent, "pipe.png")]
    table = images / "list.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    assert run(table).answers == 3
    found = reasons(tmp_path / "out")
    assert {path: found.pop(path) for path in outside} == outside
    assert found.pop("pipe.png") == "found a pipe or device, expected a file"
    assert all(found.pop(path).startswith(f"no such file in {images}") for path in absent)
    assert not found


def test_a_table_elsewhere_names_files_below_the_data_root(run, images, tmp_path):
    (tmp_path / "tables").mkdir()
    paths = ["0.png", str(images / "even" / "2.png"), "../odd/1.png"]
    (tmp_path / "tables" / "list.csv").write_text("path\n" + "\n".join(paths))
    assert run(tmp_path / "tables", out=str(tmp_path / "own")).answers == 0
    report = run(tmp_path / "tables", data_root=str(images / "even"))
    assert (report.answers, list(reasons(tmp_path / "out"))) == (2, ["../odd/1.png"])
    with pytest.raises(SaccadeError, match=r"nothing: no such folder\..*--data-root"):
        run(tmp_path / "tables", data_root=str(tmp_path / "nothing"), out=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(SaccadeError, match="contains a different job: the data_root changed"):
        run(tmp_path / "tables", data_root=str(images))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A bucket `s3://b?key=1`, in a folder; the roots that were connected; `alive` may be taken."""
    roots, connected = [], place_module._connected

    def connect(root: str) -> Any:
        if not root.startswith("s3:"):
            return connected(root)
        roots.append(root)
        if not alive:
            raise OSError("nobody listens")
        path = root.partition("?")[0].removeprefix("s3://")
        return pyarrow.fs.LocalFileSystem(), str(tmp_path / path)

    alive = [True]
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(place_module, "_connected", connect)
    monkeypatch.setattr(place_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(place_module, "PATIENCE_AT_FIRST_S", 0.0)
    return tmp_path / "b", roots, alive


def test_no_row_chooses_the_store_that_is_asked(store, tmp_path):
    bucket, roots, alive = store
    (tmp_path / "secret.png").write_bytes(png(1))
    (bucket / "in").mkdir()
    for name in ("a.png", "in/b.png"):
        (bucket / name).write_bytes(png(0))
    (bucket / "in" / "large.png").write_bytes(bytes(17 * 2**20))
    good = ["b.png", "./b.png", "s3://b/in/b.png"]
    bad = ["../a.png", "/b.png", "s3://c/b.png", "s3://b/a.png", "s3://b/in/../a.png", "",
           "s3://b/in/b.png?endpoint_override=127.0.0.1:9&scheme=http", "../../secret.png",
           str(tmp_path / "secret.png"), "large.png"]  # fmt: skip
    rows = [f"{i},{path}" for i, path in enumerate(good + bad)]
    (bucket / "in" / "list.csv").write_text("id,path\n" + "\n".join(rows))
    source = BulkSource(Place("s3://b/in/list.csv?k=1"), Columns(), ModelInputs(("image",)))
    entries = source.entries().to_pylist()
    assert [source.read(entry) for entry in entries[:3]] == [{"image": png(0)}] * 3
    for entry in entries[3:]:
        with pytest.raises(RowUnreadable):
            source.read(entry)
    assert {*roots} == {"s3://b/in/list.csv?k=1", "s3://b/in?k=1"}
    alive.clear()
    with pytest.raises(SaccadeError, match=r"s3://b/in/list.csv: cannot be reached .*--input"):
        source.read(entries[0])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_a_table_that_is_not_utf_8_is_refused(encoding, run, tmp_path):
    (tmp_path / "x.csv").write_bytes("id,path\nx,a.png\n".encode(encoding))
    with pytest.raises(SaccadeError, match=r"x.csv: .*(UTF-8 text|no column of images)"):
        run(tmp_path / "x.csv")


def test_a_table_that_is_a_pipe_is_refused(run, tmp_path):
    for kind in ("csv", "jsonl", "parquet", "tar", "npz"):
        os.mkfifo(tmp_path / f"x.{kind}")
        with pytest.raises(SaccadeError, match="found a pipe or device, expected a file"):
            run(tmp_path / f"x.{kind}")
