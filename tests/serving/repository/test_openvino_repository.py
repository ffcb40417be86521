# SPDX-License-Identifier: Apache-2.0
"""A repository for OpenVINO: its files, checks and refusals, and its backend without a server."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[cpu]'")
pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")

import tiny_artefacts as tiny
from family_folders import exported, family_folder
from folder_store import stored
from google.protobuf import json_format
from picture_files import picture_files
from router_code import backend_module
from support.serving.repositories import config_of

from saccade.core.errors import MissingPackage, SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import read_frontier
from saccade.exporter.artefact.manifest import read_manifest
from saccade.exporter.runtimes.openvino.runtime import OPENVINO
from saccade.serving.bench.bench import bench
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.local.artefact import load_artefact
from saccade.serving.repository import installation
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.installation import refuse_unrunnable, requirements_of
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.repository import Target
from saccade.serving.server.serve import print_command

BF16, OPS = "sot-class-bf16", "sot-exact-fp32"


@pytest.fixture(scope="module")
def folder() -> Path:
    """Variants in fp32 and bf16: one with a custom op, one without."""
    made = stored("sot-bf16", lambda place: exported("sot", place, ("fp32", "bf16")))
    return made / "folder"


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its repository, to be read only."""
    out = tmp_path_factory.mktemp("openvino") / "repository"
    deploy(folder, RepositoryOptions(out, runtime="openvino", threads=2))
    return out


@pytest.fixture
def repository(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "repository"))


def failures(repository: Path, target: Target | None = None) -> dict[str, tuple[str, ...]]:
    findings = tiny.examine(repository, target or Target(memory_bytes=2**40))
    return {each.check: each.reasons for each in findings if each.verdict == "failed"}


def test_it_has_the_graphs_that_openvino_reads_and_passes(written, folder):
    for name in (path.parent.name for path in written.glob("*/*.manifest.json")):
        manifest = read_manifest(written / name / f"{name}.manifest.json")
        own = sha256_of(written / name / "1" / "model.onnx")
        is_changed = bool(manifest.custom_ops) or name == BF16
        assert (own != manifest.file.sha256) == is_changed
        config = config_of(written, name)
        values = {key: value.string_value for key, value in config.parameters.items()}
        half = {"HINT_BF16": "YES"} if name == BF16 else {}
        assert config.backend == "openvino" and values == half | {
            "INFERENCE_NUM_THREADS": "2", "NUM_STREAMS": "1", "PERFORMANCE_HINT": "LATENCY",
            "saccade_run_batch": "8",
        }  # fmt: skip
    assert json.loads((written / "saccade.json").read_text())["ops"] == "bodies"
    findings = tiny.examine(written, Target(memory_bytes=2**40))
    assert not [each for each in findings if each.verdict == "failed"]
    assert {each.verdict for each in findings if each.check == "answer"} == {"passed"}


def test_threads_are_the_operators_and_types_are_not(repository):
    path = repository / BF16 / "config.pbtxt"
    text = path.read_text()
    path.write_text(text.replace('string_value: "2"', 'string_value: "4"'))
    tiny.rehash(repository)
    assert not failures(repository)
    path.write_text(text.replace('string_value: "YES"', 'string_value: "NO"'))
    tiny.rehash(repository)
    assert "HINT_BF16" in failures(repository)["fields"][0]


@pytest.mark.parametrize("name", [BF16, OPS, "sot-class-fp32"])
def test_a_file_of_another_variant_is_noticed(repository, name):
    other = OPS if name != OPS else "sot-class-fp32"
    shutil.copyfile(repository / other / "1" / "model.onnx", repository / name / "1" / "model.onnx")
    tiny.rehash(repository)
    assert "it is another model's file" in failures(repository)["model"][0]


def test_an_exported_file_with_custom_ops_is_noticed(repository, folder):
    shutil.copyfile(folder / f"{OPS}.onnx", repository / OPS / "1" / "model.onnx")
    tiny.rehash(repository)
    failed = failures(repository)
    assert (
        "nodes of the domain saccade" in failed["model"][0] and "cannot load" in failed["answer"][0]
    )


def test_only_the_bundled_server_runs_it(written, monkeypatch):
    (reason,) = failures(written, Target("26.07", bundled=False, memory_bytes=2**40))["machine"]
    assert "container 26.07" in reason and "one batch size" in reason
    with pytest.raises(SaccadeError, match=r"need the bundled server.*--runtime onnxruntime"):
        print_command(written, container=True)
    other = SimpleNamespace(bundled=False, binary=Path("tritonserver"))
    with pytest.raises(SaccadeError, match=r"need the bundled server.*--runtime onnxruntime"):
        refuse_unrunnable(written, requirements_of(written), other)
    refuse_unrunnable(written, requirements_of(written), SimpleNamespace(bundled=True))


def test_the_server_needs_the_package(needs_server, monkeypatch):
    monkeypatch.setattr(type(OPENVINO), "is_here", lambda self: False)
    found = installation.find_installation()
    installation.check_installation(found)
    with pytest.raises(MissingPackage, match=r"openvino is not .*\S+\[openvino\]"):
        installation.check_installation(found, "openvino")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"instances": "gpu"}, "--instances is gpu, but OpenVINO runs on CPUs"),
        ({"engines": ("a",)}, "--engines is for the runtime tensorrt only"),
        ({"inter_op_threads": 2}, "--inter-op-threads is for the runtime onnxruntime only"),
        ({"parallel_nodes": True}, "--parallel-nodes is for the runtime onnxruntime only"),
        ({"graph_level": 1}, "--graph-level is for the runtime onnxruntime only"),
    ],
)
def test_options_of_other_runtimes_are_refused(options, words, tmp_path):
    with pytest.raises(SaccadeError, match=words):
        RepositoryOptions(tmp_path / "out", runtime="openvino", **options)


def test_a_precision_that_it_would_not_use_is_refused(tmp_path):
    half = tiny.int8_artefacts(tmp_path / "half")
    for path in half.iterdir():  # nobody opens its file
        text = path.read_bytes().replace(b'"int8"', b'"fp16"').replace(b"-int8", b"-fp16")
        path.unlink()
        path.with_name(path.name.replace("int8", "fp16")).write_bytes(text)
    with pytest.raises(SaccadeError, match="fp16, which OpenVINO computes in float32 on a CPU"):
        deploy(half, RepositoryOptions(tmp_path / "out", runtime="openvino"))


def test_an_artefact_answers_in_this_process(folder, tmp_path):
    images = picture_files(tmp_path)
    answers = {}
    for runtime in ("onnxruntime", "openvino"):
        with load_artefact(folder, runtime=runtime, precisions=("fp32",)) as model:
            answers[runtime] = model.embed(images)
    ours, theirs = answers["openvino"], answers["onnxruntime"]
    assert ours.variant == theirs.variant
    np.testing.assert_allclose(ours.vectors, theirs.vectors, rtol=1e-3, atol=1e-4)


def test_a_bulk_job_runs_it(folder, tmp_path):
    (tmp_path / "images").mkdir()
    picture_files(tmp_path / "images")
    options = BulkOptions(
        str(tmp_path / "images"), str(tmp_path / "out"), runtime="openvino", workers="1"
    )
    done = bulk(folder, options)
    assert done.answers == len(list((tmp_path / "images").iterdir())) and not done.errors


@pytest.fixture
def start(pb: Any, written: Path) -> Callable[..., Any]:
    """Start the backend on a variant, with changes of its configuration."""

    def run(name: str, kind: str = "CPU", **changes: Any) -> Any:
        message = config_of(written, name)
        config = json_format.MessageToDict(message, preserving_proto_field_name=True)
        for tensor in (*config["input"], *config["output"]):
            tensor.pop("reshape", None)
        for key, value in changes.items():
            config["parameters"][key] = {"string_value": value}
        arguments = {
            "model_config": json.dumps(config), "model_instance_kind": kind,
            "model_repository": str(written / name), "model_version": "1",
        }  # fmt: skip
        model = backend_module("openvino").TritonPythonModel()
        model.initialize(arguments)
        return model

    return run


@pytest.mark.parametrize("run_batch", ["1", "3", "8"])
def test_the_backend_answers_as_the_runtime_does(pb, start, folder, run_batch):
    artefact = ArtefactFolder(folder)
    manifest = next(each for each in artefact.manifests if each.variant.name == OPS)
    run = OPENVINO.load(artefact, manifest, None, threads=2)
    model = start(OPS, saccade_run_batch=run_batch)
    names = [spec.name for spec in manifest.outputs]
    pixels = np.random.default_rng(0).integers(0, 256, (7, 16, 16, 3), dtype=np.uint8)
    answers = model.execute(
        [
            SimpleNamespace(
                inputs={"image": pb.Tensor("image", part)}, requested_output_names=lambda: names
            )
            for part in np.split(pixels, (1, 3))
        ]
    )
    for name, expected in run({"image": pixels}).items():
        parts = [answer.tensors[name] for answer in answers]
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"CPU_EXTENSION_PATH": "x.so"}, "'CPU_EXTENSION_PATH', expected one of INFERENCE_NUM"),
        ({"PERFORMANCE_HINT": "FAST"}, "'PERFORMANCE_HINT' is 'FAST', expected LATENCY or"),
        ({"HINT_BF16": "maybe"}, "'HINT_BF16' is 'maybe', expected YES or NO"),
        ({"NUM_STREAMS": "AUTO"}, "'NUM_STREAMS' is 'AUTO', expected a whole number"),
    ],
)
def test_the_backend_refuses_what_it_does_not_know(pb, start, changes, words):
    with pytest.raises(pb.TritonError, match=f"{BF16}.*{words}"):
        start(BF16, **changes)


def test_the_backend_runs_on_cpus_only(pb, start):
    with pytest.raises(pb.TritonError, match="KIND_CPU"):
        start(BF16, kind="GPU")


@pytest.mark.journey
def test_a_server_runs_it_and_bench_measures_it(needs_server, tmp_path):
    folder = Path(shutil.copytree(family_folder("sot"), tmp_path / "sot"))
    images = np.random.default_rng(0).integers(0, 256, (400, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=images, labels=np.arange(400) % 5)
    options = BenchOptions(
        tmp_path / "report", str(tmp_path / "data.npz"), seconds=0.02, rounds=1,
        concurrency=(1,), runtime="openvino",
    )  # fmt: skip
    bench(folder, options)
    entries = read_frontier(folder / "frontier.json").entries
    assert {entry.runtime for entry in entries} == {OPENVINO.label()}
    assert all(entry.grpc for entry in entries)
