# SPDX-License-Identifier: Apache-2.0
"""A repository with --slo-ms: what is written, what is refused, and what preflight sees."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="scipy is not installed: pip install '.[bench]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny
from policy_files import write_policy
from support.serving.repositories import change_routes, config_of, reasons, routes_of
from support.serving.routers import src
from tiny_artefacts import FULL, HALF, MODEL

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import VariantFiles, write_manifest
from saccade.serving.client.router_view import DESCRIBED
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_description
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.policies import (
    RouterPolicies,
    router_policies,
    served_adaptive,
)

MARKS = {"steps", "certified", "degraded"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with an objective, a floor and a policy; copy it to change it."""
    place = tmp_path_factory.mktemp("adaptive")
    folder = tiny.artefacts(place / "artefacts", checkpoint=False)
    write_policy(folder)
    options = RepositoryOptions(place / "repository", slo_ms=50, floor_budget="b0500")
    return deploy(folder, options).folder


def test_the_router_and_its_callers_are_told(made):
    routes = routes_of(made)
    adaptive = routes["adaptive"]
    assert (adaptive["slo_ms"], adaptive["floor_budget"]) == (50.0, 0.5)
    assert {name: len(ends) for name, ends in adaptive["shares"].items()} == {
        policy["name"]: len(policy["steps"]) for policy in routes["policies"]
    }
    assert all(sum(ends) == pytest.approx(1, abs=1e-3) for ends in adaptive["shares"].values())
    config = config_of(made, MODEL)
    assert {tensor.name for tensor in config.output} >= MARKS
    described = json.loads(config.parameters[DESCRIBED].string_value)
    assert described["adaptive"] == {"slo_ms": 50.0, "floor_budget": 0.5}
    assert read_description(made)[0].slo_ms == 50.0
    assert reasons(made, "routes", "fields") == []


def test_the_router_reads_it(made, pb):
    adaptive = src.routes.read_routes(made / MODEL / "1" / "routes.json").adaptive
    assert (adaptive.slo_ms, adaptive.floor_budget) == (50.0, 0.5) and "auto" in adaptive.shares


def test_policies_that_python_code_passes_adapt_too(folder, out):
    content = write_policy(folder)
    passed = router_policies([(content, policy) for policy in content.policies])
    deploy(folder, RepositoryOptions(out, slo_ms=20), policies=passed)
    assert routes_of(out)["adaptive"]["shares"] == {
        policy.name: [step.share for step in policy.steps] for policy in content.policies
    }


def test_without_policies_budgets_are_enough(folder, out):
    deploy(folder, RepositoryOptions(out, slo_ms=20))
    assert routes_of(out)["adaptive"] == {"slo_ms": 20.0, "floor_budget": None, "shares": {}}
    assert "policies" not in routes_of(out) and reasons(out, "routes", "fields") == []


def test_without_an_objective_nothing_is_written(folder, out):
    deploy(folder, RepositoryOptions(out))
    config = (out / MODEL / "config.pbtxt").read_text()
    assert "adaptive" not in routes_of(out) and "adaptive" not in config
    assert "degraded" not in config and "slo_ms" not in (out / "saccade.json").read_text()


@pytest.mark.parametrize(
    "given, words",
    [
        ({"slo_ms": 0.5}, "--slo-ms: found 0.5, expected at least 1 and at most 60000"),
        ({"slo_ms": float("nan")}, "--slo-ms: found nan"),
        ({"floor_budget": 0.5}, "Found --floor-budget without --slo-ms"),
    ],
)
def test_options_that_are_refused(out, given, words):
    with pytest.raises(SaccadeError, match=words):
        RepositoryOptions(out, **given)


@pytest.mark.parametrize(
    "floor, words",
    [
        ("tiny", "--floor-budget is 'tiny', expected a number above 0 .* b1000, b0500"),
        (1.5, "--floor-budget is 1.5, expected"),
        ("b1000", r"one budget of at least 1 \(--floor-budget\) and no policies, expected someth"),
    ],
)
def test_a_floor_that_leaves_no_choice_is_refused(folder, out, floor, words):
    with pytest.raises(SaccadeError, match=words):
        deploy(folder, RepositoryOptions(out, slo_ms=50, floor_budget=floor))
    assert not out.exists()
    write_policy(folder)
    if floor == "b1000":
        deploy(folder, RepositoryOptions(out, slo_ms=50, floor_budget=floor))


def test_a_floor_above_every_budget_is_refused(folder, out):
    (folder / f"{FULL}.onnx").unlink()
    for path in folder.glob(f"{FULL}.*"):
        path.unlink()
    with pytest.raises(SaccadeError, match=r"found --floor-budget 0.8, expected at most 0.5"):
        deploy(folder, RepositoryOptions(out, slo_ms=50, floor_budget=0.8))
    with pytest.raises(SaccadeError, match=r"found one budget and no policies, .*saccade calibra"):
        deploy(folder, RepositoryOptions(out, slo_ms=50))


def test_words_are_not_classes_that_could_be_chosen_faster(folder, out):
    """A captioner has logits, too; it cannot be calibrated, so no advice may say so."""
    variants = [captioning(variant) for variant in ArtefactFolder(folder).variants]
    with pytest.raises(SaccadeError, match=r"found a model of family captioner, .* Drop --slo-ms"):
        options = RepositoryOptions(out, slo_ms=50)
        served_adaptive(variants, {}, RouterPolicies(), options, labelled=False)


def captioning(variant: VariantFiles) -> VariantFiles:
    """Return a variant whose manifests say that it is a captioner's."""
    return replace(
        variant,
        components={
            name: replace(one, variant=replace(one.variant, family="captioner"))
            for name, one in variant.components.items()
        },
    )


def test_answers_that_cannot_be_compared_are_refused(folder, out):
    for manifest in ArtefactFolder(folder).manifests:
        kept = tuple(spec for spec in manifest.outputs if spec.name == "embedding")
        write_manifest(folder, replace(manifest, outputs=kept, labels=()))
    with pytest.raises(
        SaccadeError, match="--slo-ms: found a model of family nac, expected a classifier"
    ):
        deploy(folder, RepositoryOptions(out, slo_ms=50))
    assert not out.exists()


def changed(**values: Any) -> Callable[[Any], None]:
    return lambda routes: routes["adaptive"].update(values)


CHANGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "objective": (changed(slo_ms=60.0), "slo_ms"),
    "no objective": (changed(slo_ms=0.0), "slo_ms is 0, expected at least 1"),
    "floor": (changed(floor_budget=0.25), "floor_budget"),
    "no floor": (changed(floor_budget=2), "floor_budget"),
    "shares": (changed(shares={"auto": [0.5, 0.1]}), "add up to 0.6, expected 1"),
    "other shares": (changed(shares={}), "expected the shares of each step of auto"),
    "more": (changed(mood="good"), "unknown keys: mood"),
    "gone": (lambda routes: routes.pop("adaptive"), "slo_ms|adaptive"),
    "no object": (lambda routes: routes.update(adaptive=5), "found 5, expected an object"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_preflight_sees_what_was_changed(made, out, case):
    shutil.copytree(made, out)
    change, words = CHANGED[case]
    assert [step["variant"] for step in routes_of(out)["policies"][0]["steps"]] == [HALF, FULL]
    change_routes(out, change)
    found = reasons(out, "routes", "fields")
    assert any(re.search(words, reason) for reason in found), found
