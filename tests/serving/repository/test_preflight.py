# SPDX-License-Identifier: Apache-2.0
"""Broken repositories, each refused with its own reason and none by its hash alone."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[cpu]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny
from broken_changes import ROUTES, edit, edit_json, put
from broken_repositories import BROKEN, BROKEN_PLANS, HASHES, HOSTILE
from engine_places import HOPPER
from half_typed import add_variant, half_typed
from safetensors.numpy import load, save
from tiny_artefacts import examine

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.gate.metrics import FLOORS, THRESHOLDS, relative_error
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.rendered import free_fields
from saccade.serving.repository.preflight.repository import Target
from saccade.serving.repository.runtimes.registry import served_runtime

CONTAINER = Target(line="24.10", bundled=False, memory_bytes=2**30)
MUCH = replace(CONTAINER, memory_bytes=2**50)
BUNDLED = replace(CONTAINER, bundled=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A good repository of each runtime; copy it to break it."""
    place = tmp_path_factory.mktemp("preflight")
    folder = tiny.artefacts(place / "artefacts")
    plans = [
        str(tiny.engines(folder, place / capability, capability)) for capability in ("8.9", "12.0")
    ]
    deploy(folder, RepositoryOptions(place / "onnxruntime"))
    deploy(
        folder,
        RepositoryOptions(place / "tensorrt", runtime="tensorrt", engines=tuple(plans)),
    )
    return place


@pytest.fixture
def repository(made, tmp_path):
    """A copy of the repository of ONNX Runtime."""
    return Path(shutil.copytree(made / "onnxruntime", tmp_path / "repository"))


@pytest.fixture
def plans(made, tmp_path):
    """A copy of the repository of plans."""
    return Path(shutil.copytree(made / "tensorrt", tmp_path / "plans"))


def failures(repository, target=CONTAINER):
    """The reasons of each check that failed."""
    by_check = {}
    for finding in examine(repository, target):
        if finding.verdict == "failed":
            by_check.setdefault(finding.check, []).extend(finding.reasons)
    return by_check


@pytest.mark.parametrize("runtime", ["onnxruntime", "tensorrt"])
def test_a_good_repository_passes_every_check(made, runtime):
    findings = examine(made / runtime, CONTAINER)
    assert [finding for finding in findings if finding.verdict == "failed"] == []
    checked = {finding.check for finding in findings if finding.verdict == "passed"}
    wanted = {"files", "models", "configuration", "fields", "versions", "content", "routes"}
    wanted |= {"labels", "sample", "warm-up"}
    wanted |= {"answer", "memory"} if runtime == "onnxruntime" else {"profiles"}
    assert checked >= wanted
    unchecked = {finding.check for finding in findings if finding.verdict == "not checked"}
    gpu = {"engines", "capabilities", "instances", "answer", "memory"}
    assert unchecked == {"machine", *(gpu if runtime == "tensorrt" else ())}


def test_a_half_precision_answer_may_be_off_by_as_much_as_in_the_gate(tmp_path):
    folder = tiny.artefacts(tmp_path / "artefacts")
    limit, floor = THRESHOLDS["fp16"]["relative_error"], FLOORS["fp16"]
    parity = replace(ArtefactFolder(folder).manifests[0].parity, floor=floor)
    proto = half_typed(tiny.onnx_model(), "fp16")
    name = add_variant(folder, tiny.FULL, "fp16", proto, parity=parity).variant.name
    repository = tmp_path / "repository"
    deploy(folder, RepositoryOptions(repository, precisions=("fp16",)))
    path = repository / name / "warmup" / "sample.safetensors"
    arrays = load(path.read_bytes())
    right = arrays["output/logits"]
    at = np.abs(right).argmin()  # near zero the floor decides
    for share, failed in ((0.8, set()), (1.2, {"answer"})):
        wrong = right.copy()
        wrong.flat[at] += share * limit * (abs(right.flat[at]) + floor * np.abs(right).max())
        assert (relative_error(right, wrong, floor) > limit) == bool(failed)
        assert relative_error(right, wrong, FLOORS["fp32"]) > limit
        path.write_bytes(save(arrays | {"output/logits": wrong}, metadata={"saccade": "real"}))
        tiny.rehash(repository)
        assert set(failures(repository)) == failed


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_repository_is_refused_with_its_reason(repository, case):
    spoil, check, words = BROKEN[case]
    refused(repository, spoil, check, words)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_repository_that_wants_more_is_refused_with_its_reason(repository, case):
    spoil, check, words = HOSTILE[case]
    refused(repository, spoil, check, words)


@pytest.mark.parametrize("case", BROKEN_PLANS)
def test_a_broken_repository_of_plans_is_refused_with_its_reason(plans, case):
    spoil, check, words = BROKEN_PLANS[case]
    refused(plans, spoil, check, words)


def refused(repository, spoil, check, words):
    spoil(repository)
    tiny.rehash(repository)
    by_check = failures(repository)
    # The hashes fit: the check itself has seen it.
    assert set(by_check) >= {check} and ("files" not in by_check or check == "files")
    assert any(re.search(words, finding) for finding in by_check[check]), by_check


@pytest.mark.parametrize("case", HASHES)
def test_files_that_are_not_those_written(repository, case):
    spoil, words = HASHES[case]
    spoil(repository)
    reasons = failures(repository)["files"]
    assert any(re.search(words, reason) for reason in reasons), reasons


TARGETS = {
    "memory": (replace(CONTAINER, memory_bytes=2**10), "onnxruntime", "memory", "there are 0"),
    "a GPU that no plan is for": (
        replace(CONTAINER, gpus=(HOPPER,)), "tensorrt", "capabilities", "capability 9.0",
    ),
    "a server with another TensorRT": (
        replace(CONTAINER, tensorrt="10.13.3.9"), "tensorrt", "engines", "has 10.13.3.9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TARGETS)
def test_a_good_repository_on_the_wrong_machine(made, case):
    target, runtime, check, words = TARGETS[case]
    assert words in failures(made / runtime, target)[check][0]


def test_instances_on_a_gpu_are_not_for_the_bundled_server(made, tmp_path):
    deploy(made / "artefacts", RepositoryOptions(tmp_path / "out", instances="gpu"))
    assert "runs on KIND_CPU" in failures(tmp_path / "out", BUNDLED)["instances"][0]
    assert not failures(tmp_path / "out", CONTAINER)


@pytest.mark.parametrize(("routers", "fails"), [(2, False), (3, True), (0, True)])
def test_a_router_has_at_most_as_many_processes_as_a_variant_has_instances(
    made, tmp_path, routers, fails
):
    repository = tmp_path / "out"
    deploy(made / "artefacts", RepositoryOptions(repository, instance_count=2))
    edit(lambda config: put(config, "instance_group[0].count", routers), tiny.MODEL)(repository)
    tiny.rehash(repository)
    assert ("fields" in failures(repository, BUNDLED)) == fails


def test_speeds_that_a_measurement_does_not_tell_apart_are_names(repository):
    edit_json(ROUTES, lambda it: it["variants"][0].update(as_fast=[tiny.HALF]))(repository)
    tiny.rehash(repository)
    assert not failures(repository, MUCH)
    edit_json(ROUTES, lambda it: it["variants"][0].update(as_fast=[0.5]))(repository)
    tiny.rehash(repository)
    assert "expected a list of names" in failures(repository, MUCH)["routes"][0]


FREE = free_fields(served_runtime(DEFAULT))


def choose(field, value):
    """Set what an operator may choose: a field, or a parameter, which is a text."""

    def change(config):
        if field.startswith("parameters."):
            put(config, f"parameters[{field.rpartition('.')[2]}].string_value", str(value))
            return
        put(config, field.replace("instance_group.", "instance_group[0]."), value)
        if field == "dynamic_batching.priority_levels":
            put(config, "dynamic_batching.default_priority_level", (value + 1) // 2)

    return edit(change)


@pytest.mark.parametrize("field", FREE)
def test_what_an_operator_may_choose_has_bounds(repository, field):
    bounds, key = FREE[field].expected, field.rpartition(".")[2]
    most = int(bounds.split(" to ")[1])
    choose(field, most)(repository)
    tiny.rehash(repository)
    assert not failures(repository, MUCH)
    choose(field, most + 1)(repository)
    tiny.rehash(repository)
    actual = failures(repository, MUCH)["fields"]
    assert any(f"expected {bounds}" in each and key in each for each in actual), actual


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [("numpy", "2.1.0", "numpy 2.1.0 is installed"), ("python", (3, 99), "This is Python 3.99")],
)
def test_an_environment_that_the_bundled_server_cannot_run_in(
    needs_server, made, monkeypatch, name, version, words
):
    from saccade.serving.repository import installation

    if name == "numpy":
        monkeypatch.setattr(installation.metadata, "version", lambda _: version)
    else:
        newest = SimpleNamespace(major=version[0], minor=version[1])
        monkeypatch.setattr(installation.sys, "version_info", newest)
    assert words in failures(made / "onnxruntime", BUNDLED)["machine"][0]
