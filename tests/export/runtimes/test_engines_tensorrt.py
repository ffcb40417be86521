# SPDX-License-Identifier: Apache-2.0
"""The path by the module `tensorrt`, which needs a GPU: its calls, by a fake that records them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_places import use_fake, use_library
from tiny_artefacts import FULL, HALF, artefacts

from saccade.core.errors import GateFailed, SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.manifest import Manifest, read_manifest, write_manifest
from saccade.exporter.runtimes.tensorrt import build as build_module
from saccade.exporter.runtimes.tensorrt.build import BuildOptions, build, profiles_of, read_axes
from saccade.exporter.runtimes.tensorrt.child import Network
from saccade.exporter.runtimes.tensorrt.engine_manifest import (
    EngineManifest,
    plan_bytes,
)
from saccade.exporter.runtimes.tensorrt.layer_types import (
    ExpectedTypes,
    compare_with_inspector,
    prove_types,
)
from saccade.models.interface import TensorSpec

OPTIONS = BuildOptions(engine="tensorrt", batch="1:2:4", workspace_mib=3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_fake(monkeypatch)
    return artefacts(tmp_path / "artefact", checkpoint=False)


def calls_of(out: Path, manifest: EngineManifest) -> list[list]:
    return json.loads(plan_bytes(out / manifest.file.name, manifest))["calls"]


def test_the_calls_and_the_manifest(folder: Path) -> None:
    engines = build(folder, OPTIONS)
    assert engines.folder == folder / "engines" / "tensorrt-8.9"
    first = next(manifest for manifest in engines.manifests if manifest.variant.name == FULL)
    assert calls_of(engines.folder, first) == [
        ["create_network", 1 << 1],
        ["clear_flag", "TF32"],
        ["set_memory_pool_limit", "WORKSPACE", 3 * 2**20],
        ["set_shape", "image", [1, 4, 4, 1], [2, 4, 4, 1], [4, 4, 4, 1]],
        ["add_optimization_profile"],
        ["verbosity", "DETAILED"],
    ]
    assert (first.version, first.driver) == ("10.16.0.fake", "580.95")
    assert first.compute_capabilities == ("8.9",)
    assert first.layer_types == {"fp32": 2}
    # The fake's inspector shows one of the two matrix layers.
    assert first.options["inspector"] == {"agreed": 1, "fused": 0}


def test_the_plugin_library_is_registered_where_a_graph_calls_for_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = use_library(monkeypatch, tmp_path)
    manifest = read_manifest(folder / f"{FULL}.manifest.json")
    write_manifest(folder, replace(manifest, custom_ops=("saccade::Sparsemax",)))
    engines = build(folder, OPTIONS)
    by_name = {manifest.variant.name: manifest for manifest in engines.manifests}
    assert calls_of(engines.folder, by_name[FULL])[0] == ["load_library", library.name]
    assert by_name[FULL].plugins == {library.name: sha256_of(library)}
    assert by_name[HALF].plugins == {}


def test_a_timing_cache_is_made_extended_and_asked_for(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "timings"
    engines = build(folder, replace(OPTIONS, timing_cache=cache))
    assert cache.read_bytes() == b"++"
    assert {manifest.timing_cache_sha256 for manifest in engines.manifests} == {sha256_of(cache)}
    sizes = [calls_of(engines.folder, manifest)[-2] for manifest in engines.manifests]
    assert sizes == [["set_timing_cache", size, False] for size in (0, 1)]
    cache.write_bytes(b"other version")
    with pytest.raises(SaccadeError, match=r"refuses this timing cache.*another version"):
        build(folder, replace(OPTIONS, timing_cache=cache, force=True))
    assert cache.read_bytes() == b"other version"


def test_without_a_gpu_and_for_another_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SaccadeError, match=r"12\.0: .* for this machine's GPU, a card"):
        build(folder, replace(OPTIONS, compute_capability=("12.0",)))
    use_fake(monkeypatch, gpu=None)
    with pytest.raises(SaccadeError, match="--engine tensorrt-rtx"):
        build(folder, OPTIONS)


def test_other_bindings_than_the_manifests(folder: Path) -> None:
    manifest = read_manifest(folder / f"{FULL}.manifest.json")
    wrong = TensorSpec("image", "b 4 4 1", "float32")
    write_manifest(folder, replace(manifest, inputs=(wrong,)))
    with pytest.raises(SaccadeError, match="'image' of TensorRT's inputs is UINT8"):
        build(folder, replace(OPTIONS, variant=(FULL,)))
    write_manifest(folder, replace(manifest, outputs=(TensorSpec("answer", "b 3", "float32"),)))
    with pytest.raises(SaccadeError, match=r"outputs are .*'logits'.*\['answer'\]"):
        build(folder, replace(OPTIONS, variant=(FULL,)))


def slots(manifest: Manifest, **metadata: object) -> Manifest:
    state = TensorSpec("initial_state", "b k 12", "float32")
    return replace(manifest, inputs=(*manifest.inputs, state), facts=metadata)


def test_ranges_of_slots_come_from_the_runtime_metadata(folder: Path) -> None:
    manifest = read_manifest(folder / f"{FULL}.manifest.json")
    batch = (1, 8, 64)
    learned = {"kind": "learned", "slots": [[0.0]] * 9}
    for metadata, most in (({"slots": 7}, 64), ({"slots": 7, "initial_state": learned}, 9)):
        profile = profiles_of(slots(manifest, **metadata), batch, {})["initial_state"]
        assert profile == {"min": (1, 1, 12), "opt": (8, 7, 12), "max": (64, most, 12)}
    chosen = profiles_of(slots(manifest, slots=7), batch, read_axes(("k=2:3:4",)))
    assert chosen["initial_state"]["max"] == (64, 4, 12)
    with pytest.raises(SaccadeError, match=r"up to 10 slots, .* has learned 9"):
        profiles_of(slots(manifest, slots=7, initial_state=learned), batch, {"k": (1, 7, 10)})
    with pytest.raises(SaccadeError, match=r"range of axis 'k' is unknown.*--axis k=1:8:64"):
        profiles_of(slots(manifest), batch, {})


def test_a_fixed_batch_contradicts_a_range(folder: Path) -> None:
    manifest = read_manifest(folder / f"{FULL}.manifest.json")
    write_manifest(folder, replace(manifest, inputs=(TensorSpec("image", "2 4 4 1", "uint8"),)))
    with pytest.raises(SaccadeError, match=r"--batch 1:2:4: 'image' .* fixed batch of 2"):
        build(folder, OPTIONS)


def test_only_a_component_may_be_float32_as_a_whole() -> None:
    product = {"name": "a", "type": "FLOAT", "inputs": ["FLOAT"] * 2, "from": ["INPUT"] * 2}
    network = Network("10", (), (), 1, (product,))
    kept = frozenset({"a"})
    prove_types(
        ExpectedTypes("slots-decode-t2-fp16", "fp16", kept, kept, is_component=True), network
    )
    with pytest.raises(GateFailed, match="none of its 1 matrix layers is fp16"):
        prove_types(ExpectedTypes("slots-t2-fp16", "fp16", kept, kept), network)
    with pytest.raises(GateFailed, match="has no matrix layer b"):
        prove_types(ExpectedTypes("v", "fp32", frozenset({"a", "b"}), frozenset()), network)
    quantized = product | {"inputs": ["FLOAT"] * 2, "from": ["DEQUANTIZE"] * 2}
    network = Network("10", (), (), 1, (quantized,))
    prove_types(ExpectedTypes("v", "int8", kept, frozenset()), network)
    with pytest.raises(GateFailed, match="a is int8, not fp32"):
        prove_types(ExpectedTypes("v", "fp32", kept, frozenset()), network)


def said(metadata: str, **tensor: str) -> str:
    return json.dumps({"Layers": [{"Metadata": metadata, "Inputs": [tensor], "Outputs": []}]})


def of_version_10(kind: str) -> dict[str, str]:
    return {"Format/Datatype": kind}


def of_version_11(kind: str) -> dict[str, str]:
    return {"Format": "Row major linear", "Datatype": kind}


@pytest.mark.parametrize("tensor", [of_version_10, of_version_11])
def test_the_inspector_must_agree(tensor: Callable[[str], dict[str, str]]) -> None:
    expected_types = ExpectedTypes("v", "fp16", frozenset({"a", "b"}), frozenset({"b"}))
    one = "[ONNX Layer: a]"
    two = "[ONNX Layer: a]\x1e[ONNX Layer: b]\x1e[ONNX Layer: c | d (Sparsemax)]"

    def compare(metadata: str, kind: str) -> dict[str, int]:
        return compare_with_inspector(expected_types, said(metadata, **tensor(kind)))

    for half in ("Row major linear FP16 format", "Half"):
        assert compare(one, half) == {"agreed": 1, "fused": 0}
    for full in ("Row major linear FP32", "Float"):
        assert compare(two, full) == {"agreed": 1, "fused": 1}
    assert compare("[ONNX Layer: c]", "Float")["agreed"] == 0
    for wrong, kind in (("Row major linear FP32", "fp32"), ("BFloat16", "bf16"), ("BF16", "bf16")):
        with pytest.raises(GateFailed, match=f"a has {kind} tensors, not fp16"):
            compare(one, wrong)


def test_an_inspector_that_disagrees_fails_the_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_types = ExpectedTypes(FULL, "fp16", frozenset({"logits"}), frozenset())
    monkeypatch.setattr(build_module, "prove_types", lambda *_: None)
    monkeypatch.setattr(build_module, "expected_types_of", lambda *_: expected_types)
    with pytest.raises(GateFailed, match="the engine's inspector shows other types"):
        build(folder, OPTIONS)
    assert not (folder / "engines").exists()
