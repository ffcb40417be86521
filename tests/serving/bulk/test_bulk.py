# SPDX-License-Identifier: Apache-2.0
"""`saccade bulk`: every source, what is written, what is gone on with, what is refused."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import picture_files
import pytest
from bulk_jobs import in_this_process
from half_typed import add_variant
from PIL import Image
from tiny_artefacts import FULL, HALF, artefacts, onnx_model

from saccade.core.errors import GateFailed, MissingPackage, SaccadeError
from saccade.serving.bulk import place as place_module
from saccade.serving.bulk import runners
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import Place
from saccade.serving.bulk.plan import check_same, read_plan
from saccade.serving.bulk.runners import TRIES
from saccade.serving.commands import cli

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402 - after it is known to be there

COUNT = 10
SOURCES = {
    "csv": "list.csv", "jsonl": "list.jsonl", "bytes": "bytes.parquet", "paths": "paths.parquet",
    "datasets": "hf.parquet", "tar": "key.tar", "npz": "pixels.npz",
}  # fmt: skip


def png(seed: int) -> bytes:
    """A picture that is not square."""
    return picture_files.png(np.random.default_rng(seed).integers(0, 256, (9, 7), dtype=np.uint8))


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    return artefacts(tmp_path_factory.mktemp("bulk") / "artefact", checkpoint=False)


@pytest.fixture
def images(tmp_path):
    """Ten images in two folders, of which one is none."""
    folder = tmp_path / "images"
    for index in range(COUNT):
        path = folder / ("even" if index % 2 == 0 else "odd") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(index) if index != 3 else b"no picture")
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_bytes(b"")
    return folder


@pytest.fixture
def run(artefact, tmp_path):
    """Run a job in this process, or in `workers` others; its report."""

    def go(source: Path | str, **options: Any) -> Any:
        given = {"out": str(tmp_path / "out"), "workers": "1", **options}
        with nullcontext() if "workers" in options else in_this_process():
            return bulk(artefact, BulkOptions(input=str(source), **given))

    return go


def answers(out: Path) -> dict[str, dict[str, Any]]:
    """Rows by id; every id once."""
    rows = pq.read_table(out / "answers").to_pylist()
    by_id = {row.pop("id"): row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


def in_order(by_id: dict[str, dict[str, Any]], names: list[str]) -> list[list[float]]:
    return [by_id[name]["probabilities"] for name in names]


def test_a_folder_of_images(run, images, tmp_path):
    report = run(images, shard=4, batch=3, budget="0.5", workers="2")
    assert (report.answers, report.errors, report.variant) == (COUNT - 1, 1, HALF)
    found = answers(tmp_path / "out")
    assert set(found) == {
        str(path.relative_to(images)) for path in images.rglob("[!.]*.png") if path.stem != "3"
    }
    row = found["even/0.png"]
    assert row["variant"] == HALF
    assert row["labels"][0] in ("circle", "square", "star")
    assert row["probabilities"] == sorted(row["probabilities"], reverse=True)
    (error,) = pq.read_table(tmp_path / "out" / "errors").to_pylist()
    assert error["id"] == "odd/3.png"
    assert "not a JPEG, PNG or WebP file" in error["reason"]
    assert (tmp_path / "out" / "_SUCCESS").read_text() == f"{COUNT}\n"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["answers"], manifest["inputs"]) == (COUNT - 1, COUNT)
    assert manifest["sha256"][HALF] == row["variant_sha256"]


def test_answers_as_csv(run, images, tmp_path):
    (images / "odd" / "1.png").rename(images / "odd" / 'å, "1".png')
    report = run(images, shard=4, csv=True, top=2)
    assert report.csv and f"{tmp_path / 'out'}/csv: " in report.to_text()
    parts = sorted((tmp_path / "out" / "csv").iterdir())
    assert [path.name for path in parts] == [f"part-00000{index}.csv" for index in range(3)]
    texts = [path.read_text(encoding="utf-8") for path in parts]
    rows = [row for text in texts for row in csv.DictReader(io.StringIO(text, newline=""))]
    found = answers(tmp_path / "out")
    assert {row["id"] for row in rows} == found.keys() and 'odd/å, "1".png' in found
    for row in rows:
        same = found[row["id"]]
        assert [row["label"], row["label_2"]] == same["labels"]
        shares = [float(row["probability"]), float(row["probability_2"])]
        assert shares == pytest.approx(same["probabilities"], rel=1e-6)
        assert row["variant"] == same["variant"] and row["steps"] == "1"
    with pytest.raises(SaccadeError, match="--csv: found --ask embed, whose answers are arrays"):
        run(images, out=str(tmp_path / "vectors"), csv=True, ask="embed")
    assert not (tmp_path / "vectors").exists()


def test_every_source_gives_the_same_answers(run, artefact, tmp_path):
    """One picture is one answer, however it comes; batches are the same in each."""
    pictures = [png(index) for index in range(COUNT)]
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index, data in enumerate(pictures):
        (folder / f"{index}.png").write_bytes(data)
    names = [f"{index}.png" for index in range(COUNT)]
    keys = pa.array([f"key{index}" for index in range(COUNT)])
    sources = {kind: tmp_path / name for kind, name in SOURCES.items()}
    lines = [{"id": f"key{i}", "path": f"pictures/{name}"} for i, name in enumerate(names)]
    rows = "".join(f"{each['id']},{each['path']}\n" for each in lines)
    sources["csv"].write_text(f"id,path\n{rows}")
    listed = [{"id": each["id"], "file_name": each["path"]} for each in lines]
    sources["jsonl"].write_text("\n".join(map(json.dumps, listed)))
    for kind, column, values in (
        ("bytes", "image", pictures),
        ("paths", "path", [str(folder / name) for name in names]),
        ("datasets", "image", [{"bytes": data, "path": None} for data in pictures]),
    ):
        table = pa.table({"id": keys, column: pa.array(values)})
        pq.write_table(table, sources[kind], row_group_size=3)
    with tarfile.open(sources["tar"], "w") as tar:
        for index, data in enumerate(pictures):
            for suffix, content in ((".txt", b"a text"), (".png", data)):
                member = tarfile.TarInfo(f"key{index}{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    pixels = np.stack([np.array(Image.open(io.BytesIO(data))) for data in pictures])
    np.savez(sources["npz"], image=pixels[..., None], id=np.array(keys.to_pylist()))
    run(folder, out=str(tmp_path / "out-folder"))
    wanted = in_order(answers(tmp_path / "out-folder"), names)
    for kind, source in sources.items():
        run(source, out=str(tmp_path / f"out-{kind}"))
        found = answers(tmp_path / f"out-{kind}")
        prefix = "key.tar/" if kind == "tar" else ""
        assert in_order(found, [f"{prefix}key{i}" for i in range(COUNT)]) == wanted, kind


def test_embeddings_of_either_type(run, images, tmp_path):
    run(images, ask="embed", out=str(tmp_path / "a"))
    run(images, ask="embed", dtype="float16", out=str(tmp_path / "b"))
    single, half = (pq.read_table(tmp_path / name / "answers") for name in "ab")
    assert single.schema.field("embedding").type == pa.list_(pa.float32(), 4)
    assert half.schema.field("embedding").type == pa.list_(pa.float16(), 4)
    first = np.stack(single["embedding"].to_numpy(zero_copy_only=False))
    assert np.array_equal(
        first.astype(np.float16), np.stack(half["embedding"].to_numpy(zero_copy_only=False))
    )


def test_goes_on_where_it_was(run, images, tmp_path):
    run(images, shard=2)
    out = tmp_path / "out"
    before = {path.name: path.read_bytes() for path in (out / "answers").iterdir()}
    assert len(before) == 5
    for name in ("part-000001.parquet", "part-000004.parquet"):
        (out / "answers" / name).unlink()
    (out / "_SUCCESS").unlink()
    kept = (out / "answers" / "part-000000.parquet").stat().st_mtime_ns
    report = run(images, shard=2)
    assert (report.answers, report.errors, report.kept) == (COUNT - 1, 1, 6)
    assert {path.name: path.read_bytes() for path in (out / "answers").iterdir()} == before
    assert (out / "answers" / "part-000000.parquet").stat().st_mtime_ns == kept
    assert (out / "_SUCCESS").exists()


def test_a_job_of_an_earlier_release_goes_on(run, images, tmp_path):
    run(images, shard=4)
    path = tmp_path / "out" / "_plan" / "plan.json"
    plan = json.loads(path.read_text())
    del plan["form"]["csv"]
    path.write_text(json.dumps(plan))
    assert read_plan(Place(str(tmp_path / "out"))).form.csv is False


def test_an_error_of_an_earlier_try_goes(run, images, tmp_path):
    run(images, shard=2)
    out = tmp_path / "out"
    (wrong,) = (out / "errors").iterdir()
    other = next(path for path in sorted((out / "answers").iterdir()) if path.name != wrong.name)
    (out / "errors" / other.name).write_bytes(wrong.read_bytes())
    other.unlink()
    report = run(images, shard=2)
    assert (report.answers, report.errors) == (COUNT - 1, 1)
    assert list((out / "errors").iterdir()) == [wrong]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget": "0.5"}, "variant changed from tiny-b1000-fp32 to tiny-b0500-fp32"),
        ({"batch": 2}, "batch changed from 64 to 2"),
        ({"shard": 7}, "shard changed from 1024 to 7"),
        ({"ask": "embed"}, "form changed"),
    ],
)
def test_another_job_in_the_same_folder(run, images, change, words):
    run(images)
    with pytest.raises(SaccadeError, match=words):
        run(images, **change)


def test_another_model_or_listing_is_refused(run, images):
    run(images)
    plan = read_plan(Place(str(images.parent / "out")))
    assert plan is not None
    with pytest.raises(SaccadeError, match="the model's files changed"):
        check_same(Place("out"), plan, replace(plan, sha256={FULL: "0" * 64}))
    (images / "more.png").write_bytes(png(99))
    with pytest.raises(SaccadeError, match="contains a different job: the inputs changed"):
        run(images)


def test_more_errors_than_allowed(run, images, tmp_path):
    (images / "odd" / "5.png").write_bytes(b"")
    with pytest.raises(GateFailed, match=r"2 inputs could not be answered.*--max-errors allows 1"):
        run(images, max_errors=1)
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert run(images, max_errors=2).errors == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": "0"}, "--workers is '0', expected 1 to 4096"),
        ({"workers": "1:3"}, "Pass one number, or pass --runner ray"),
        ({"address": "auto"}, "--runner is local"),
        ({"batch": 65}, "--batch: found 65, expected .* at most 64"),
        ({"ask": "caption"}, "answers classify or embed"),
        ({"budget": "0.001"}, "no variant has a budget of at most 0.001"),
        ({"budget": "fast"}, "parameter budget is 'fast'"),
    ],
)
def test_wrong_options(run, images, tmp_path, options, words):
    with pytest.raises(SaccadeError, match=words):
        run(images, **options)
    assert not (tmp_path / "out").exists()


def test_wrong_sources(run, images, tmp_path):
    def refused(source: Path, words: str, **options: Any) -> None:
        with pytest.raises(SaccadeError, match=words):
            run(source, **options)
        assert not (tmp_path / "out").exists()

    refused(tmp_path / "nothing", "no such file or folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "found no input")
    (tmp_path / "text.txt").write_text("x")
    refused(tmp_path / "text.txt", "found no input")
    table = pa.table({"name": ["a", "a"], "image": [png(0), png(1)]})
    pq.write_table(table, tmp_path / "twice.parquet")
    refused(tmp_path / "twice.parquet", "1 id occurs more than once, such as 'a'", id_column="name")
    refused(tmp_path / "twice.parquet", "no column 'key'; it has 'name', 'image'", id_column="key")
    refused(tmp_path / "twice.parquet", "no column 'picture'", column="picture")
    pq.write_table(pa.table({"id": ["a"], "number": [1]}), tmp_path / "numbers.parquet")
    refused(tmp_path / "numbers.parquet", "no column of images; it has 'id', 'number'")
    pq.write_table(pa.table({"id": ["a", None], "image": [b"", b""]}), tmp_path / "no_id.parquet")
    refused(tmp_path / "no_id.parquet", "1 of 2 inputs has no id")
    (tmp_path / "junk.parquet").write_bytes(b"junk")
    refused(tmp_path / "junk.parquet", "cannot be read as Parquet")
    (tmp_path / "junk.tar").write_bytes(b"junk")
    refused(tmp_path / "junk.tar", "cannot be read as a tar file")
    (tmp_path / "junk.npz").write_bytes(b"junk")
    refused(tmp_path / "junk.npz", "cannot be read")
    (tmp_path / "bad.csv").write_text("a,b\n1,2,3\n")
    refused(tmp_path / "bad.csv", "bad.csv: row 1: cannot be read as CSV.*found 3 values")
    (images / "list.csv").write_text("path\n0.png\n")
    refused(images, "images next to list.csv")


def test_a_folder_that_is_no_job_is_left_alone(run, images, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(SaccadeError, match="is not a bulk job"):
        run(images)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_ended_before_its_plan_was_written(run, images, tmp_path):
    run(images)
    out = tmp_path / "out"
    for name in ("answers", "errors", "_SUCCESS", "manifest.json", "_plan/plan.json"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (out / "_plan" / ".plan.json.saccade-abcd1234").write_text("half")
    assert run(images).answers == COUNT - 1
    assert sorted(path.name for path in (out / "_plan").iterdir()) == [
        "listing.parquet",
        "plan.json",
    ]


@pytest.fixture
def killing(monkeypatch):
    """Kill the process of each request that `strikes`, by the driver's own list of processes."""

    def arm(strikes):
        class Killed(runners.Worker):
            def send(self, request: Any) -> None:
                super().send(request)
                if strikes(request.shard):
                    assert self._process is not None
                    self._process._popen.kill()

        monkeypatch.setattr(runners, "Worker", Killed)

    return arm


def test_a_worker_that_is_killed_costs_nothing(run, images, tmp_path, killing):
    """Each is killed at its first shard, as often as it is tried again."""
    asked: list[int] = []
    killing(lambda shard: asked.append(shard) or (shard in (0, 2) and asked.count(shard) < TRIES))
    report = run(images, shard=3, workers="2")
    assert [asked.count(shard) for shard in range(4)] == [TRIES, 1, TRIES, 1]
    assert (report.answers, report.errors) == (COUNT - 1, 1)
    assert len(answers(tmp_path / "out")) == COUNT - 1


def test_a_shard_that_ends_every_process(run, images, killing):
    killing(lambda shard: True)
    with pytest.raises(SaccadeError, match=r"Shard 0 stopped the process that ran it 3 times"):
        run(images, workers="1")


@pytest.fixture
def started(artefact, images, tmp_path):
    """Start the command in a process of its own, with a shard for each input; gives its words."""

    def start(**how):
        words = ["bulk", str(artefact), "--input", str(images), "--out", str(tmp_path / "out")]
        words += ["--shard", "1", "--workers", "1", "--batch", "1"]
        command = [sys.executable, "-m", "saccade", *words]
        return words, subprocess.Popen(command, stdout=subprocess.DEVNULL, **how)

    return start


def test_a_driver_that_is_killed_leaves_nothing_half_written(started, tmp_path):
    out = tmp_path / "out"
    words, process = started(stderr=subprocess.DEVNULL)
    while not (out / "answers").is_dir() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    for path in (out / "answers").glob("part-*"):
        pq.read_table(path)
    assert cli.run(words) == 0
    assert len(answers(out)) == COUNT - 1
    assert not list(out.rglob(".*"))


def test_interrupted(started, tmp_path):
    _, process = started(stderr=subprocess.PIPE, start_new_session=True)
    while not (tmp_path / "out" / "_plan" / "plan.json").exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, said) in ((130, b"saccade: interrupted.\n"), (0, b""))


def test_from_the_command_line(artefact, images, tmp_path, capsys):
    command = ["bulk", str(artefact), "--input", str(images), "--workers", "1", "--budget", "1/2"]
    assert cli.run([*command, "--out", str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["answers"], report["errors"], report["variant"]) == (COUNT - 1, 1, HALF)
    assert cli.run([*command, "--out", str(tmp_path / "out"), "--batch", "3"]) == 2
    assert "contains a different job" in capsys.readouterr().err


def test_a_file_is_no_folder_of_answers(run, images):
    with pytest.raises(SaccadeError, match=r"notes.txt: is a file, expected a folder.*--out"):
        run(images, out=str(images / "notes.txt"))
    with pytest.raises(SaccadeError, match="cannot be written"):
        run(images, out=str(images / "notes.txt" / "answers"))
    assert (images / "notes.txt").read_text() == "not an image"


@pytest.mark.parametrize("flag", ["input", "out"])
def test_a_store_that_was_never_reached_is_not_waited_for(flag, run, images, monkeypatch):
    asked = []

    def unreachable(root: str) -> Any:
        asked.append(root)
        raise OSError("nobody listens")

    monkeypatch.setattr(place_module, "PATIENCE_AT_FIRST_S", 0.0)
    monkeypatch.setattr(place_module, "PATIENCE_S", 3600.0)
    connected = place_module._connected
    monkeypatch.setattr(
        place_module,
        "_connected",
        lambda root: unreachable(root) if root.startswith("s3:") else connected(root),
    )
    places = {"input": str(images), flag: "s3://bucket/place?secret_key=abc"}
    with pytest.raises(SaccadeError, match=rf"s3://bucket/place: cannot.*nobody.*--{flag}") as seen:
        run(places.pop("input"), **places)
    assert "abc" not in str(seen.value) and len(asked) == 1


@pytest.mark.parametrize(("missing", "runner"), [("pyarrow", "local"), ("ray", "ray")])
def test_without_the_extra(run, images, monkeypatch, missing, runner):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingPackage, match=rf"{missing} .*pip install '\S+\[bulk\]'"):
        run(images, runner=runner)
    assert not (images.parent / "out").exists()


def test_a_model_that_fails_says_why(artefact, images, tmp_path):
    """Inputs are not to blame: the job ends, and goes on once the model is mended."""
    broken = artefacts(tmp_path / "broken", checkpoint=False)
    graph = onnx_model()
    (rows,) = (one for one in graph.graph.initializer if one.name == "rows")
    rows.CopyFrom(onnx.numpy_helper.from_array(np.array([1, 16]), "rows"))
    add_variant(broken, FULL, "fp32", graph)
    with pytest.raises(SaccadeError, match=r"could not be answered.*Reshape"):
        bulk(broken, BulkOptions(str(images), str(tmp_path / "out"), workers="1"))
    assert not (tmp_path / "out" / "_SUCCESS").exists()
