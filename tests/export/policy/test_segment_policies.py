# SPDX-License-Identifier: Apache-2.0
"""Policies of segmentations: how they are compared, what is certified, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from family_folders import family_folder
from policy_files import calibrated_slots
from router_code import router_module

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation import segmentation
from saccade.exporter.policy.answers import MEASURES, VariantSegments, segment_answers_of
from saccade.exporter.policy.policy import (
    CertificateReport,
    check_certificates,
    read_answers,
    read_policies,
)
from saccade.models.checkpoint import Checkpoint
from saccade.models.data.splits import SPLITS
from saccade.models.data.tetrominoes import tetrominoes
from saccade.serving.commands import cli

FULL, SMALL = "slot-attention-t2-fp32", "slot-attention-t1-fp32"
SCENES = np.random.default_rng(0).dirichlet(np.full(4, 0.2), (50, 6, 5)).transpose(0, 3, 1, 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy; copy it to change it."""
    place = tmp_path_factory.mktemp("segments") / "slots"
    shutil.copytree(family_folder("slot-attention"), place)
    assert calibrated_slots(place).exit_code == 0
    return place


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "slots")


def checked(folder: Path) -> CertificateReport:
    (report,) = check_certificates(folder, ArtefactFolder(folder).variants)
    return report


def compared(owners: dict[str, np.ndarray], min_ari: float = 0.95) -> np.ndarray:
    """Whether each segmentation of `other` counts as another one than that of `full`."""
    variants = [
        VariantSegments(name, name, seconds, owners[name], np.ones((3, len(owners[name]))))
        for name, seconds in (("other", 1.0), ("full", 2.0))
    ]
    answers = segment_answers_of(variants, full="full", seed=0, min_ari=min_ari)
    assert not answers.differs[1].any()
    order = np.random.default_rng(0).permutation(answers.n)
    return np.asarray(answers.differs[0][np.argsort(order)])


def test_a_policy_of_rounds_is_written_and_certified_again(made):
    content = read_policies(made / "auto.policy.json")
    (policy,) = content.policies
    assert [step.variant for step in policy.steps] == [SMALL, FULL]
    assert 0 < policy.steps[0].share < 1 and policy.observed <= policy.bound <= 0.3
    assert (content.min_ari, content.labels_sha256) == (0.95, None)
    assert {source.temperature for source in content.variants} == {1.0}
    answers = read_answers(content, made / "auto.policy.json")
    assert answers.agreement is not None and (answers.agreement[answers.full] == 1).all()
    assert checked(made).passed


def test_segmentations_have_no_classes(folder):
    with pytest.raises(SaccadeError, match=r"--per-class: certifies each class, but .* does not"):
        calibrated_slots(folder, per_class=True)


def test_other_scenes_may_choose(folder, tmp_path, monkeypatch):
    seeds, plain = [], segmentation.initial_states

    def states(*given, seed):
        seeds.append(seed)
        return plain(*given, seed=seed)

    monkeypatch.setattr(segmentation, "initial_states", states)
    other = tmp_path / "other.npz"
    drawn = np.random.default_rng(7).integers(0, 256, (100, 16, 16, 3), dtype=np.uint8)
    np.savez(other, images=drawn)
    content = calibrated_slots(folder, choose_data=str(other)).content
    assert (content.learn, content.samples) == (100, 300) and content.choose_data == "other.npz"
    assert checked(folder).passed
    assert seeds[1] == SPLITS.index("test") and seeds[0] > len(SPLITS), "both start elsewhere"
    with pytest.raises(SaccadeError, match="found 60 of 60 samples that are also in what chooses"):
        calibrated_slots(folder, choose_data=str(folder / "noise.npz"), limit=60)
    some = np.load(folder / "noise.npz")["images"][7:50]  # which start from other slots there
    np.savez(other, images=some)
    with pytest.raises(SaccadeError, match="found 43 of 60 samples that are also in what chooses"):
        calibrated_slots(folder, choose_data=str(other), limit=60)


def test_slots_may_be_numbered_differently():
    full = SCENES.argmax(1)
    renumbered = np.array([2, 0, 3, 1])[full]
    assert (renumbered != full).all() and not compared({"full": full, "other": renumbered}).any()
    moved = full.copy()
    moved[::2, :2] = (moved[::2, :2] + 1) % 4
    lost = compared({"full": full, "other": moved})
    assert lost[::2].all() and not lost[1::2].any()
    assert not compared({"full": full, "other": moved}, min_ari=0.01).any()


@pytest.mark.parametrize("measure", MEASURES)
def test_the_confidence_in_masks(measure):
    confidence = router_module("confidence").mask_confidence
    masks = SCENES.astype(np.float32)
    sure = confidence(measure, masks)
    assert sure.shape == (50,) and (sure > 0).all() and (sure < 1).all()
    np.testing.assert_allclose(confidence(measure, masks[:, [2, 0, 3, 1]]), sure, rtol=1e-12)
    alone = np.concatenate([confidence(measure, masks[at : at + 1]) for at in range(50)])
    np.testing.assert_array_equal(alone, sure)  # to the last bit, in any company
    owned = np.eye(4)[masks.argmax(1)].transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(confidence(measure, owned), 1.0)
    assert confidence(measure, np.full((1, 4, 6, 5), 0.25)) == pytest.approx(
        0.25 if measure == "top1" else 0.0
    )
    masks[7, 0, 0, 0] = np.nan
    assert np.flatnonzero(confidence(measure, masks) == 0).tolist() == [7]


CHANGES: dict[str, tuple[Callable[[dict], object], str]] = {
    "threshold": (
        lambda content: content["policies"][0]["steps"][0].update(threshold=0.0),
        "step 1, .*: threshold is .* but the calibration gives",
    ),
    "agreement": (lambda content: content.update(min_ari=0.01), "but the calibration gives"),
    "no agreement": (lambda content: content.pop("min_ari"), "contains .*agreement.* expected"),
    "no share": (lambda content: content.update(min_ari=2.0), "min_ari: found 2.0, expected"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_policy_does_not_pass(folder, change):
    path = folder / "auto.policy.json"
    apply, words = CHANGES[change]
    content = json.loads(path.read_text())
    apply(content)
    path.write_bytes(json_bytes(content))
    report = checked(folder)
    assert not report.passed and re.search(words, str(report.problem), re.S), report.problem


def test_slots_have_no_labels_to_compare_with(folder, capsys):
    for path in folder.glob("*.policy.*"):
        path.unlink()
    words = ["calibrate", str(folder), "--data", str(folder / "noise.npz"), "--against", "labels"]
    assert cli.run(words) == 2
    assert "its slots have no labels that could be right or wrong" in capsys.readouterr().err
    assert not list(folder.glob("*.policy.*"))


def test_generated_scenes_of_all_splits(folder, monkeypatch):
    drawn = []

    def counted(*given, **named):
        drawn.append(given)
        return tetrominoes(*given, **named)

    monkeypatch.setattr(segmentation, "tetrominoes", counted)
    done = calibrated_slots(folder, data="tetrominoes", limit=150, split="validation")
    assert len(drawn) == 1 < len(done.content.variants), "once for all variants"
    assert done.content is not None and done.content.samples == 150
    every = calibrated_slots(folder, data="shapes", limit=150, split="all")
    assert every.content is not None
    assert (every.content.samples, every.content.data) == (150, "shapes")


def test_training_images_do_not_certify(folder, monkeypatch):
    model = ArtefactFolder(folder)
    images = np.load(folder / "noise.npz")["images"]
    card = {"data": "other", "data_sha256": {"train": "0" * 64}}
    own = (model.path / "s.safetensors", "0" * 64, "slot-attention", {}, {})
    preprocessing = model.manifests[0].preprocessing
    trained = Checkpoint(*own, preprocessing, (), {"image": images[:20]}, card)
    monkeypatch.setattr(ArtefactFolder, "checkpoint_of", lambda *_: trained)
    with pytest.raises(SaccadeError, match=r"noise.npz: found 20 of 20 samples that trained s,"):
        calibrated_slots(folder)


def test_masks_that_are_not_numbers_are_refused(folder, monkeypatch):
    from saccade.exporter.evaluation.evaluated_model import EvaluatedFunction

    answer = EvaluatedFunction.__call__

    def broken(self, inputs):
        outputs = answer(self, inputs)
        return {**outputs, "masks": np.where(outputs["masks"] > 0.5, np.nan, outputs["masks"])}

    monkeypatch.setattr(EvaluatedFunction, "__call__", broken)
    with pytest.raises(SaccadeError, match="answers some samples with NaN or infinity"):
        calibrated_slots(folder)
