# SPDX-License-Identifier: Apache-2.0
"""The two runtimes of a repository: what each writes, field by field, and what is refused."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from places import TESTS

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[cpu]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny
from tiny_artefacts import FULL, HALF, MODEL

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import entry_of
from saccade.exporter.artefact.manifest import ParentEntry, grouped, write_manifest
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.model_config import (
    config_text,
    messages,
    parse_config,
    variant_config,
)
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.router_folder import RouterPlan, write_router
from saccade.serving.repository.runtimes.onnxruntime import config_fields as onnx_fields
from saccade.serving.repository.runtimes.tensorrt import config_fields as plan_fields
from saccade.serving.repository.stored_sample import read_sample

EXAMPLES = TESTS / "serving" / "repository" / "examples"
EVERYTHING = {
    "instances": "gpu", "instance_count": 2, "threads": 4, "inter_op_threads": 2,
    "parallel_nodes": True, "graph_level": 1, "max_queue": 128, "queue_timeout_ms": 250.0,
    "priority_levels": 3, "rate_limit": "gpu",
}  # fmt: skip
PLANS = {"8.9": "model-8.9.plan", "12.0": "model-12.0.plan"}


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    """An artefact folder, to be read only."""
    return tiny.artefacts(tmp_path_factory.mktemp("runtimes") / "artefacts")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "repository"


def manifests():
    """Manifests of files that never change, whatever writes ONNX files today."""
    parent = ParentEntry(f"{MODEL}.safetensors", "0" * 64)
    return [tiny.manifest_of(budget, b"fixed", parent) for budget in tiny.SETTINGS]


def written(name, place):
    """The text that stands committed under this name, made again."""
    full, _ = manifests()
    if name == "onnxruntime":
        return variant_config(full, onnx_fields(None, False, 8), run_batch=8)
    if name == "router":
        variants = grouped(manifests())
        run_batch = {variant.name: 8 for variant in variants}
        plan = RouterPlan(MODEL, variants, tiny.PREPROCESSING, tiny.LABELS, {}, {}, run_batch)
        write_router(place, plan)
        return (place / "config.pbtxt").read_text()
    if name == "onnxruntime-gpu":
        options = RepositoryOptions(place, **EVERYTHING)
        sample = {"image": (1, 4, 4, 1)}
        fields = onnx_fields(options, True, 16)
        return variant_config(full, fields, options, run_batch=16, sample=sample)
    options = RepositoryOptions(place, runtime="tensorrt", engines=("a", "b"))
    return variant_config(full, plan_fields(PLANS, 8), options, run_batch=8, max_batch=32)


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu", "tensorrt", "router"])
def test_configurations_say_what_the_committed_ones_say(name, out):
    # Messages, not bytes: the layout is protobuf's, and the committed files are older than that.
    message = parse_config((EXAMPLES / f"{name}.pbtxt").read_text())
    text = written(name, out)
    assert parse_config(text) == message
    assert config_text(message) == text


def test_any_text_survives_the_way_into_a_configuration():
    odd = 'quote " slash \\ line \n tab \t bell \x07 é 字'
    message = messages().ModelConfig(name=odd)
    message.parameters["b"].string_value, message.parameters[odd].string_value = odd, ""
    assert parse_config(config_text(message)) == message


def test_onnxruntime_repositories_keep_a_real_sample_and_its_answer(artefacts, out):
    deployment = deploy(artefacts, RepositoryOptions(out))
    assert deployment.samples == deployment.variants == (FULL, HALF)
    assert read_repository(out) == deployment
    from saccade.models.checkpoint import load

    image = load(artefacts / f"{MODEL}.safetensors").calibration["image"][:1]
    sample = read_sample(out / FULL / "warmup" / "sample.safetensors")
    assert (sample.inputs["image"] == image).all()
    assert (out / FULL / "warmup" / "image").read_bytes() == image.tobytes()
    assert set(sample.answers) == {"logits", "probabilities", "embedding"}


def test_without_the_checkpoint_zeros_warm_up(tmp_path, out):
    folder = tiny.artefacts(tmp_path / "artefacts", checkpoint=False)
    deploy(folder, RepositoryOptions(out))
    config = parse_config((out / FULL / "config.pbtxt").read_text())
    assert all(warmup.inputs["image"].zero_data for warmup in config.model_warmup)
    assert not read_sample(out / FULL / "warmup" / "sample.safetensors").inputs["image"].any()
    assert not (out / FULL / "warmup" / "image").exists()


def test_another_checkpoint_beside_the_artefacts_is_refused(artefacts, tmp_path, out):
    folder = Path(shutil.copytree(artefacts, tmp_path / "copy"))
    other = tiny.artefacts(tmp_path / "other", checkpoint=False)
    for name in (FULL, HALF):
        shutil.copyfile(other / f"{name}.manifest.json", folder / f"{name}.manifest.json")
    with pytest.raises(SaccadeError, match=r"expected 000000000000.* as in the manifests"):
        deploy(folder, RepositoryOptions(out))
    assert not out.exists()


def test_what_no_server_would_load_is_not_written(artefacts, tmp_path, out):
    folder = Path(shutil.copytree(artefacts, tmp_path / "copy"))
    for name in (FULL, HALF):
        path = folder / f"{name}.manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "labels": ["circle", "star"]}))
    with pytest.raises(SaccadeError, match=f"{FULL}: labels.txt has 2 labels, but prob"):
        deploy(folder, RepositoryOptions(out))
    assert not list(tmp_path.glob("*repository*"))


def test_plans_of_two_gpus_stand_under_the_same_names(artefacts, tmp_path, out):
    folders = tuple(
        str(tiny.engines(artefacts, tmp_path / capability, capability))
        for capability in ("8.9", "12.0")
    )
    options = RepositoryOptions(out, runtime="tensorrt", engines=folders)
    deployment = deploy(artefacts, options)
    assert (deployment.variants, deployment.runtime) == ((FULL, HALF), "tensorrt")
    assert read_repository(out) == deployment
    config = parse_config((out / HALF / "config.pbtxt").read_text())
    assert (config.name, config.platform, config.max_batch_size) == (HALF, "tensorrt_plan", 64)
    assert dict(config.cc_model_filenames) == PLANS
    assert config.default_model_filename == "model-8.9.plan"
    assert config.instance_group[0].kind == 1  # KIND_GPU
    files = {path.name: path.read_text() for path in (out / HALF / "1").iterdir()}
    assert files == {name: f"ftrt {HALF} {plan}" for plan, name in PLANS.items()}
    # The router before them is the same.
    deploy(artefacts, RepositoryOptions(tmp_path / "cpu"))
    for path in sorted((tmp_path / "cpu" / MODEL).rglob("*")):
        if path.is_file():
            same = out / MODEL / path.relative_to(tmp_path / "cpu" / MODEL)
            assert same.read_bytes() == path.read_bytes()


def test_one_plan_has_the_name_that_the_server_expects(artefacts, tmp_path, out):
    folder = tiny.engines(artefacts, tmp_path / "engines")
    deploy(artefacts, RepositoryOptions(out, runtime="tensorrt", engines=(str(folder),)))
    config = parse_config((out / FULL / "config.pbtxt").read_text())
    assert (config.default_model_filename, len(config.cc_model_filenames)) == ("model.plan", 0)
    assert (out / FULL / "1" / "model.plan").is_file()


def test_figures_of_another_runtime_do_not_route_plans(artefacts, tmp_path, out):
    folder = Path(shutil.copytree(artefacts, tmp_path / "copy"))
    point = {"inferences_per_second": 9.0, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0}
    score = {
        "name": "top-1", "value": 0.9, "higher_is_better": True, "unit": "share", "n": 10,
        "interval": [0.8, 1.0], "data": "digits", "data_sha256": "d" * 64,
    }  # fmt: skip
    digest = tiny.sha256_of(folder / f"{FULL}.onnx")
    entry = {
        "variant": FULL, "sha256": digest, "budget": 1.0, "precision": "fp32", "top5": None,
        "runtime": "onnxruntime 1.31.1 CPU", "device": "a CPU", "score": score,
        "in_process": {"threads": 1, "best_batch": 4, "batch_4": point}, "grpc": None,
        "dominated_by": None,
    }  # fmt: skip
    ArtefactFolder(folder).merge([entry_of(entry)])
    engines = (str(tiny.engines(folder, tmp_path / "engines")),)
    options = RepositoryOptions(out, runtime="tensorrt", engines=engines)
    assert deploy(folder, options).unmeasured == (FULL, HALF)
    assert deploy(folder, RepositoryOptions(tmp_path / "cpu")).unmeasured == (HALF,)


PROFILE = {"min": (1, 4, 4, 1), "opt": (8, 4, 4, 1), "max": (32, 4, 4, 1)}
REFUSED_ENGINES = {
    "of TensorRT-RTX": ({"engine": "tensorrt-rtx"}, "only plans of TensorRT"),
    "of other bytes": (
        {"parent": ParentEntry(f"{FULL}.onnx", "f" * 64)}, "ONNX file with SHA-256 ffffffffffff",
    ),
    "a small profile": ({"profiles": {"image": PROFILE}}, "--max-images 32, or build"),
    "two GPUs in one": ({"compute_capabilities": ("8.9", "12.0")}, "expected one"),
    "no batch of one": (
        {"profiles": {"image": {**PROFILE, "min": (2, 4, 4, 1)}}}, "starts at batch 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_ENGINES)
def test_plans_that_do_not_fit_are_refused(artefacts, tmp_path, out, case):
    changes, words = REFUSED_ENGINES[case]
    only = tmp_path / "artefacts"
    shutil.copytree(artefacts, only)
    for path in only.glob(f"{HALF}*"):
        path.unlink()
    folder = str(tiny.engines(only, tmp_path / "engines", **changes))
    with pytest.raises(SaccadeError, match=words):
        deploy(only, RepositoryOptions(out, runtime="tensorrt", engines=(folder,)))
    assert not list(tmp_path.glob("*repository*"))


def test_a_smaller_cap_makes_a_small_profile_do(artefacts, tmp_path, out):
    profiles = {"image": PROFILE}
    folder = str(tiny.engines(artefacts, tmp_path / "engines", profiles=profiles))
    options = RepositoryOptions(out, runtime="tensorrt", engines=(folder,), max_images=32)
    deploy(artefacts, options)
    assert parse_config((out / FULL / "config.pbtxt").read_text()).max_batch_size == 32
    routes = json.loads((out / MODEL / "1" / "routes.json").read_text())
    assert routes["preprocessing"]["max_images"] == 32


def test_folders_of_engines_that_lack_a_variant_or_say_the_same_twice(artefacts, tmp_path, out):
    folders = tuple(str(tiny.engines(artefacts, tmp_path / name)) for name in ("one", "two"))
    with pytest.raises(SaccadeError, match=r"two plans are for compute capability 8\.9"):
        deploy(artefacts, RepositoryOptions(out, runtime="tensorrt", engines=folders))
    for path in (tmp_path / "one").glob(f"{HALF}*"):
        path.unlink()
    with pytest.raises(SaccadeError, match=f"has no plan of {HALF}"):
        deploy(artefacts, RepositoryOptions(out, runtime="tensorrt", engines=folders[:1]))


WRONG = {
    "plans without a folder": ({"runtime": "tensorrt"}, "needs --engines"),
    "a folder without plans": ({"engines": ("x",)}, "--runtime tensorrt"),
    "plans on a CPU": (
        {"runtime": "tensorrt", "engines": ("x",), "instances": "cpu"}, "GPUs only",
    ),
    "bodies for plans": (
        {"runtime": "tensorrt", "engines": ("x",), "op_library": False}, "ONNX Runtime only",
    ),
    "a runtime that no server has": ({"runtime": "tensorrt-rtx"}, "expected onnxruntime or open"),
    "a runtime that is none": ({"runtime": "tensorr"}, "'tensorr', expected one of"),
    "threads for plans": ({"runtime": "tensorrt", "engines": ("x",), "threads": 2}, "--threads"),
    "no instances": ({"instance_count": 0}, "--instance-count: found 0"),
    "no queue": ({"max_queue": 0}, "--max-queue: found 0"),
    "no time": ({"queue_timeout_ms": float("nan")}, "--queue-timeout-ms: found nan"),
    "one priority": ({"priority_levels": 1}, "--priority-levels: found 1"),
    "a level beyond": ({"graph_level": 3}, "--graph-level: found 3"),
    "a resource of two words": ({"rate_limit": "my gpu"}, "expected a word"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_options_that_contradict_each_other(out, case):
    given, words = WRONG[case]
    with pytest.raises(SaccadeError, match=words):
        RepositoryOptions(out, **given)


def test_precisions_are_chosen_and_those_that_no_cpu_runs_refused(artefacts, tmp_path, out):
    folder = Path(shutil.copytree(artefacts, tmp_path / "copy"))
    full, _ = ArtefactFolder(folder).manifests
    name = f"{MODEL}-b1000-bf16"
    entry = replace(full.variant, name=name, precision="bf16")
    write_manifest(
        folder, replace(full, variant=entry, file=replace(full.file, name=f"{name}.onnx"))
    )
    shutil.copyfile(folder / f"{FULL}.onnx", folder / f"{name}.onnx")
    with pytest.raises(SaccadeError, match=r"variants in bf16.*--precisions fp32"):
        deploy(folder, RepositoryOptions(out))
    with pytest.raises(SaccadeError, match="has no variant in int8, only in bf16, fp32"):
        deploy(folder, RepositoryOptions(out, precisions=("int8",)))
    assert deploy(folder, RepositoryOptions(out, precisions=("fp32",))).variants == (FULL, HALF)


def test_a_full_disk_leaves_nothing(artefacts, out, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("saccade.serving.repository.deploy.copy_file", full)
    with pytest.raises(SaccadeError, match=r"No space left on device.*Free space"):
        deploy(artefacts, RepositoryOptions(out))
    assert not list(out.parent.iterdir())
