# SPDX-License-Identifier: Apache-2.0
"""The runtimes of a repository: what each writes, field by field, what a server knows of it."""

import errno
import json
import shlex
import shutil
import socket
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest
from places import TESTS

from saccade.serving.repository.model_config import parse_config

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[cpu]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny
from support.serving.frontiers import frontier_entry
from support.serving.repositories import config_of, routes_of
from tiny_artefacts import FULL, HALF, MODEL

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import ParentEntry, grouped, write_manifest
from saccade.serving.commands import cli
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.installation import RELEASE
from saccade.serving.repository.model_config import (
    config_text,
    messages,
    variant_config,
)
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.router_folder import RouterPlan, write_router
from saccade.serving.repository.runtimes.onnxruntime import config_fields as onnx_fields
from saccade.serving.repository.runtimes.tensorrt import config_fields as plan_fields
from saccade.serving.repository.stored_sample import read_sample
from saccade.serving.server import process as server_process

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


def test_without_the_checkpoint_zeros_warm_up(folder, out):
    deploy(folder, RepositoryOptions(out))
    config = config_of(out, FULL)
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
    config = config_of(out, HALF)
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
    config = config_of(out, FULL)
    assert (config.default_model_filename, len(config.cc_model_filenames)) == ("model.plan", 0)
    assert (out / FULL / "1" / "model.plan").is_file()


def test_figures_of_another_runtime_do_not_route_plans(artefacts, tmp_path, out):
    folder = Path(shutil.copytree(artefacts, tmp_path / "copy"))
    digest = tiny.sha256_of(folder / f"{FULL}.onnx")
    ArtefactFolder(folder).merge([frontier_entry(FULL, digest)])
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
    assert config_of(out, FULL).max_batch_size == 32
    assert routes_of(out)["preprocessing"]["max_images"] == 32


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


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.pbtxt")), ids=lambda path: path.stem)
def test_the_bundled_server_knows_every_field_that_is_written(example):
    # Preflight refuses any other field, also those that a newer server knows.
    package = util.find_spec("pytriton")
    if package is None or package.origin is None:
        pytest.skip("nvidia-pytriton is not installed: pip install '.[serve]'")
    data = (Path(package.origin).parent / "tritonserver/bin/tritonserver").read_bytes()
    known = fields_of(server_messages(data).message_type)
    written = set(set_fields(parse_config(example.read_text())))
    assert "ModelConfig.max_batch_size" in written and "ModelConfig.model_metrics" not in known
    assert written <= known


def set_fields(message):
    """The fields of a message and of the messages in it."""
    for field, value in message.ListFields():
        yield field.full_name.removeprefix("inference.")
        if field.message_type and not field.message_type.GetOptions().map_entry:
            for each in value if hasattr(value, "add") else [value]:
                yield from set_fields(each)


def server_messages(data):
    """The messages of the configuration that a server carries in its program."""
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    start = data.index(b"\n\x12model_config.proto")
    for size in range(4000, 40000):
        descriptor = descriptor_pb2.FileDescriptorProto()
        try:
            descriptor.ParseFromString(data[start : start + size])
        except DecodeError:
            continue
        if descriptor.syntax == "proto3":
            return descriptor
    raise AssertionError("the server carries no messages of a configuration")


def fields_of(types, prefix=""):
    """All fields of messages by name, those inside other messages too."""
    names = set()
    for kind in types:
        names |= {f"{prefix}{kind.name}.{field.name}" for field in kind.field}
        names |= fields_of(kind.nested_type, f"{prefix}{kind.name}.")
    return names


FOUND = {"onnxruntime": "models whose instances are KIND_GPU", "tensorrt": "TensorRT plans"}


def starts(monkeypatch):
    """Starts from now on, of which there are none."""
    found = []
    monkeypatch.setattr(server_process.subprocess, "Popen", lambda *words, **_: found.append(words))
    return found


@pytest.mark.parametrize("runtime", FOUND)
def test_models_for_a_gpu_are_refused_before_a_port_or_a_start(
    needs_server, tmp_path, capsys, monkeypatch, runtime
):
    folder, out = tiny.artefacts(tmp_path / "artefacts"), tmp_path / "a repository"
    engines = (str(tiny.engines(folder, tmp_path / "engines")),) if runtime == "tensorrt" else ()
    deploy(folder, RepositoryOptions(out, runtime=runtime, engines=engines, instances="gpu"))
    found = starts(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = cli.run(["serve", str(out), "--grpc-port", port])
    seen = capsys.readouterr()
    assert (code, seen.out, found) == (2, "", [])
    # Not the port is what it stumbles over.
    assert f"{out}: has {FOUND[runtime]}, but the bundled server" in seen.err
    folder = shlex.quote(str(out))
    assert f"`saccade preflight {folder} --server-version {RELEASE}`" in seen.err
    assert f"`saccade serve {folder} --print-command --container`" in seen.err
    assert "--runtime onnxruntime --instances cpu" in seen.err
