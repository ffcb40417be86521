# SPDX-License-Identifier: Apache-2.0
"""Policies of segmentations in a benchmark: on masked images, and on images alone."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="scipy is missing: pip install '.[bench]'")
pytest.importorskip("torch", reason="torch is missing: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is missing: pip install '.[cpu]'")

from family_folders import family_folder
from policy_files import calibrated_slots

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation import segmentation
from saccade.exporter.evaluation.evaluate import scores_of
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_folder
from saccade.exporter.evaluation.examples import examples_of
from saccade.exporter.evaluation.segmentation import painted_segments
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.models.scores.results import EvaluationResult, bootstrap
from saccade.models.slot_attention.initial import initial_states
from saccade.serving.bench.in_process import Calls, InProcessLoad
from saccade.serving.bench.policies import (
    PolicyWorks,
    ends_of,
    entry_of_policy,
    policy_works,
    works_of_segmenters,
)

FULL, SMALL = "slot-attention-t2-fp32", "slot-attention-t1-fp32"
ORT = runtime_named("onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a policy that was calibrated on `noise.npz`, images alone."""
    place = tmp_path_factory.mktemp("segments") / "slots"
    shutil.copytree(family_folder("slot-attention"), place)
    assert calibrated_slots(place).exit_code == 0
    return place


@pytest.fixture(scope="module")
def models(folder):
    return subjects_of_folder(ArtefactFolder(folder), ORT)


Measured = tuple[PolicyWorks, dict[str, EvaluationResult]]


def measured(folder: Path, models: list[EvaluatedModel], options: EvaluateOptions) -> Measured:
    results = {one.variant: one for one in scores_of(models, options, lambda: None)}
    samples = {name: result.samples for name, result in results.items()}
    return policy_works(ArtefactFolder(folder), models, ORT, options, samples), results


SCORED = 40  # the test split of `noise.npz`
CASES = {
    "images alone": ("noise.npz", "reconstruction", SCORED),
    "generated scenes": ("tetrominoes", "ari", 40),
    "generated scenes, painted": ("shapes", "reconstruction", 30),
}


def options_of(folder: Path, case: str) -> EvaluateOptions:
    data, task, limit = CASES[case]
    path = str(folder / data) if (folder / data).exists() else data
    return EvaluateOptions(path, task=task, limit=limit)


@pytest.mark.parametrize("case", CASES)
def test_the_figures_are_those_of_the_scored_samples(case, folder, models):
    works, results = measured(folder, models, options_of(folder, case))
    assert not works.left_out and works.answers
    (work,) = works.works
    ends = ends_of(work, works.answers)
    count = len(results[FULL].samples)
    assert len(ends) == count and 0 < ends.sum() < count
    full: Any = SimpleNamespace(runtime="onnxruntime 1", device="here", ops=None)
    speed = InProcessLoad({1: Calls(1, [0.01, 0.01], rounds=[100.0, 50.0])})
    speeds = {(FULL, ""): speed, work.key: speed}
    entry = entry_of_policy(work, works.answers, results[FULL], speeds, full)
    scores = np.where(ends == 0, results[SMALL].samples, results[FULL].samples)
    first = results[FULL].scores[0]
    assert (entry.score.name, entry.score.unit, entry.score.n) == (first.name, first.unit, count)
    assert entry.score.value == pytest.approx(scores.mean(), abs=1e-5)
    assert entry.score.interval == pytest.approx(bootstrap(scores), abs=1e-5)
    assert entry.gain == pytest.approx((scores - results[FULL].samples).mean(), abs=1e-5)
    ari = works.answers.agreement[FULL, SMALL]
    assert entry.agreement == pytest.approx(np.where(ends == 0, ari >= 0.95, True).mean(), abs=1e-5)
    assert (works.answers.agreement[FULL, FULL] == 1).all()
    assert entry.steps[0].share == pytest.approx((ends == 0).mean(), abs=1e-5)
    assert entry.min_ari == 0.95
    # A calibration on images alone was on all of them, and on generated scenes also on these.
    assert entry.calibrated == (case == "images alone")
    for split, known in {"test": True, "validation": case == "images alone", "all": True}.items():
        content = replace(work.content, data=works.answers.data, split=split)
        again = replace(work, content=content)
        found = entry_of_policy(again, works.answers, results[FULL], speeds, full)
        assert found.calibrated == known, split


def test_rows_leave_as_the_confidence_of_all_samples_says(folder, models):
    options = options_of(folder, "images alone")
    works, _ = measured(folder, models, options)
    (work,) = works.works
    assert works.answers
    given = work.run(work.inputs)
    assert len(given["step"]) == SCORED
    single = work.run({name: array[:1] for name, array in work.inputs.items()})
    assert single["masks"].shape == (1, *given["masks"].shape[1:])
    # Each row has the masks of the variant that answered it.
    own = [run(work.inputs) for run in work.runs]
    for row, step in enumerate(given["step"]):
        np.testing.assert_allclose(given["masks"][row], own[step][row], rtol=1e-4, atol=1e-5)
    assert set(given["step"].tolist()) == {0, 1}


def test_requests_begin_with_the_slots_that_a_router_draws_for_one_image(folder, models):
    """Image 0 of every request has the same initial slots, whatever image it is."""
    works, _ = measured(folder, models, options_of(folder, "images alone"))
    metadata = models[0].runtime_metadata
    expected = initial_states(metadata["initial_state"], 1, int(metadata["slots"]))
    (work,) = works.works
    np.testing.assert_array_equal(work.inputs["initial_state"][:1], expected)


def test_policies_that_are_compared_with_different_full_models(folder, models):
    options = options_of(folder, "images alone")
    works, _ = measured(folder, models, options)
    (work,) = works.works
    other = replace(work.content, full=SMALL)
    found = {"auto": (work.policy, work.content), "other": (work.policy, other)}
    scored = painted_segments(models[0], options)
    both = works_of_segmenters(found, models, scored, {}, 0)
    assert len(both.works) == 2 and both.answers
    assert (both.answers.agreement[SMALL, FULL] == both.answers.agreement[FULL, SMALL]).all()
    assert both.answers.same(SMALL, other).all()


def test_images_are_painted_by_the_decoder_if_no_output_has_them(folder, models):
    options = options_of(folder, "images alone")
    (model,) = [one for one in models if one.name == FULL]
    (known,) = scores_of([model], options, lambda: None)
    run = model.components[""].run

    def without(inputs: Any) -> Any:
        return {name: value for name, value in run(inputs).items() if name != "reconstruction"}

    parts = {**model.components, "": replace(model.components[""], run=without)}
    (painted,) = scores_of([replace(model, components=parts)], options, lambda: None)
    np.testing.assert_allclose(painted.samples, known.samples, rtol=1e-4)
    psnr, mse = known.scores
    assert (psnr.name, psnr.unit, psnr.higher_is_better) == ("PSNR", "dB", True)
    assert (mse.name, mse.higher_is_better) == ("MSE", False)
    assert psnr.value == pytest.approx(known.samples.mean())
    parts.pop("decode")
    with pytest.raises(SaccadeError, match=r"--task of .*'reconstruction', expected ari"):
        scores_of([replace(model, components=parts)], options, lambda: None)


def test_the_ratio_of_an_image_follows_from_its_error(folder, models, monkeypatch):
    errors = np.array([0.1, 0.01, 0.0])
    monkeypatch.setattr(segmentation, "_errors", lambda *_: errors)
    options = EvaluateOptions(str(folder / "noise.npz"), task="reconstruction", limit=3)
    (result,) = scores_of(models[:1], options, lambda: None)
    assert result.samples == pytest.approx([10, 20, 100])


def test_images_alone_are_refused_where_masks_are_compared(folder, models):
    with pytest.raises(SaccadeError, match=r"found no masks.*--task reconstruction"):
        scores_of(models, EvaluateOptions(str(folder / "noise.npz")), lambda: None)


def test_examples_are_the_chosen_images(folder, models):
    options = options_of(folder, "images alone")
    values = {model.name: np.arange(float(SCORED)) * (at + 1) for at, model in enumerate(models)}
    examples = examples_of(models, options, values)
    with np.load(folder / "noise.npz") as arrays:
        images = arrays["images"]
    assert examples and all(len(one.answers) == len(models) for one in examples)
    shown = {one.index: one.image for one in examples}
    assert SCORED - 1 in shown
    assert any((images == shown[SCORED - 1]).all((1, 2, 3)))
    assert all(answer.focus is not None for one in examples for answer in one.answers)
