# SPDX-License-Identifier: Apache-2.0
"""A plan is executable code: what is refused before TensorRT sees it, and how one is run."""

import gc
import hashlib
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_places import ADA, HOPPER, HostMemory, use_fake, use_library
from tiny_artefacts import FULL, artefacts

from saccade.core.errors import MissingPackage, SaccadeError, ShapeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import FileEntry
from saccade.exporter.runtimes import onnxruntime as onnx_module
from saccade.exporter.runtimes.gpu import Gpu
from saccade.exporter.runtimes.runtime import peers_of
from saccade.exporter.runtimes.tensorrt import loading
from saccade.exporter.runtimes.tensorrt import runtime as runtime_module
from saccade.exporter.runtimes.tensorrt.build import BuildOptions, build
from saccade.exporter.runtimes.tensorrt.engine_manifest import (
    read_engine_manifest,
    read_engines,
    write_engine_manifest,
)
from saccade.exporter.runtimes.tensorrt.loading import engine_runner, load_engine, runner_of


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one plan of the fake; copy it to change it."""
    folder = artefacts(tmp_path_factory.mktemp("engines") / "artefact", checkpoint=False)
    with pytest.MonkeyPatch.context() as patch:
        use_fake(patch)
        return build(folder, BuildOptions("tensorrt", variant=(FULL,), batch="1:2:4")).folder


@pytest.fixture
def plan(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan that a test may change."""
    use_fake(monkeypatch)
    return shutil.copytree(engines, tmp_path / "engines") / f"{FULL}.plan"


def replace_plan(plan: Path, data: bytes) -> None:
    """Other bytes, and a manifest that knows their hash."""
    plan.write_bytes(data)
    manifest = read_engine_manifest(plan.with_name(f"{FULL}.manifest.json"))
    file = FileEntry(plan.name, hashlib.sha256(data).hexdigest(), len(data))
    write_engine_manifest(plan.parent, replace(manifest, file=file))


def test_an_engine_is_a_function_of_named_arrays(plan: Path) -> None:
    run = runner_of(load_engine(plan), HostMemory())
    image = np.full((2, 4, 4, 1), 3, np.uint8)
    answers = run({"image": image})
    assert {name: answer.shape for name, answer in answers.items()} == {
        "logits": (2, 3),
        "probabilities": (2, 3),
        "embedding": (2, 4),
    }
    assert answers["logits"][0, 0] == 48
    with pytest.raises(ShapeError, match=r"expected \[1, 4, 4, 1\] to \[4, 4, 4, 1\].*--batch"):
        run({"image": np.zeros((5, 4, 4, 1), np.uint8)})
    with pytest.raises(ShapeError, match="float32, expected uint8"):
        run({"image": image.astype(np.float32)})


def test_a_runner_holds_what_its_engine_needs(plan: Path) -> None:
    loaded = load_engine(plan)
    runtime, run = weakref.ref(loaded.runtime), runner_of(loaded, HostMemory())
    del loaded
    gc.collect()
    assert runtime() is not None
    del run
    gc.collect()
    assert runtime() is None


def test_the_engines_that_run_here_are_runners(
    engines: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = engines.parent.parent
    (manifest,) = [
        manifest for manifest in ArtefactFolder(folder).manifests if manifest.variant.name == FULL
    ]
    monkeypatch.setattr(onnx_module, "gpu_at_hand", lambda: ADA)  # it has no CUDA here
    monkeypatch.setattr(runtime_module, "gpu_at_hand", lambda: None)
    assert peers_of(ArtefactFolder(folder), manifest) == {}
    monkeypatch.setattr(runtime_module, "gpu_at_hand", lambda: ADA)
    monkeypatch.setattr(loading, "CudaMemory", HostMemory)
    peers = peers_of(ArtefactFolder(folder), manifest)
    assert set(peers) == {"tensorrt-8.9"}
    assert peers["tensorrt-8.9"]({"image": np.ones((1, 4, 4, 1), np.uint8)})["logits"][0, 0] == 16
    other = replace(manifest, file=replace(manifest.file, sha256="0" * 64))
    assert peers_of(ArtefactFolder(folder), other) == {}
    monkeypatch.setattr(runtime_module, "gpu_at_hand", lambda: HOPPER)
    assert peers_of(ArtefactFolder(folder), manifest) == {}


def test_a_library_of_plugins_is_registered_once(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = use_library(monkeypatch, tmp_path)
    manifest = read_engine_manifest(plan.with_name(f"{FULL}.manifest.json"))
    write_engine_manifest(
        plan.parent, replace(manifest, plugins={library.name: sha256_of(library)})
    )
    load_engine(plan)
    load_engine(plan)  # TensorRT's registry refuses a library whose plugins it has


def test_torch_without_cuda_is_named(plan: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this torch has CUDA")
    with pytest.raises(SaccadeError, match=r"has no CUDA.*build of torch with CUDA"):
        engine_runner(plan)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"schema": "saccade.manifest"}, "schema is 'saccade.manifest'"),
        ({"version": 2}, "version 2, expected 'saccade.engine' version 1"),
        ({"extra": 1}, "unknown keys: extra"),
        ({"engine": {}}, "missing keys"),
        (
            {"file": {"name": "../x.plan", "sha256": "0" * 64, "bytes": 1, "data": None}},
            "plan's name is",
        ),
        (
            {"file": {"name": "/etc/passwd", "sha256": "0" * 64, "bytes": 1, "data": None}},
            "plan's name is",
        ),
        ({"plugins": {"../evil.so": "0" * 64}}, "is not a plain file name"),
        ({"plugins": {"evil.so": "0" * 64}}, "needs the plugin library evil.so"),
        ({"compute_capabilities": []}, "expected one or more such as 8.9"),
        ({"timing_cache_sha256": "x"}, "is not a SHA-256"),
        ({"profiles": {}}, r"profiles are of \[\]"),
        (
            {
                "profiles": {
                    "image": {"min": [2, 4, 4, 1], "opt": [1, 4, 4, 1], "max": [4, 4, 4, 1]}
                }
            },
            "not a range",
        ),
        ({"build_seconds": "NaN"}, "expected a finite number"),
        ({"build_seconds": 10**400}, "expected a finite number"),
        ({"inputs": [{"name": "image", "axes": "b ² 4 1", "dtype": "uint8"}]}, "axes 'b ² 4 1'"),
        ({"outputs": []}, "inputs or outputs are empty"),
    ],
)
def test_a_hostile_manifest(plan: Path, keys: dict, words: str) -> None:
    path = plan.with_name(f"{FULL}.manifest.json")
    content = json.loads(path.read_text())
    for key, value in keys.items():
        outer = key in ("schema", "version") or (value == {} and key == "engine")
        (content if outer else content["engine"])[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(SaccadeError, match=words) as refused:
        load_engine(plan)
    assert "saccade export" not in str(refused.value)


def test_unknown_changed_and_linked_plans(plan: Path, tmp_path: Path) -> None:
    folder = plan.parent
    stranger = folder / "stranger.plan"
    stranger.write_bytes(plan.read_bytes())
    for refused in (lambda: load_engine(stranger), lambda: read_engines(folder)):
        with pytest.raises(SaccadeError, match="executable code, and only plans that saccade"):
            refused()
    stranger.unlink()
    data = plan.read_bytes()
    for other in (data[:-1] + b"?", data[::-1], b"!" + data):
        plan.write_bytes(other)
        for refused in (lambda: load_engine(plan), lambda: read_engines(folder)):
            with pytest.raises(
                SaccadeError, match=r"(SHA-256 is|its manifest has) .* it is not loaded"
            ):
                refused()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(data)
    plan.unlink()
    plan.symlink_to(elsewhere)
    for refused in (lambda: load_engine(plan), lambda: read_engines(folder)):
        with pytest.raises(SaccadeError, match="is a link"):
            refused()


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (None, r"no driver \(libcuda.so.1\) or no device.*compute capability 8\.9"),
        (HOPPER, r"for compute capability 8\.9; a card .* has 9\.0"),
    ],
)
def test_the_gpu_at_hand(
    plan: Path, monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None, words: str
) -> None:
    monkeypatch.setattr(loading, "gpu_at_hand", lambda: gpu)
    monkeypatch.setattr(loading, "look_inside", lambda *_: pytest.fail("TensorRT saw it"))
    with pytest.raises(SaccadeError, match=words):
        load_engine(plan)


def test_another_version_and_no_module(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt

    monkeypatch.setattr(tensorrt, "__version__", "11.2")
    with pytest.raises(SaccadeError, match=r"TensorRT 10.16.0.fake, but 11.2 is installed"):
        load_engine(plan)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="not importable"):
        load_engine(plan)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"ABORT", r"tried it failed \(killed by SIGABRT\)"),
        (b"nonsense", "cannot deserialize it: magic tag does not match"),
    ],
)
def test_a_throw_away_process_sees_it_first(plan: Path, data: bytes, words: str) -> None:
    replace_plan(plan, data)
    with pytest.raises(SaccadeError, match=words):
        load_engine(plan)


def test_an_engine_of_other_outputs(plan: Path) -> None:
    content = json.loads(plan.read_bytes())
    content["outputs"].pop()
    replace_plan(plan, json.dumps(content).encode())
    with pytest.raises(SaccadeError, match="TensorRT's outputs are"):
        load_engine(plan)
