# SPDX-License-Identifier: Apache-2.0
"""Bulk jobs under fire: drivers, workers, nodes and stores that die, for either runner.

    make check-scale

Each id comes out once, with the bytes of an undisturbed run. Moments are drawn from a seed, as
numbers of shards that are done: a slow machine is struck at the same points.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_places import FAKES, computed_artefact, use_fake
from object_store import ObjectStore, program
from PIL import Image
from places import TESTS
from tiny_artefacts import artefacts

from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import Place

COUNT, SHARD = 6_000, 20
SHARDS = COUNT // SHARD
KILLS = 10
RUNNERS = ("local", "ray")
WAIT_S = 900.0


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artefacts(tmp_path_factory.mktemp("scale") / "artefact", checkpoint=False)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for index in range(COUNT):
        name = folder / f"{index:05}.png"
        Image.fromarray(rng.integers(0, 256, (9, 7), dtype=np.uint8)).save(name)
    for index in (17, 1717):
        (folder / f"{index:05}.png").write_bytes(b"no picture")
    return folder


def parts(out: Path | Place) -> dict[str, bytes]:
    """Every file of answers and errors."""
    place = out if isinstance(out, Place) else Place(str(out))
    return {
        f"{kind}/{name}": place.join(f"{kind}/{name}").read()
        for kind in ("answers", "errors")
        for name, _ in place.join(kind).files()
    }


@pytest.fixture(scope="module")
def undisturbed(
    artefact: Path, images: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    report = bulk(artefact, BulkOptions(str(images), str(out), shard=SHARD))
    assert (report.answers, report.errors) == (COUNT - 2, 2)
    return parts(out)


def done(out: Path) -> int:
    """Shards that are done."""
    return len(list((out / "answers").iterdir())) if (out / "answers").is_dir() else 0


def wait_for(out: Path, shards: int, process: "subprocess.Popen[bytes] | None" = None) -> None:
    end = time.monotonic() + WAIT_S
    while done(out) < shards and (process is None or process.poll() is None):
        assert time.monotonic() < end, f"{done(out)} of {shards} shards after {WAIT_S:g} s"
        time.sleep(0.005)


def started(artefact: Path, images: Path, out: Path, runner: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "saccade", "bulk", str(artefact), "--input", str(images)]
    command += ["--out", str(out), "--shard", str(SHARD), "--runner", runner, "--workers", "2"]
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_driver_killed_ten_times(
    artefact: Path, images: Path, undisturbed: dict[str, bytes], tmp_path: Path, runner: str
) -> None:
    out, moments = tmp_path / "out", random.Random(runner)
    for kill in range(KILLS):
        # Between two looks some more get done: the last ones have to be there still.
        process = started(artefact, images, out, runner)
        wait_for(out, moments.randint(kill, kill + 1) * SHARDS // (KILLS + 2) + 1, process)
        assert process.poll() is None, "the job ended before it was killed"
        process.kill()
        process.wait()
        assert not (out / "_SUCCESS").exists()
    assert started(artefact, images, out, runner).wait(WAIT_S) == 0
    assert parts(out) == undisturbed


@pytest.mark.parametrize("runner", RUNNERS)
def test_workers_killed_ten_times(
    artefact: Path, images: Path, undisturbed: dict[str, bytes], tmp_path: Path, runner: str
) -> None:
    out, moments, killed = tmp_path / "out", random.Random(runner), 0
    process = started(artefact, images, out, runner)
    while killed < KILLS and process.poll() is None:
        wait_for(out, (killed + 1) * SHARDS // (KILLS + 2), process)
        found = workers_of(process.pid, runner)
        if found:
            os.kill(moments.choice(found), signal.SIGKILL)
            killed += 1
    assert process.wait(WAIT_S) == 0
    assert killed == KILLS
    assert parts(out) == undisturbed


def workers_of(driver: int, runner: str) -> list[int]:
    """Processes of a driver that run shards."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if runner == "local" and "saccade.core.worker\0" in words and "bulk.shard" in words:
            found.append(int(path.parent.name))
        if runner == "ray" and words.startswith("ray::MapWorker"):
            found.append(int(path.parent.name))
    return [pid for pid in found if driver in ancestors(pid)]


def ancestors(pid: int) -> Iterator[int]:
    """The processes above one."""
    while pid > 1:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        pid = int(fields[1])
        yield pid


def test_a_node_of_a_cluster_dies(
    artefact: Path, images: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """A head without room for work, three nodes with one core each; one goes in the middle."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    out = tmp_path / "out"
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        cluster.wait_for_nodes()
        outcome: list[Any] = []
        options = BulkOptions(
            str(images), str(out), shard=SHARD, runner="ray", address=cluster.address, workers="1:3"
        )
        job = threading.Thread(target=lambda: outcome.append(bulk(artefact, options)))
        job.start()
        wait_for(out, SHARDS // 3)
        cluster.remove_node(nodes[1], allow_graceful=False)
        job.join(WAIT_S)
        assert outcome, "the job did not end well"
        assert (outcome[0].answers, outcome[0].errors) == (COUNT - 2, 2)
    finally:
        cluster.shutdown()
    assert parts(out) == undisturbed


def test_actors_have_a_gpu_each(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of which Ray is told; TensorRT and driver are fakes that only see what Ray shows."""
    ray = pytest.importorskip("ray")
    folder, engines = computed_artefact(tmp_path / "artefact", "1:8:64")
    use_fake(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(FAKES), str(TESTS))))
    monkeypatch.setenv("FAKE_GPUS", "8.9,8.9")
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    few = tmp_path / "images"
    few.mkdir()
    for path in sorted(images.iterdir())[:200]:
        (few / path.name).write_bytes(path.read_bytes())
    plans = {"runtime": "tensorrt", "engines": (str(engines),), "workers": "2:2"}
    hook = {"worker_process_setup_hook": "fake_gpus.install"}
    with ray.init(
        num_cpus=4, num_gpus=2, include_dashboard=False, runtime_env=hook, log_to_driver=False
    ):
        options = BulkOptions(
            str(few), str(tmp_path / "out"), shard=SHARD, batch=8, runner="ray", **plans
        )
        report = bulk(folder, options)
    assert (report.answers, report.errors) == (199, 1)
    assert {path.read_text() for path in tmp_path.glob("[0-9]*")} == {"0", "1"}
    on_cpu = BulkOptions(str(few), str(tmp_path / "cpu"), shard=SHARD, batch=8)
    bulk(folder, on_cpu)
    assert parts(tmp_path / "out") == parts(tmp_path / "cpu")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    program()
    running = ObjectStore(tmp_path / "store")
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.start()
    yield running
    running.stop()


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_store_that_stops_in_the_middle(
    artefact: Path, images: Path, store: ObjectStore, tmp_path: Path, runner: str
) -> None:
    """Inputs and answers in a bucket whose server dies three times for some seconds."""
    source, count = Place(store.address("images")), 600
    for path in sorted(images.iterdir())[:count]:
        source.join(path.name).write(path.read_bytes())
    out = Place(store.address("out"))
    options = BulkOptions(source.root, out.root, shard=SHARD, runner=runner, workers="2")
    outcome: list[Any] = []
    job = threading.Thread(target=lambda: outcome.append(bulk(artefact, options)))
    job.start()
    for fault in range(3):
        end = time.monotonic() + WAIT_S
        while len(list(out.join("answers").files())) < (fault + 1) * 5:
            assert time.monotonic() < end
            time.sleep(0.05)
        store.stop()
        time.sleep(3)
        store.start()
    job.join(WAIT_S)
    assert outcome, "the job did not end well"
    assert (outcome[0].answers, outcome[0].errors) == (count - 1, 1)
    first = sorted(images.iterdir())[:count]
    local = tmp_path / "images"
    local.mkdir()
    for path in first:
        (local / path.name).write_bytes(path.read_bytes())
    bulk(artefact, BulkOptions(str(local), str(tmp_path / "out"), shard=SHARD, workers="2"))
    assert parts(out) == parts(tmp_path / "out")


@pytest.mark.parametrize("package", ["pyarrow", "polars", "duckdb", "datasets"])
def test_read_by_others(artefact: Path, images: Path, tmp_path: Path, package: str) -> None:
    """Without a word from us: as many rows as answers, ids and labels as we wrote them."""
    module = pytest.importorskip(package)
    bulk(artefact, BulkOptions(str(images), str(tmp_path / "out"), shard=2_500))
    place = tmp_path / "out" / "answers"
    read: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "pyarrow": lambda: (
            __import__("pyarrow.dataset").dataset.dataset(place).to_table().to_pylist()
        ),
        "polars": lambda: module.read_parquet(place).to_dicts(),
        "duckdb": lambda: (
            module.sql(f"select * from '{place}/*.parquet'").to_arrow_table().to_pylist()
        ),
        "datasets": lambda: module.load_dataset(
            "parquet", data_dir=str(place), split="train", cache_dir=str(tmp_path / "cache")
        ).to_list(),
    }
    rows = read[package]()
    assert len(rows) == len({row["id"] for row in rows}) == COUNT - 2
    assert {row["variant"] for row in rows} == {"tiny-b1000-fp32"}
    assert all(len(row["labels"]) == len(row["probabilities"]) == 3 for row in rows)
