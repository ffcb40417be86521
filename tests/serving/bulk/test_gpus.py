# SPDX-License-Identifier: Apache-2.0
"""Bulk jobs on GPUs: those of a fake driver, with the fake TensorRT, for there is none here."""

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_gpus
import numpy as np
import onnxruntime
import pytest
from engine_places import FAKES, computed_artefact, use_fake
from fake_gpus import CPU, CUDA
from PIL import Image
from places import TESTS
from tiny_artefacts import FULL

from saccade.core.errors import SaccadeError, ShapeError
from saccade.exporter.runtimes.gpu import gpu_at_hand
from saccade.exporter.runtimes.tensorrt import loading
from saccade.exporter.runtimes.tensorrt.engine_manifest import (
    read_engine_manifest,
    write_engine_manifest,
)
from saccade.serving.bulk import runners
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.shard import BulkJob
from saccade.serving.local.in_process import in_parts
from saccade.serving.repository import deploy as deploy_module
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.repository import open_repository

pytest.importorskip("pyarrow")
import pyarrow.parquet as pq

COUNT, BATCH = 12, 4


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    """One variant, with a plan for 8.9 of up to so many images."""
    place = tmp_path_factory.mktemp("gpus") / "artefact"
    return computed_artefact(place, f"1:2:{BATCH}")[0]


@pytest.fixture(scope="module")
def engines(artefact):
    """The folder of that plan, and of one for 9.0."""
    ada = artefact / "engines" / "tensorrt-8.9"
    hopper = Path(shutil.copytree(ada, ada.with_name("tensorrt-9.0")))
    changed(hopper, compute_capabilities=("9.0",))
    return str(ada), str(hopper)


def changed(engines: Path, **changes: Any) -> str:
    """Change the manifest of a plan; the folder."""
    path = engines / f"{FULL}.manifest.json"
    write_engine_manifest(engines, replace(read_engine_manifest(path), **changes))
    return str(engines)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for index in range(COUNT):
        pixels = np.random.default_rng(index).integers(0, 256, (9, 7), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02}.png")
    return str(folder)


@pytest.fixture
def cards(monkeypatch, tmp_path):
    """The GPUs of this machine, and the folder in which its workers write what they see."""

    def put(capabilities: str, visible: str | None = None) -> Path:
        before = os.environ.get("PYTHONPATH")
        use_fake(monkeypatch)
        paths = [str(FAKES), str(TESTS), *filter(None, [before])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        monkeypatch.setenv("FAKE_GPUS", capabilities)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        seen = tmp_path / "seen"
        seen.mkdir(exist_ok=True)
        monkeypatch.setenv("FAKE_SEEN", str(seen))
        monkeypatch.setattr(ctypes, "CDLL", fake_gpus.library)
        monkeypatch.setattr(loading, "gpu_at_hand", gpu_at_hand)  # by that driver
        monkeypatch.setattr(runners, "main", fake_gpus.main)
        return seen

    return put


def job(artefact: Path, images: str, out: Path, **options: Any) -> Any:
    """Run a job whose requests fit the plans."""
    return bulk(artefact, BulkOptions(images, str(out), **{"batch": BATCH, "shard": 3} | options))


def answers(out: Path) -> list[dict[str, Any]]:
    return pq.read_table(out / "answers").sort_by("id").to_pylist()


def on_plans(engines: tuple[str, ...], **options: Any) -> dict[str, Any]:
    return {"runtime": "tensorrt", "engines": engines, **options}


def test_plans_give_the_answers_of_cpus(artefact, engines, images, tmp_path, cards):
    """Two workers, each with the one GPU of its own kind and the plan for that."""
    on_cpu, out = tmp_path / "cpu", tmp_path / "gpu"
    job(artefact, images, on_cpu, workers="1")
    seen = cards("8.9,9.0,8.9,9.0", visible="3, 2")
    report = job(artefact, images, out, **on_plans(engines))
    assert (report.answers, report.errors) == (COUNT, 0)
    assert answers(out) == answers(on_cpu)
    assert sorted(path.read_text() for path in seen.iterdir()) == ["2", "3"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["runtime"], manifest["processor"]) == ("tensorrt", "gpu")
    digest = read_engine_manifest(Path(engines[0]) / f"{FULL}.manifest.json").file.sha256
    assert manifest["engines"] == {f"{FULL} 8.9": digest, f"{FULL} 9.0": digest}

    with pytest.raises(SaccadeError, match="the runtime changed from tensorrt to onnxruntime"):
        job(artefact, images, out, workers="1")
    with pytest.raises(SaccadeError, match="the runtime changed from onnxruntime to tensorrt"):
        job(artefact, images, on_cpu, **on_plans(engines))
    with pytest.raises(SaccadeError, match="the plans changed"):
        cards("8.9")
        job(artefact, images, out, **on_plans(engines[:1]))


def test_more_workers_than_gpus_share_them(artefact, engines, images, tmp_path, cards):
    seen = cards("8.9,8.9")
    job(artefact, images, tmp_path / "out", workers="3", **on_plans(engines[:1]))
    assert sorted(path.read_text() for path in seen.iterdir()) == ["0", "0", "1"]


@pytest.mark.parametrize("given", [{"runtime": "tensorrt"}, {"instances": "gpu"}])
@pytest.mark.parametrize(("capabilities", "visible"), [("", None), ("8.9", "")])
def test_a_machine_without_a_gpu(
    artefact, engines, images, tmp_path, cards, given, capabilities, visible
):
    cards(capabilities, visible)
    plans = engines[:1] if "runtime" in given else ()
    words = r"has no GPU.*--runner ray.*or on CPUs with: --runtime onnxruntime --instances cpu"
    with pytest.raises(SaccadeError, match=words):
        job(artefact, images, tmp_path / "out", engines=plans, **given)
    assert not (tmp_path / "out").exists()


def test_what_the_gpus_at_hand_cannot_run(artefact, engines, images, tmp_path, cards, monkeypatch):
    """Each is known before anything is written."""

    def refused(words: str, **options: Any) -> None:
        with pytest.raises(SaccadeError, match=words):
            job(artefact, images, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    cards("8.9,12.0")
    words = r"has plans for compute capability 8\.9, 9\.0, but a card of 12\.0 has 12\.0\. Run "
    refused(words, **on_plans(engines))
    cards("8.9")
    refused(r"takes up to 4 images, but a request may have 64\. Pass --batch 4, or build", batch=64,
            **on_plans(engines))  # fmt: skip
    refused(
        rf"has no {CUDA}, only .*pip uninstall onnxruntime && pip install .*\[gpu\]",
        instances="gpu",
    )
    monkeypatch.setattr(sys.modules["tensorrt"], "__version__", "11.2")
    refused(r"built with TensorRT 10\.16\.0\.fake, but 11\.2 is installed", **on_plans(engines))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runtime": "tensorrt"}, "--runtime tensorrt needs --engines"),
        (
            {"engines": ("plans",)},
            "--engines is for the runtime tensorrt only, and the runtime is onnxruntime",
        ),
        (on_plans(("plans",), instances="cpu"), "--instances is cpu, but plans run on GPUs only"),
        (on_plans(("plans",), threads=2), "--threads is for the runtime onnxruntime only"),
    ],
)
def test_options_that_a_runtime_does_not_have(options, words):
    with pytest.raises(SaccadeError, match=words):
        BulkOptions("images", "out", **options)


def test_a_worker_without_its_gpu_or_with_another_plan(artefact, engines, images, tmp_path, cards):
    """What a worker of another machine finds by itself."""
    cards("8.9")
    deploy(artefact, RepositoryOptions(tmp_path / "repository", **on_plans(engines), max_images=4))
    (model,) = open_repository(tmp_path / "repository").models

    def refused(words: str) -> None:
        with pytest.raises(SaccadeError, match=words):
            model.served.runner(model)

    cards("12.0")
    refused(r"has plans for compute capability 8\.9, 9\.0, but a card of 12\.0 has")
    cards("")
    refused(r"no driver \(libcuda.so.1\) or no device was found")
    cards("9.0")
    plan = model.version / "model-9.0.plan"
    plan.write_bytes(plan.read_bytes()[:-1] + b" ")
    refused(r"model-9\.0\.plan: SHA-256 is .* it is not loaded")


def test_a_plan_runs_the_batch_in_parts_that_it_takes(
    artefact, engines, tmp_path, cards, monkeypatch
):
    """A router's own loop, such as a search of captions, asks for more rows than a request has."""
    cards("9.0")
    monkeypatch.setattr(loading, "CudaMemory", fake_gpus.HostMemory)
    deploy(artefact, RepositoryOptions(tmp_path / "repository", **on_plans(engines), max_images=4))
    (model,) = open_repository(tmp_path / "repository").models
    run = model.served.runner(model)
    image = np.random.default_rng(0).integers(0, 256, (11, 4, 4, 1), dtype=np.uint8)
    with pytest.raises(ShapeError, match=r"expected \[1, 4, 4, 1\] to \[4, 4, 4, 1\]"):
        run({"image": image})
    answers = in_parts(run, model.config.max_batch_size)({"image": image})
    alone = [run({"image": image[at : at + 1]})["logits"] for at in range(11)]
    np.testing.assert_allclose(answers["logits"], np.concatenate(alone), rtol=1e-5)


def test_shapes_that_a_plan_does_not_take_are_errors_of_their_inputs(
    artefact, engines, images, tmp_path, cards, monkeypatch
):
    """The job goes on."""
    # A plan whose images are all of one size is refused before; inputs of many sizes are not.
    monkeypatch.setattr(deploy_module, "broken_rules", lambda *_: [])
    narrow = Path(shutil.copytree(engines[0], tmp_path / "narrow"))
    profile = {"min": (1, 5, 4, 1), "opt": (2, 5, 4, 1), "max": (BATCH, 5, 4, 1)}
    changed(narrow, profiles={"image": profile})
    cards("8.9")
    report = job(artefact, images, tmp_path / "out", **on_plans((str(narrow),)))
    assert (report.answers, report.errors) == (0, COUNT)
    (reason,) = set(pq.read_table(tmp_path / "out" / "errors")["reason"].to_pylist())
    assert reason.startswith("'image' is [1, 4, 4, 1], expected [1, 5, 4, 1] to [4, 5")


@pytest.fixture
def cuda(monkeypatch):
    """ONNX Runtime as if it were built with its CUDA provider."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", fake_gpus.Session)
    monkeypatch.setattr(fake_gpus.Session, "asked", ())
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("a library that is missing"))
    return fake_gpus.Session


@pytest.mark.parametrize(
    ("instances", "wanted"), [("cpu", [CPU]), ("gpu", [(CUDA, {"use_tf32": "0"}), CPU])]
)
def test_the_provider_of_onnx_runtime(artefact, tmp_path, cuda, capfd, instances, wanted):
    deploy(artefact, RepositoryOptions(tmp_path / "repository", instances=instances))
    (model,) = open_repository(tmp_path / "repository").models
    run = model.served.runner(model)
    assert cuda.asked[-1] == wanted
    out, err = capfd.readouterr()
    assert (out, "a library" in err) == ("", instances == "gpu")
    assert run({"image": np.ones((2, 4, 4, 1), np.uint8)})["logits"].shape == (2, 3)


def test_a_provider_that_does_not_start_is_refused(artefact, tmp_path, cuda, monkeypatch):
    """ONNX Runtime itself would go on with the processor, in silence."""
    monkeypatch.setattr(cuda, "started", (CPU,))
    deploy(artefact, RepositoryOptions(tmp_path / "repository", instances="gpu"))
    (model,) = open_repository(tmp_path / "repository").models
    with pytest.raises(SaccadeError, match=f"could not start {CUDA}"):
        model.served.runner(model)


@pytest.mark.usefixtures("cuda")
def test_a_job_by_the_cuda_provider(artefact, images, tmp_path, cards, monkeypatch):
    on_cpu, out = tmp_path / "cpu", tmp_path / "gpu"
    job(artefact, images, on_cpu, workers="1")
    seen = cards("8.9")
    monkeypatch.setenv("FAKE_CUDA", "1")
    report = job(artefact, images, out, instances="gpu")
    assert (report.answers, [path.read_text() for path in seen.iterdir()]) == (COUNT, ["0"])
    assert answers(out) == answers(on_cpu)
    with pytest.raises(SaccadeError, match="the processor changed from gpu to cpu"):
        job(artefact, images, out, workers="1")


class Rows:
    """What the driver asks of Ray Data, with one shard that is done."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def map_batches(self, actor: Any, **options: Any) -> "Rows":
        self.asked = options
        return self

    def iter_rows(self) -> Iterator[dict[str, int]]:
        yield {"shard": 0, "answers": 3, "errors": 0}


@pytest.fixture
def ray(monkeypatch):
    """A module in Ray's place: a cluster of two machines with three GPUs each."""
    module: Any = ModuleType("ray")
    module.rows = Rows()
    module.resources = {"CPU": 16.0, "GPU": 6.0}
    module.is_initialized = lambda: False
    module.init = module.shutdown = lambda **_: None
    module.cluster_resources = lambda: module.resources
    module.exceptions = SimpleNamespace(RayError=ZeroDivisionError)
    module.data = ModuleType("ray.data")
    module.data.DataContext = SimpleNamespace(get_current=SimpleNamespace)
    module.data.ActorPoolStrategy = lambda **sizes: sizes
    module.data.from_items = lambda *_, **__: module.rows
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.data", module.data)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    return module


@pytest.mark.parametrize(
    ("options", "pool", "each"),
    [
        ({}, {"min_size": 1, "max_size": 16}, {"num_cpus": 1}),
        ({"threads": 4}, {"min_size": 1, "max_size": 4}, {"num_cpus": 4}),
        ({"instances": "gpu"}, {"min_size": 1, "max_size": 6}, {"num_cpus": 1, "num_gpus": 1}),
        (
            {"instances": "gpu", "workers": "2:9", "threads": 3},
            {"min_size": 2, "max_size": 9},
            {"num_cpus": 3, "num_gpus": 1},
        ),
    ],
)
def test_what_each_actor_of_ray_is_given(ray, tmp_path, options, pool, each):
    (tmp_path / "repository").mkdir()
    with runners.runner_of(BulkOptions("images", "out", runner="ray", **options)) as runner:
        list(runner.run(BulkJob(str(tmp_path / "out"), str(tmp_path / "repository")), [0]))
    asked = ray.rows.asked
    assert asked["compute"] == pool
    assert {key: value for key, value in asked.items() if key.startswith("num_")} == each


def test_a_cluster_without_a_gpu(ray, artefact, engines, images, tmp_path, capsys):
    """Unless an autoscaler is to bring some, of which a range of workers speaks."""
    ray.resources = {"CPU": 16.0}
    for given in ({}, {"address": "auto"}, {"workers": "1:4"}):
        options = on_plans(engines, runner="ray", **given)
        with pytest.raises(SaccadeError, match=r"has no GPU.*--address.*--workers MIN:MAX.*CPUs"):
            job(artefact, images, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
    options = on_plans(engines, runner="ray", address="auto", workers="1:4")
    with runners.runner_of(BulkOptions("images", "out", **options)):
        assert "waiting for its autoscaler" in capsys.readouterr().err
