# SPDX-License-Identifier: Apache-2.0
"""`saccade calibrate`: what it writes, that it can be computed again, and what it refuses."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image
from policy_files import measured
from tiny_artefacts import FULL, HALF, LABELS, PREPROCESSING, artefacts, manifest_of, onnx_model

from saccade.core import files
from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import ParentEntry, write_manifest
from saccade.exporter.evaluation import calibration_samples, classification
from saccade.exporter.evaluation.calibrate import calibrate, rendered
from saccade.exporter.policy.certify import MissingCertificate
from saccade.exporter.policy.classes import OTHERS
from saccade.exporter.policy.options import CalibrateOptions
from saccade.exporter.policy.policy import check_certificates, read_policies
from saccade.models.checkpoint import Checkpoint
from saccade.models.data.datasets import load_data
from saccade.serving.commands import cli

SAMPLES = 900
RATES = {FULL: 100.0, HALF: 1_000.0}  # per second


def nearly(model: onnx.ModelProto, noise: float) -> onnx.ModelProto:
    """The same model with other weights in its last layer."""
    for tensor in model.graph.initializer:
        if tensor.name == "classify":
            weights = onnx.numpy_helper.to_array(tensor)
            drawn = np.random.default_rng(5).normal(size=weights.shape).astype(np.float32)
            changed = onnx.numpy_helper.from_array(weights + noise * drawn, "classify")
            tensor.CopyFrom(changed)
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants of which the smaller one answers nearly as the full one does."""
    place = artefacts(tmp_path_factory.mktemp("exported") / "tiny")
    parent = ArtefactFolder(place).manifests[0].parent
    data = nearly(onnx_model(0), 1.0).SerializeToString()
    manifest = manifest_of("b0500", data, ParentEntry(parent.name, parent.sha256))
    (place / manifest.file.name).write_bytes(data)
    write_manifest(place, manifest)
    measured(place, RATES)
    return place


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "tiny")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images without labels."""
    path = tmp_path_factory.mktemp("images") / "images.npz"
    drawn = np.random.default_rng(0).integers(0, 256, (SAMPLES, 4, 4, 1), dtype=np.uint8)
    np.savez(path, images=drawn)
    return path


@pytest.fixture(scope="module")
def calibrated(exported: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy; copy it to change it."""
    place = shutil.copytree(exported, tmp_path_factory.mktemp("calibrated") / "tiny")
    calibrate(place, options(images), progress=None)
    return place


@pytest.fixture
def labelled(tmp_path: Path, images: Path) -> Path:
    path = tmp_path / "labelled.npz"
    labels = np.arange(SAMPLES) % len(LABELS)
    np.savez(path, images=np.load(images)["images"], labels=labels, class_names=np.array(LABELS))
    return path


def options(data: Path, **changes: Any) -> CalibrateOptions:
    return CalibrateOptions(**{"data": str(data), "risk": (0.05,), **changes})


def test_a_policy_is_written_and_certified_again(folder, images):
    done = calibrate(folder, options(images), progress=None)
    (policy,) = done.policies
    assert done.exit_code == 0 and done.path == folder / "auto.policy.json"
    assert [step.variant for step in policy.steps][-1] in (FULL, HALF)
    assert policy.steps[0].variant == HALF and policy.seconds < policy.full_seconds == 1 / 100
    assert policy.observed <= policy.bound <= policy.risk == 0.05
    assert read_policies(done.path) == done.content
    (report,) = check_certificates(folder, ArtefactFolder(folder).variants)
    assert report.passed and report.name == "auto"


def test_a_confidence_is_not_rounded_to_certainty(folder, images):
    done = calibrate(folder, options(images, confidence=0.999), progress=None)
    (table,) = done.to_text().renderables
    assert "at most the risk, with 99.9 % confidence" in table.caption


def test_several_risks_are_policies_of_one_file(folder, images):
    done = calibrate(folder, options(images, risk=(0, 0.05, 0.2), name="night"), progress=None)
    names = [policy.name for policy in done.policies]
    assert names == ["night-0", "night-0.05", "night-0.2"]
    assert [step.variant for step in done.policies[0].steps] == [FULL]


def test_a_folder_of_photographs_needs_no_labels(folder, tmp_path):
    place = tmp_path / "photographs"
    place.mkdir()
    rng = np.random.default_rng(0)
    for count in range(120):
        shape = (int(rng.integers(5, 40)), int(rng.integers(5, 40)), 3)
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(place / f"{count:03}.png")
    done = calibrate(folder, options(place, risk=(0.3,)), progress=None)
    assert done.content.samples == 120 and done.content.data == "photographs"


def test_against_labels_counts_what_is_lost(folder, labelled, monkeypatch):
    loaded = []

    def counted(*given, **named):
        loaded.append(given)
        return load_data(*given, **named)

    monkeypatch.setattr(classification, "load_data", counted)
    done = calibrate(
        folder, options(labelled, against="labels", split="all", risk=(0.1,)), progress=None
    )
    assert done.content.samples == SAMPLES and done.content.against == "labels"
    assert len(loaded) == 1 < len(done.content.variants), "once for all variants"
    assert check_certificates(folder, ArtefactFolder(folder).variants)[0].passed


def drawn_images(path: Path, seed: int, count: int) -> Path:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 4, 4, 1), dtype=np.uint8)
    np.savez(path, images=images)
    return path


def test_other_data_chooses_and_all_of_the_data_certifies(folder, images, tmp_path):
    other = drawn_images(tmp_path / "other.npz", 9, 300)
    done = calibrate(folder, options(images, choose_data=str(other)), progress=None)
    content = done.content
    assert (content.samples, content.learn) == (300 + SAMPLES, 300)
    assert (content.choose_data, content.choose_split) == ("other.npz", "all")
    assert content.choose_data_sha256 != content.data_sha256
    assert check_certificates(folder, ArtefactFolder(folder).variants)[0].passed
    edited(done.path, lambda content: [content.pop(key) for key in [*content] if "choose" in key])
    (report,) = check_certificates(folder, ArtefactFolder(folder).variants)
    assert not report.passed, "the costs are those of the samples that certify"


def test_a_split_chooses_and_another_certifies(folder, labelled):
    found = options(labelled, against="labels", split="train", choose_split="test", risk=(0.2,))
    content = calibrate(folder, found, progress=None).content
    assert (content.split, content.choose_split) == ("train", "test")
    assert content.choose_data == content.data and 0 < content.learn < content.samples < SAMPLES


@pytest.mark.parametrize(("words", "found"), [
    (["--choose-split", "test"], "--choose-split is test and --split is test, expected two splits"),
    (["--choose-split", "all"], "--choose-split is all and --split is test, expected two splits"),
    (["--choose-split", "train"], "found 900 of 900 samples that are also in what chooses"),
    (["--choose-data", "{images}"], "found 900 of 900 samples that are also in what chooses"),
    (["--choose-data", "{few}"], "found 30 of 900 samples that are also in what chooses"),
    (["--choose-data", "missing.npz"], "missing.npz"),
    (["--choose-data", "{images}", "--against", "labels"], "images.npz has no labels"),
])  # fmt: skip
def test_a_sample_that_chose_cannot_certify(folder, images, tmp_path, words, found, capsys):
    few = tmp_path / "few.npz"
    np.savez(few, images=np.load(images)["images"][100:130])
    words = [word.format(images=images, few=few) for word in words]
    assert cli.run(["calibrate", str(folder), "--data", str(images), *words]) == 2
    assert found in capsys.readouterr().err
    assert not list(folder.glob("*.policy.*"))


@pytest.fixture
def trained(exported: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """What saccade knows of a model that was trained on the training split of the data."""
    data = load_data(labelled, "train", preprocessing=PREPROCESSING)
    card = {"data": labelled.name, "data_sha256": {"train": data.sha256}}
    known = {"image": data.images[:50], "labels": data.labels[:50]}
    path = exported / "tiny.safetensors"
    checkpoint = Checkpoint(path, "0" * 64, "nac", {}, {}, PREPROCESSING, LABELS, known, card)
    monkeypatch.setattr(ArtefactFolder, "checkpoint_of", lambda *_: checkpoint)
    return checkpoint


@pytest.mark.parametrize("split", ["train", "all"])
def test_the_training_split_certifies_nothing(folder, labelled, trained, split, monkeypatch):
    monkeypatch.setattr(calibration_samples, "_each", None)  # nothing runs before
    with pytest.raises(SaccadeError, match=f"--split {split} has the samples that trained tiny"):
        calibrate(folder, options(labelled, split=split, risk=(0.3,)), progress=None)
    assert not list(folder.glob("*.policy.*"))


def test_training_samples_in_other_data_certify_nothing(folder, labelled, trained, tmp_path):
    copies = tmp_path / "copies.npz"
    images = np.load(labelled)["images"]
    np.savez(copies, images=images[::-1])
    with pytest.raises(SaccadeError, match=r"copies.npz: found 50 of 50 samples that trained tiny"):
        calibrate(folder, options(copies), progress=None)
    trained.card["calibrated_on"] = {}  # other images took the place of the training samples
    assert calibrate(folder, options(copies), progress=None).exit_code == 0


def test_test_samples_of_the_training_data_certify(folder, labelled, trained):
    done = calibrate(folder, options(labelled, choose_split="val", risk=(0.3,)), progress=None)
    assert done.content.split == "test" and done.content.choose_split == "validation"


def test_each_class_is_certified_too(folder, labelled, capsys):
    words = ["--data", str(labelled), "--split", "all", "--risk", "0.3,0.4", "--per-class"]
    assert cli.run(["calibrate", str(folder), *words, "--confidence", "0.9"]) == 0
    said = capsys.readouterr().out
    content = read_policies(folder / "auto.policy.json")
    assert content.class_names == LABELS
    for policy in content.policies:
        names = [one.name for one in policy.classes]
        assert names and set(names) <= {*LABELS, OTHERS} and policy.steps[-1].variant == FULL
        assert all(one.observed <= one.bound <= policy.risk for one in policy.classes)
        assert {LABELS[at] for at in policy.early} <= set(names)
        own = len(names) - (OTHERS in names)
        assert f"{policy.name}: {own} of 3 classes lose at most {100 * policy.risk:g} %" in said
        assert re.search(rf"{names[0]} +{policy.classes[0].samples}", said)
    assert said.count("all samples") == 2
    assert check_certificates(folder, ArtefactFolder(folder).variants)[0].passed
    for change, reason in (
        (lambda c: c["policies"][0].update(early=[0, 1, 2, 3]), "early is .* but the calibration"),
        (lambda c: c["policies"][1]["classes"][0].update(bound=0.1), "classes is .* but the cal"),
        (lambda c: c.update(class_names=["a", "b", "c"]), "class_names is .* but the calibration"),
        (lambda c: c.pop("class_names"), "class_names is None, but the calibration"),
    ):
        before = (folder / "auto.policy.json").read_bytes()
        edited(folder / "auto.policy.json", change)
        reports = check_certificates(folder, ArtefactFolder(folder).variants)
        assert any(re.search(reason, one.problem or "", re.S) for one in reports), reports
        (folder / "auto.policy.json").write_bytes(before)


def test_the_other_classes_are_named(folder, labelled):
    """What is promised of classes with too few samples, and how many a class would need."""
    done = calibrate(
        folder,
        options(labelled, split="all", risk=(0.3,), per_class=True, confidence=0.9),
        progress=None,
    )
    (policy,) = done.policies
    few = replace(done.content, class_names=(*LABELS, "owl"))
    text = "\n".join(map(str, rendered(few, ()).renderables))
    assert "The other 2 have fewer than" in text and "without a limit" in text
    together = replace(policy.classes[0], name=OTHERS)
    few = replace(few, policies=(replace(policy, classes=(*policy.classes, together)),))
    text = "\n".join(map(str, rendered(few, ()).renderables))
    assert "at most 30 % of them together" in text


def test_what_is_not_certified_is_not_written(folder, images):
    data = nearly(onnx_model(0), 20.0).SerializeToString()  # agrees by chance alone
    parent = ArtefactFolder(folder).manifests[0].parent
    (folder / f"{HALF}.onnx").write_bytes(data)
    write_manifest(folder, manifest_of("b0500", data, parent))
    measured(folder, RATES)
    done = calibrate(folder, options(images, risk=(0.011,), confidence=0.99), progress=None)
    assert done.exit_code == 1 and done.path is None
    assert not list(folder.glob("*.policy.*"))
    assert done.refused[0].bound > 0.011


def edited(path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_bytes(json_bytes(content))


def of_step(**values: Any) -> Callable[[dict], None]:
    return lambda content: content["policies"][0]["steps"][0].update(values)


def warmer(content: dict) -> None:
    """Change a temperature in all places of the file, so that only the calibration tells."""
    warm = 2 * content["variants"][0]["temperature"]
    for one in (content["variants"][0], content["policies"][0]["steps"][0]):
        one.update(temperature=warm)


CHANGES: dict[str, tuple[Callable[[dict], None], str]] = {
    "threshold": (of_step(threshold=0.0), "step 1, .*: threshold is .* but the calibration gives"),
    "bound": (lambda c: c["policies"][0].update(bound=0.001), "bound is 0.001"),
    "confidence": (lambda c: c.update(confidence=0.999), "do not certify|but the calibration"),
    "risk": (lambda c: c["policies"][0].update(risk=0.012), "do not certify|but the calibration"),
    "measure": (lambda c: c["policies"][0].update(measure="guess"), "measure: found 'guess'"),
    "no last": (lambda c: c["policies"][0]["steps"].pop(), "is not a chain"),
    "other variant": (of_step(variant="tiny-b0250-fp32"), "is not a chain"),
    "other model": (lambda c: c["variants"][0].update(sha256="0" * 64), "is not a chain"),
    "no policies": (lambda c: c.update(policies=[]), "has the policies none"),
    "answers": (lambda c: c.update(answers_sha256="0" * 64), "policy.npz: missing"),
    "path": (lambda c: c.update(answers_sha256="../../else"), "is not a SHA-256 in hexadecimal"),
    "runtime": (lambda c: c.update(runtime="tensorrt 10"), "runtime is 'tensorrt 10', but the cal"),
    "temperature": (warmer, "variants is .* but the calibration gives"),
    "policy's name": (
        lambda c: c["policies"][0].update(name="careful"),
        "found policy 'careful' of risk 0.05, expected the name auto-0.05",
    ),
    "samples": (lambda c: c.update(samples=10_000), "contains .* expected"),
    "version": (lambda c: c.update(version=9), "version 9, expected 'saccade.policies' version 2"),
    "no version": (lambda c: c.pop("version"), "version None, expected 'saccade.policies'"),
    "schema": (lambda c: c.update(schema="other"), "schema is 'other' version 2, expected"),
    "unknown key": (lambda c: c.update(mood="good"), "mood"),
    "name": (lambda c: c.update(name="other"), "is the file of 'other.policy.json'"),
    "full": (lambda c: c.update(full="nobody"), "compares with 'nobody'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_policy_does_not_pass(calibrated, tmp_path, change):
    folder = shutil.copytree(calibrated, tmp_path / "tiny")
    path = folder / "auto.policy.json"
    apply, words = CHANGES[change]
    edited(path, apply)
    (report,) = check_certificates(folder, ArtefactFolder(folder).variants)
    assert not report.passed
    assert re.search(words, report.problem, re.S), report.problem
    advice = f"saccade calibrate {folder} --data DATA"
    assert report.problem.startswith(str(folder)) and report.problem.count(advice) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"schema": "saccade.pol', "cannot be read as JSON"),
        (b"[1]", "found a list, expected an object"),
    ],
)
def test_a_policy_file_that_is_cut_off_is_described(folder, content, words):
    (folder / "auto.policy.json").write_bytes(content)
    (report,) = check_certificates(folder, ArtefactFolder(folder).variants)
    assert re.search(rf"auto.policy.json: {words}", report.problem)
    assert report.problem.endswith(f"saccade calibrate {folder} --data DATA")


def test_a_policy_of_other_variants_does_not_pass(folder, images):
    calibrate(folder, options(images), progress=None)
    parent = ArtefactFolder(folder).manifests[0].parent
    data = nearly(onnx_model(0), 0.2).SerializeToString()
    (folder / f"{HALF}.onnx").write_bytes(data)
    write_manifest(folder, manifest_of("b0500", data, parent))
    (report,) = check_certificates(folder, ArtefactFolder(folder).variants)
    assert "the folder has" in report.problem and "saccade calibrate" in report.problem


def test_a_kill_between_two_files_leaves_the_older_policy_valid(folder, images, monkeypatch):
    calibrate(folder, options(images), progress=None)
    place = files._place

    def killed(partial: Path, path: Path, *, force: bool) -> None:
        if path.suffix == ".json":
            raise KeyboardInterrupt
        place(partial, path, force=force)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(files, "_place", killed)
        calibrate(folder, options(images, seed=1), progress=None)
    assert len(list(folder.glob("auto.*.policy.npz"))) == 2
    (report,) = check_certificates(folder, ArtefactFolder(folder).variants)
    assert report.problem is None
    calibrate(folder, options(images, seed=1), progress=None)
    assert len(list(folder.glob("auto.*.policy.npz"))) == 1


def test_answers_that_are_gone_or_changed_do_not_pass(folder, images):
    calibrate(folder, options(images), progress=None)
    (answers,) = folder.glob("auto.*.policy.npz")
    answers.write_bytes(answers.read_bytes() + b"x")
    (report,) = check_certificates(folder, ArtefactFolder(folder).variants)
    assert "SHA-256 is" in report.problem
    answers.unlink()
    (report,) = check_certificates(folder, ArtefactFolder(folder).variants)
    assert "missing" in report.problem


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--risk", "1"], "--risk: found 1.0, expected at least 0 and below 1"),
        (["--risk", "-0.1"], "--risk: found -0.1, expected"),
        (["--risk", "nan"], "--risk: found nan, expected"),
        (["--risk", "0.1,0.1"], "--risk is 0.1,0.1, expected .* different .* each of them once"),
        (["--risk", "0.1,0.10000001"], "is 0.1,0.10000001, expected .* different .* six digits"),
        (["--risk", "0.1,0.2", "--name", "a" * 45], f"--name is '{'a' * 45}-0.1', expected"),
        (["--risk", "1e-15"], "--risk 1e-15: more than 100,000,000 samples would be needed"),
        (["--confidence", "1"], "--confidence: found 1.0, expected"),
        (["--min-ari", "0.9"], "--min-ari 0.9: compares segmentations, but .* with classes"),
        (["--min-ari", "0"], "--min-ari: found 0.0, expected above 0"),
        (["--steps", "9"], "--steps: found 9, expected .* at most 4"),
        (["--name", "../x"], "--name is '../x', expected"),
        (["--against", "labels"], "has no labels"),
        (["--limit", "50"], "--limit leaves 50 samples, expected .* Pass a larger --limit, let"),
        (["--risk", "0.001"], "has 900 samples, expected at least 4,991: fewer cannot certify"),
        (
            ["--device", "elsewhere"],
            "was measured on here .*, but --device is 'elsewhere'. Name one of these machines",
        ),
        (["--templates", "t.txt"], "--templates t.txt: .* zero-shot models, but .* of its own"),
        (["--labels", "names.txt"], "--labels names.txt: .* but images.npz has no labels. Drop it"),
    ],
)
def test_wrong_input_is_refused(folder, images, words, found, capsys):
    assert cli.run(["calibrate", str(folder), "--data", str(images), *words]) == 2
    assert re.search(found, capsys.readouterr().err)
    assert not list(folder.glob("*.policy.*"))


def test_one_image_cannot_both_choose_and_certify(folder, tmp_path):
    one = drawn_images(tmp_path / "one.npz", 0, 1)
    with pytest.raises(SaccadeError, match=r"its test part has 1 samples, expected at least 2"):
        calibrate(folder, options(one, risk=(0,)), progress=None)


def test_speeds_have_to_be_measured(folder, images):
    (folder / "frontier.json").unlink()
    command = (
        re.escape(f"Run: saccade bench {folder} --runtime onnxruntime --data {images} --split ")
        + rf"\w+ --out {re.escape(str(folder))}-report$"
    )
    with pytest.raises(SaccadeError, match=rf"nothing was measured, .*{command}"):
        calibrate(folder, options(images), progress=None)
    measured(folder, RATES)
    frontier = json.loads((folder / "frontier.json").read_text())
    frontier["entries"] = [one for one in frontier["entries"] if one["variant"] != FULL]
    (folder / "frontier.json").write_bytes(json_bytes(frontier))
    with pytest.raises(SaccadeError, match=rf"{FULL}, the full model, .*{command[:-1]} --force$"):
        calibrate(folder, options(images), progress=None)


def test_the_speeds_are_those_of_the_runtime_that_answers(folder, images):
    """A repository keeps the policies of its own runtime, by the name in the policy file."""
    other = "tensorrt 10.16 NVIDIA H100"
    measured(folder, RATES, runtime=other)  # beside those of ONNX Runtime
    done = calibrate(folder, options(images), progress=None)
    assert done.content.runtime.startswith("onnxruntime ")
    (folder / "frontier.json").unlink()
    measured(folder, RATES, runtime=other)
    with pytest.raises(SaccadeError, match=rf"measured with {other}, not with onnxruntime, .*Run"):
        calibrate(folder, options(images), progress=None)


def test_a_family_without_answers_to_compare_is_refused_by_name(folder, images):
    there = ArtefactFolder(folder)
    captioners = [
        replace(one, variant=replace(one.variant, family="captioner")) for one in there.manifests
    ]
    vars(there).update(manifests=tuple(captioners))
    with pytest.raises(
        SaccadeError, match=r"family 'captioner' cannot stop early: .* Calibrate a model"
    ):
        calibrate(there, options(images), progress=None)


def test_one_variant_leaves_nothing_to_stop_at(folder, images):
    for name in (f"{HALF}.onnx", f"{HALF}.manifest.json"):
        (folder / name).unlink()
    with pytest.raises(SaccadeError, match=rf"found 1 variant \({FULL}\), expected at least two"):
        calibrate(folder, options(images), progress=None)


def test_a_bound_below_the_risk_is_not_blamed_on_the_data():
    from saccade.exporter.evaluation.calibrate import rendered

    (line,) = rendered(None, [MissingCertificate(0.01, 0.0099, 499)]).renderables
    assert "the cheapest chain that meets it is not faster" in str(line)
    assert "measure again with `saccade bench`" in str(line)
    (line,) = rendered(None, [MissingCertificate(0.01, 0.02, 499)]).renderables
    assert "499 samples would do" in str(line)


def test_images_of_another_size_are_refused(folder, tmp_path):
    path = tmp_path / "large.npz"
    np.savez(path, images=np.zeros((SAMPLES, 5, 5, 1), np.uint8))
    with pytest.raises(
        SaccadeError, match=r"images are \(5, 5, 1\) .* the model expects \(4, 4, 1\)"
    ):
        calibrate(folder, options(path), progress=None)
