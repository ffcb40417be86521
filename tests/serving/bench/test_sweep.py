# SPDX-License-Identifier: Apache-2.0
"""`sweep` on a tiny checkpoint: what it leaves, what it refuses, and how it goes on."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from saccade.core.errors import SaccadeError
from saccade.core.worker import Worker, WorkerEnded
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import read_frontier
from saccade.serving.bench.bench import bench
from saccade.serving.bench.options import BenchOptions, SweepOptions
from saccade.serving.bench.sweep import points
from saccade.serving.bench.sweep.points import PointTask, Refusal
from saccade.serving.bench.sweep.sweep import sweep
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.options import RepositoryOptions

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install '.[bench]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is missing: pip install '.[cpu]'")

PASSED = ["nac-b1000-fp32", "nac-b1000-int8", "nac-b0500-fp32"]
FAILED = "nac-b0500-int8"
WHY = "relative error is 0.5, at most 0.1 is allowed"


def prepared_from(exported: Path) -> Callable[..., Iterator[tuple[str, Refusal]]]:
    """Exports taken from a folder of fp32 files, which also stand for int8; one point fails."""

    def prepared(
        module: str, tasks: dict[str, PointTask], kind: type, *, at_a_time: int
    ) -> Iterator[tuple[str, Refusal]]:
        assert module == points.__name__
        for key, task in tasks.items():
            answer = Refusal("export", WHY)
            if key != FAILED:
                copy_variant(exported, Path(task.place, "export"), key)
                answer = points.main(task)
            yield key, answer

    return prepared


def copy_variant(source: Path, target: Path, name: str) -> None:
    """The fp32 variant of that budget under that name, other bytes if it is to be another one."""
    import onnx

    target.mkdir(parents=True)
    shutil.copyfile(source / "nac.safetensors", target / "nac.safetensors")
    stem, precision = name[: -len("-fp32")] + "-fp32", name.rpartition("-")[2]
    proto = onnx.load(source / f"{stem}.onnx")
    proto.doc_string = precision
    data = proto.SerializeToString()
    (target / f"{name}.onnx").write_bytes(data)
    manifest = json.loads((source / f"{stem}.manifest.json").read_bytes())
    manifest["variant"] |= {"name": name, "precision": precision}
    digest = hashlib.sha256(data).hexdigest()
    manifest["file"] = {"name": f"{name}.onnx", "sha256": digest, "bytes": len(data)}
    (target / f"{name}.manifest.json").write_text(json.dumps(manifest))


def can_serve() -> bool:
    try:
        check_installation(find_installation())
    except SaccadeError:
        return False
    return True


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    place = tmp_path_factory.mktemp("sweep")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (400, 8, 8, 1), dtype=np.uint8)
    np.savez(place / "noise.npz", images=images, labels=np.arange(400) % 10)
    return SweepOptions(
        place / "swept", str(place / "noise.npz"), budget=(1, 0.5), precision=("fp32", "int8"),
        server=can_serve(), seconds=0.1, rounds=1, concurrency=(1,), jobs=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def swept(asked, tiny_checkpoint, tiny_folder):
    with mock.patch.object(points, "each_alone", prepared_from(tiny_folder)):
        return sweep(tiny_checkpoint, asked)


def test_a_failed_point_stands_in_the_report_and_the_others_are_measured(swept, asked):
    full = json.loads((asked.out / "report" / "report.json").read_bytes())
    assert [variant["variant"] for variant in full["variants"]] == PASSED
    assert swept.exit_code == 1
    (failed,) = full["failed"]
    assert (failed["variant"], failed["stage"], failed["reason"]) == (FAILED, "export", WHY)
    assert WHY in (asked.out / "report" / "report.html").read_text()
    entries = read_frontier(asked.out / "artefacts" / "frontier.json").entries
    assert {entry.variant for entry in entries} == set(PASSED)
    for variant in full["variants"]:
        costs = variant["costs"]
        assert all(one["least"] <= one["value"] <= one["most"] for one in costs.values())
        # The runtime alone takes tens of MiB; a tiny model adds next to nothing.
        assert 20 * 2**20 < costs["memory"]["value"] == variant["memory_bytes"] < 500 * 2**20
        assert costs["embedding bytes"]["value"] == 32 * 4
        assert variant["samples"]["memory"][0]["before_bytes"] < costs["memory"]["value"]
        if asked.server:  # both precisions through a router, though it hides one of them
            assert {"concurrency_1", "router_concurrency_1"} == set(variant["grpc"])
            assert costs["latency"]["value"] == variant["grpc"]["router_concurrency_1"]["p95_ms"]


def test_the_artefacts_serve_and_are_measured_as_they_are(swept, asked, tmp_path):
    artefacts = Path(shutil.copytree(asked.out / "artefacts", tmp_path / "artefacts"))
    deployment = deploy(artefacts, RepositoryOptions(tmp_path / "repository"))
    assert (sorted(deployment.variants), deployment.unmeasured) == (sorted(PASSED), ())
    options = BenchOptions(tmp_path / "report", asked.data, server=False, seconds=0.01, rounds=1)
    variants = bench(artefacts, options).full["variants"]
    assert [variant["variant"] for variant in variants] == PASSED
    for one, other in zip(variants, swept.full["variants"], strict=True):
        assert one["score"] == other["score"]


def pieces(folder: Path) -> dict[str, int]:
    paths = (path for path in (folder / "points").rglob("*.json") if not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in paths}


@pytest.mark.journey
def test_killed_it_goes_on_and_does_nothing_twice(
    swept, asked, tiny_checkpoint, tmp_path, eventually
):
    folder = Path(shutil.copytree(asked.out, tmp_path / "swept", copy_function=os.link))
    point = folder / "points" / PASSED[1]
    for name in ("in-process-0", "memory-0", "served-0"):
        (point / f"{name}.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "report")
    before, done = pieces(folder), pieces(asked.out)
    command = [sys.executable, "-m", "saccade", "sweep", str(tiny_checkpoint), "--out", str(folder)]
    command += ["--data", str(asked.data), "--budget", "1,0.5", "--precision", "fp32,int8"]
    command += ["--seconds", "0.1", "--rounds", "1", "--concurrency", "1"]
    environment = os.environ | {"SWEPT": str(folder)}
    running = subprocess.Popen(command + ["--no-server"] * (not asked.server), env=environment)
    eventually((point / "memory-0.json").exists, 60)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (folder / "report").exists()
    os.utime(point / "memory-0.json", (4e9, 4e9))
    kept = pieces(folder)
    assert (
        before.items() <= kept.items() and str(Path("points", PASSED[1], "memory-0.json")) in kept
    )
    eventually(lambda: not processes_of(folder), 10)
    with mock.patch.object(points, "each_alone", side_effect=lambda *_, **__: iter(())) as exports:
        again = sweep(tiny_checkpoint, replace(asked, out=folder))
    assert exports.call_args.args[1] == {}
    after = pieces(folder)
    assert kept.items() <= after.items() and set(after) == set(done)
    assert [
        variant["variant"] for variant in again.full["variants"]
    ] == PASSED and again.exit_code == 1
    assert again.full["date"] == "2096-10-02T07:06:40+00:00"  # of the newest piece, not of the page
    assert [path.name for path in folder.glob(".*")] == [".lock"]


def test_what_cannot_be_measured_fails_alone_and_is_tried_again_when_asked(
    swept, asked, tiny_checkpoint, tmp_path
):
    folder = Path(shutil.copytree(asked.out, tmp_path / "swept", copy_function=os.link))
    (folder / "points" / PASSED[2] / "memory-0.json").unlink()
    (folder / "points" / PASSED[2] / ".export.half").mkdir()  # of a process that was killed
    options = replace(asked, out=folder)
    with mock.patch.object(Worker, "ask", side_effect=WorkerEnded("killed", "Killed")):
        report = sweep(tiny_checkpoint, options)
    assert [variant["variant"] for variant in report.full["variants"]] == PASSED[:2]
    failed = {failure.variant: (failure.stage, failure.reason) for failure in report.failures}
    assert failed[PASSED[2]][0] == "measure" and "(killed): Killed" in failed[PASSED[2]][1]
    left = {manifest.variant.name for manifest in ArtefactFolder(folder / "artefacts").manifests}
    assert left == set(PASSED[:2]) and not list(folder.rglob(".export*"))
    with mock.patch.object(points, "each_alone", prepared_from(folder)):
        again = sweep(tiny_checkpoint, replace(options, retry=True))
    assert [variant["variant"] for variant in again.full["variants"]] == PASSED
    assert [failure.variant for failure in again.failures] == [FAILED]


def processes_of(folder: Path) -> list[int]:
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"SWEPT={folder}".encode() in path.read_bytes().split(b"\0"):
                processes.append(int(path.parent.name))
    return processes


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "rounds": ({"rounds": 2}, "rounds is 2, was 1"),
    "budgets": ({"budget": (1, 0.25)}, "points is"),
    "data": ({"limit": 40}, "limit is 40, was null"),
    "split": ({"split": "all"}, 'split is "all", was null'),
    "server": ({"concurrency": (1, 2)}, r"concurrency is \[1, 2\], was \[1\]"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_other_options_are_refused_with_what_differs(case, swept, asked, tiny_checkpoint):
    change, words = CHANGED[case]
    before = pieces(asked.out)
    with pytest.raises(SaccadeError, match=words):
        sweep(tiny_checkpoint, replace(asked, **change))
    assert pieces(asked.out) == before


def test_another_checkpoint_a_strange_folder_and_a_second_sweep_are_refused(
    swept, asked, tiny_checkpoint, tiny_nac, tmp_path
):
    other = tiny_nac(tmp_path / "nac.safetensors", seed=1).path
    with pytest.raises(SaccadeError, match=r"checkpoint is .*, was .*--force"):
        sweep(other, asked)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(SaccadeError, match="is not a sweep"):
        sweep(other, replace(asked, out=tmp_path / "photos"))
    import fcntl

    with (asked.out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SaccadeError, match="another sweep is running"):
            sweep(tiny_checkpoint, asked)


def test_what_does_not_fit_is_refused_before_any_export_and_costs_nothing(
    swept, asked, tiny_checkpoint, tmp_path
):
    images = np.zeros((400, 9, 8, 1), np.uint8)
    np.savez(tmp_path / "large.npz", images=images, labels=np.arange(400) % 10)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"data": str(tmp_path / "large.npz")}, "9, 8, 1"),
        ({"task": "caption"}, "top1, knn, probe"),
        ({"slots": tmp_path / "none.json"}, "only checkpoints of family 'sparo'"),
    ]
    before = pieces(asked.out)
    with mock.patch.object(points, "each_alone", side_effect=AssertionError):
        for changes, words in wrong:
            with pytest.raises(SaccadeError, match=words):
                sweep(tiny_checkpoint, replace(asked, out=tmp_path / "swept", **changes))
            with pytest.raises(SaccadeError, match=words):
                sweep(tiny_checkpoint, replace(asked, force=True, **changes))
    assert not (tmp_path / "swept").exists() and pieces(asked.out) == before


def test_a_crashed_export_says_nothing_of_the_point(asked, tiny_checkpoint, tmp_path):
    def killed(
        module: str, tasks: dict[str, PointTask], kind: type, *, at_a_time: int
    ) -> Iterator[tuple[str, WorkerEnded]]:
        yield from ((key, WorkerEnded("killed by SIGKILL", "Killed")) for key in tasks)

    options = replace(asked, out=tmp_path / "swept")
    with mock.patch.object(points, "each_alone", killed):
        with pytest.raises(SaccadeError, match=r"stopped \(killed by SIGKILL\): Killed.*--jobs 1"):
            sweep(tiny_checkpoint, options)
    assert not list((tmp_path / "swept").rglob("failed.json"))
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(points, "each_alone", side_effect=full):
        with pytest.raises(SaccadeError, match=r"No space left.*make room"):
            sweep(tiny_checkpoint, options)
