# SPDX-License-Identifier: Apache-2.0
"""Bulk jobs that follow a policy: each input as the chain answers it, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from half_typed import add_variant
from policy_files import write_policy
from router_code import router_module
from tiny_artefacts import FULL, HALF, LABELS, artefacts, onnx_model

from saccade.core.errors import SaccadeError
from saccade.exporter.policy.policy import Policy
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import Place
from saccade.serving.bulk.plan import check_same, read_plan

pytest.importorskip("scipy", reason="scipy is not installed: pip install '.[bench]'")
pq = pytest.importorskip("pyarrow.parquet", reason="missing: pip install '.[bulk]'")
ort = pytest.importorskip("onnxruntime", reason="missing: pip install '.[cpu]'")

IMAGES = np.random.default_rng(0).integers(0, 256, (500, 4, 4, 1), dtype=np.uint8)
COUNT = 40  # of them, in a job
NOISE, RISK = 2.0, 0.05


def logits_of(folder: Path, name: str) -> np.ndarray:
    session = ort.InferenceSession(str(folder / f"{name}.onnx"))
    return np.asarray(session.run(["logits"], {"image": IMAGES})[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants of which the smaller one answers nearly as the full one does, and a policy."""
    place = artefacts(tmp_path_factory.mktemp("bulk") / "artefact", checkpoint=False)
    model = onnx_model(0)
    for tensor in model.graph.initializer:
        if tensor.name == "classify":
            weights = onnx.numpy_helper.to_array(tensor)
            drawn = np.random.default_rng(5).normal(size=weights.shape).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights + NOISE * drawn, "classify"))
    add_variant(place, HALF, "fp32", model)
    calibrated(place)
    return place


def calibrated(folder: Path) -> Policy:
    logits = {name: logits_of(folder, name) for name in (FULL, HALF)}
    (policy,) = write_policy(folder, risks=(RISK,), logits=logits).policies
    return policy


@pytest.fixture
def options(tmp_path: Path) -> Any:
    """Options of a job in one process; changes come by name."""
    np.savez(tmp_path / "inputs.npz", image=IMAGES[:COUNT])

    def make(**changes: Any) -> BulkOptions:
        given = {"out": str(tmp_path / "out"), "workers": "1", "top": 3, **changes}
        return BulkOptions(str(tmp_path / "inputs.npz"), **given)

    return make


def test_each_input_is_answered_as_by_the_chain(folder, options, tmp_path):
    report = bulk(folder, options(policy="auto", batch=7))
    assert (report.variant, report.answers, report.errors) == ("policy auto", COUNT, 0)
    rows = pq.read_table(tmp_path / "out" / "answers").to_pylist()
    policy = calibrated(folder)
    assert [step.variant for step in policy.steps] == [HALF, FULL]
    logits = {name: logits_of(folder, name)[:COUNT] for name in (FULL, HALF)}
    first = policy.steps[0]
    confidence = router_module("confidence").confidence
    sure = confidence(policy.measure, logits[HALF], first.temperature) >= first.threshold
    assert 0 < sure.sum() < COUNT
    assert [row["steps"] for row in rows] == np.where(sure, 1, 2).tolist()
    assert [row["variant"] for row in rows] == np.where(sure, HALF, FULL).tolist()
    best = np.where(sure, logits[HALF].argmax(1), logits[FULL].argmax(1))
    assert [row["labels"][0] for row in rows] == [LABELS[one] for one in best]
    changed = read_plan(Place(str(tmp_path / "out")))
    assert changed is not None and len(changed.policies_sha256) == 64


def test_what_cannot_follow_a_policy_is_refused_before_any_input(folder, options, tmp_path):
    for changes, words in (
        ({"policy": "lunch"}, "--policy: found 'lunch', expected a policy of tiny: auto"),
        ({"policy": "auto", "budget": 0.5}, "Found --budget, --policy together"),
        ({"max_risk": 1.0}, "max_risk is 1.0, expected"),
        ({"max_risk": 0.1, "slots": 3}, "--slots 3 cannot be combined with a policy"),
        ({"max_risk": 0.1, "ask": "embed"}, "--ask embed cannot follow a policy"),
    ):
        with pytest.raises(SaccadeError, match=words):
            bulk(folder, options(**changes))
    assert not list((tmp_path / "out").glob("answers/*"))
    plain = artefacts(tmp_path / "plain", checkpoint=False)
    with pytest.raises(SaccadeError, match=r"tiny has no policies\. Run `saccade calibrate`"):
        bulk(plain, options(policy="auto"))


def test_a_job_goes_on_with_the_policies_that_it_was_begun_with(folder, options, tmp_path):
    bulk(folder, options(max_risk=0))
    rows = pq.read_table(tmp_path / "out" / "answers").to_pylist()
    assert {(row["variant"], row["steps"]) for row in rows} == {(FULL, 1)}
    place = Place(str(tmp_path / "out"))
    plan = read_plan(place)
    assert plan is not None
    with pytest.raises(SaccadeError, match="contains a different job: the policies changed"):
        check_same(place, plan, replace(plan, policies_sha256="0" * 64))
