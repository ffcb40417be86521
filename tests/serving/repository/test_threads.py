# SPDX-License-Identifier: Apache-2.0
"""Threads of each model: by the cores of the server, by measurements, or as given."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny
from support.serving.frontiers import frontier_entry
from tiny_artefacts import FULL, HALF, MODEL

from saccade.core.errors import SaccadeError
from saccade.core.machine import cores
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.model_config import read_config
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.threads import ThreadRule, is_alone, thread_rules
from saccade.serving.server import run_folder


@pytest.mark.parametrize(
    ("rule", "on", "why"),
    [
        (ThreadRule(), {1: 1, 2: 2, 16: 16}, "it is alone on 16 cores"),
        (ThreadRule(alone=False), {1: 1, 2: 1, 3: 1, 16: 8}, "other models share with it 16 cores"),
        (ThreadRule(enough=4), {1: 1, 2: 2, 16: 4}, "more were measured not to be faster"),
        (ThreadRule(alone=False, enough=12), {16: 8}, "other models share with it 16 cores"),
        (ThreadRule(given=3, enough=1), {1: 3, 16: 3}, "as given by --threads"),
        (ThreadRule(instances=4), {1: 1, 2: 1, 16: 4}, "alone on 16 cores, by 4 instances"),
        (ThreadRule(alone=False, instances=2), {16: 4}, "16 cores, by 2 instances"),
        (ThreadRule(given=0), {16: 0}, "as given by --threads"),
    ],
)
def test_a_rule(rule, on, why):
    assert {count: rule.on(count) for count in on} == on
    assert why in rule.why(16)


def variant(name: str, setting: str, *roles: str) -> Any:
    parts = {role: SimpleNamespace(variant=SimpleNamespace(name=name + role)) for role in roles}
    main = SimpleNamespace(variant=SimpleNamespace(setting=setting))
    return SimpleNamespace(name=name, main=main, components=parts)


def test_precisions_of_one_budget_are_alone_and_budgets_or_components_are_not():
    assert is_alone([variant("a", "exact", ""), variant("b", "exact", "")])
    assert not is_alone([variant("a", "b1000", ""), variant("b", "b0500", "")])
    assert not is_alone([variant("a", "b1000", "image", "text")])


def measured(name: str, rates: dict[str, float], role: str = "") -> Any:
    entry = frontier_entry(name, "0" * 64)
    inside = entry.in_process
    entry = replace(entry, in_process={**inside, "by_threads": rates})
    if role:
        own = {**inside, "by_threads": {"1": 9.0, "2": 9.0}}
        entry = replace(entry, in_process={**entry.in_process, role: own})
    return entry


def test_measurements_of_a_variant_or_of_a_component_limit_its_threads():
    options = RepositoryOptions(Path("out"))
    entry = measured("a", {"1": 5.0, "2": 9.9, "4": 10.0}, role="text")
    variants = [variant("a", "b1000", "image", "text"), variant("b", "b0500", "image", "text")]
    rules = thread_rules(variants, {"a": entry}, options)
    limits = {name: rule.enough for name, rule in rules.items()}
    assert limits == {"aimage": 2, "atext": 1, "bimage": None, "btext": None}
    assert not any(rule.alone for rule in rules.values())
    on_gpu = thread_rules(variants, {}, replace(options, instances="gpu"))
    assert {rule.given for rule in on_gpu.values()} == {1}


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    return tiny.artefacts(tmp_path_factory.mktemp("artefacts") / "folder", checkpoint=False)


def threads_in(repository: Path) -> dict[str, str]:
    return {
        name: read_config(path).parameters["intra_op_thread_count"].string_value
        for name in (FULL, HALF)
        if (path := repository / name / "config.pbtxt").exists()
    }


def test_the_repository_says_what_was_chosen_and_why(artefacts, tmp_path):
    deploy(artefacts, RepositoryOptions(tmp_path / "both", cores=16))
    assert threads_in(tmp_path / "both") == {FULL: "8", HALF: "8"}
    said = json.loads((tmp_path / "both" / "saccade.json").read_bytes())
    assert said["cores"] == 16 and said["threads"][FULL]["threads"] == 8
    assert "other models share with it 16 cores" in said["threads"][FULL]["because"]
    one = ArtefactFolder(artefacts).only([ArtefactFolder(artefacts).variants[0]])
    deploy(one, RepositoryOptions(tmp_path / "one"))
    assert threads_in(tmp_path / "one") == {FULL: str(cores())}
    assert read_repository(tmp_path / "one").threads == {FULL: ThreadRule()}
    deploy(one, RepositoryOptions(tmp_path / "given", threads=3, cores=16))
    assert threads_in(tmp_path / "given") == {FULL: "3"}
    with pytest.raises(SaccadeError, match=r"--cores: found 0, expected .* at most 4096"):
        RepositoryOptions(tmp_path, cores=0)


@pytest.mark.parametrize("given", [None, 3])
def test_a_server_with_other_cores_chooses_again(given, artefacts, tmp_path, monkeypatch):
    repository, models = tmp_path / "repository", tmp_path / "models"
    deploy(artefacts, RepositoryOptions(repository, cores=4, threads=given))
    before = (repository / FULL / "config.pbtxt").read_bytes()
    for here in (4, 32):
        monkeypatch.setattr(run_folder, "cores", lambda here=here: here)
        run_folder.link_models(repository, tmp_path / "copy", models)
        expected = str(given or here // 2)
        assert threads_in(models) == {FULL: expected, HALF: expected}
        rewritten = not (models / FULL / "config.pbtxt").is_symlink()
        assert rewritten is (here == 32 and given is None)
        assert (models / MODEL / "config.pbtxt").is_symlink()
    # Neither the repository nor the copy with its hashes has changed.
    assert (repository / FULL / "config.pbtxt").read_bytes() == before
    assert (tmp_path / "copy" / FULL / "config.pbtxt").read_bytes() == before


def test_rules_of_a_wrong_type_are_refused(artefacts, tmp_path):
    deploy(artefacts, RepositoryOptions(tmp_path / "repository"))
    path = tmp_path / "repository" / "saccade.json"
    content = json.loads(path.read_bytes())
    for change in (
        {"cores": "many"},
        {"threads": {FULL: {"rule": {"given": "x"}}}},
        {"threads": 1},
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(SaccadeError, match="does not describe a model repository"):
            read_repository(tmp_path / "repository")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("nonsense", None)],
)
def test_a_containers_limit_counts(limit, expected, tmp_path):
    (tmp_path / "cpu.max").write_text(limit)
    assert cores(tmp_path) == (expected or cores(tmp_path / "no container"))
