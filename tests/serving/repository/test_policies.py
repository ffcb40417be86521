# SPDX-License-Identifier: Apache-2.0
"""Policies of a folder in its repository: taken, left out, or refused; and what preflight sees."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="scipy is not installed: pip install '.[bench]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny
from family_folders import family_folder
from half_typed import add_variant
from policy_files import measured, write_policy
from support.serving.repositories import change_routes, config_of, reasons, routes_of
from tiny_artefacts import FULL, HALF, MODEL

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.calibrate import calibrate
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.policy.options import CalibrateOptions
from saccade.exporter.policy.policy import read_policies
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.client.router_view import DESCRIBED
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_description
from saccade.serving.repository.options import RepositoryOptions


def test_the_router_is_told_what_was_certified(folder, out):
    content = write_policy(folder, risks=(0.1, 0.2))
    deployment = deploy(folder, RepositoryOptions(out))
    assert deployment.policies == ("auto-0.1", "auto-0.2")
    assert read_description(out)[0] == deployment
    written = routes_of(out)["policies"]
    for policy, known in zip(written, content.policies, strict=True):
        assert (policy["name"], policy["risk"], policy["bound"]) == (
            known.name, known.risk, known.bound,
        )  # fmt: skip
        assert (policy["full"], policy["against"]) == (FULL, "full")
        names = ("variant", "sha256", "threshold", "temperature")
        assert policy["steps"] == [
            {**{name: getattr(step, name) for name in names}, "end_share": step.share}
            for step in known.steps
        ]
    config = config_of(out, MODEL)
    assert {"steps", "certified"} <= {tensor.name for tensor in config.output}
    described = json.loads(config.parameters[DESCRIBED].string_value)
    assert described["policies"] == ["auto-0.1", "auto-0.2"]
    assert reasons(out, "routes", "fields") == []


def test_without_policies_every_file_is_as_it_was(folder, out, tmp_path):
    deploy(folder, RepositoryOptions(out))
    write_policy(folder)
    deploy(folder, RepositoryOptions(tmp_path / "other", policies=False))
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    for name in files:
        assert (out / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
    assert "policies" not in routes_of(out)
    assert "certified" not in (out / MODEL / "config.pbtxt").read_text()
    assert "policies" not in json.loads((out / "saccade.json").read_text())


def test_who_measures_or_answers_in_bulk_needs_no_policy(folder):
    assert not BulkOptions(input="a", out="b").repository(Path("c")).policies


def other_variant(folder: Path) -> None:
    add_variant(folder, HALF, "fp32", tiny.onnx_model(5))


def other_threshold(folder: Path) -> None:
    path = folder / "auto.policy.json"
    content = json.loads(path.read_text())
    content["policies"][0]["steps"][0]["threshold"] = 0.01
    path.write_bytes(json_bytes(content))


def no_answers(folder: Path) -> None:
    (answers,) = folder.glob("auto.*.policy.npz")
    answers.unlink()


def same_name(folder: Path) -> None:
    write_policy(folder, "auto-0", (0.1,))
    write_policy(folder, "auto", (0, 0.1))


def other_full(folder: Path) -> None:
    write_policy(folder, "half", of=(HALF,), risks=(0,))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "variant": (
        other_variant,
        rf"calibrated with {HALF} of SHA-256 .* the folder has .*saccade ca",
    ),
    "threshold": (
        other_threshold,
        "auto: step 1, .*: threshold is .* but the calibration gives .*--no-policies",
    ),
    "answers": (no_answers, r"auto\.\w{12}\.policy\.npz: missing"),
    "name": (same_name, "found 2 policies with the name auto-0"),
    "full": (other_full, f"different full models .*auto with {FULL}"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_policy_that_is_not_certified_is_refused(folder, out, case):
    write_policy(folder)
    change, words = BROKEN[case]
    change(folder)
    with pytest.raises(SaccadeError, match=words):
        deploy(folder, RepositoryOptions(out))
    assert not out.exists()
    assert deploy(folder, RepositoryOptions(out, policies=False)).policies == ()


def test_a_policy_of_variants_that_are_left_out_is_left_out(folder, out, capsys):
    small = add_variant(folder, HALF, "int8", tiny.onnx_model(1)).variant.name
    write_policy(folder, "both", of=(small, FULL))
    write_policy(folder, "plain", of=(HALF, FULL))
    assert deploy(folder, RepositoryOptions(out)).policies == ("both", "plain")
    capsys.readouterr()
    again = RepositoryOptions(out, force=True, precisions=("fp32",))
    assert deploy(folder, again).policies == ("plain",)
    said = capsys.readouterr().err
    assert f"both.policy.json: policy both is left out: it needs {small}, which" in said


def test_a_policy_of_another_runtime_is_left_out(folder, out, capsys):
    write_policy(folder, runtime="openvino 2025.4 CPU")
    assert deploy(folder, RepositoryOptions(out)).policies == ()
    assert "was calibrated with openvino 2025.4 CPU" in capsys.readouterr().err


def test_on_a_gpu_policies_stay_and_it_is_said_what_chose_them(folder, out, capsys):
    write_policy(folder)
    said = []
    for instances in ("cpu", "gpu"):
        options = RepositoryOptions(out / instances, instances=instances)
        assert deploy(folder, options).policies == ("auto",)
        said.append("chosen by the speeds of CPUs" in capsys.readouterr().err)
    assert said == [False, True]


WORDS = ("red circle", "blue square", "square")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zero-shot model with a policy for the labels in `WORDS` and one template."""
    place = shutil.copytree(family_folder("sparo"), tmp_path_factory.mktemp("labels") / "sparo")
    shape, rng = (60, 16, 16, 3), np.random.default_rng(0)
    images, labels = rng.integers(0, 256, shape, np.uint8), np.arange(60) % len(WORDS)
    np.savez(place / "data.npz", images=images, labels=labels, class_names=np.array(WORDS))
    (place / "templates.txt").write_text("a photo of {}")
    speeds = {
        variant.name: 100.0 * at for at, variant in enumerate(ArtefactFolder(place).variants, 1)
    }
    measured(place, speeds)
    done = calibrate(
        place,
        CalibrateOptions(
            data=str(place / "data.npz"),
            split="all",
            risk=(0.99,),
            templates=place / "templates.txt",
        ),
        progress=None,
    )
    assert done.exit_code == 0
    (place / "frontier.json").unlink()  # only the calibration needs speeds
    return place


def with_labels(folder: Path, out: Path, words: Sequence[str], template: str) -> Any:
    (out.parent / "labels.txt").write_text("\n".join(words))
    (out.parent / "templates.txt").write_text(template)
    names = {name: out.parent / f"{name}.txt" for name in ("labels", "templates")}
    return deploy(folder, RepositoryOptions(out, force=True, **names))


def test_a_policy_is_for_the_labels_that_it_was_certified_with(labelled, out, capsys):
    template = "a photo of {}"
    assert with_labels(labelled, out, WORDS[::-1], template).policies == ("auto",)
    deploy(labelled, RepositoryOptions(out, force=True))
    assert "it needs logits, which a router has only with --labels" in capsys.readouterr().err
    other = (*WORDS[:2], "circle")
    with pytest.raises(
        SaccadeError,
        match=r"with labels of SHA-256 .*, found .* \(3: red circle, .*with --labels and",
    ):
        with_labels(labelled, out, other, template)
    with pytest.raises(
        SaccadeError, match=r"with templates of SHA-256 .*, found .* \(1: \{\}\).*--no-policies"
    ):
        with_labels(labelled, out, WORDS, "{}")


def test_images_without_labels_calibrate_a_zero_shot_model_if_its_classes_are_named(
    labelled, tmp_path
):
    folder = shutil.copytree(labelled, tmp_path / "sparo")
    speeds = (one.name for one in ArtefactFolder(folder).variants)
    measured(folder, {name: 100.0 * at for at, name in enumerate(speeds, 1)})
    images = np.load(folder / "data.npz")["images"]
    np.savez(tmp_path / "images.npz", images=images)
    (tmp_path / "labels.txt").write_text("\n".join(WORDS))
    asked = CalibrateOptions(
        data=str(tmp_path / "images.npz"),
        risk=(0.99,),
        templates=folder / "templates.txt",
        labels=tmp_path / "labels.txt",
    )
    with pytest.raises(SaccadeError, match=r"which name no classes for .* with --labels FILE"):
        calibrate(folder, replace(asked, labels=None), progress=None)
    with pytest.raises(SaccadeError, match=r"--against labels: images.npz has no labels"):
        calibrate(folder, replace(asked, against="labels"), progress=None)
    with pytest.raises(SaccadeError, match="--limit leaves 4 samples, expected at least"):
        calibrate(folder, replace(asked, risk=(0.1,), limit=4), progress=None)
    before = read_policies(folder / "auto.policy.json")
    after = calibrate(folder, asked, progress=None).content
    assert after.labels_sha256 == before.labels_sha256 and after.samples == before.samples
    with pytest.raises(SaccadeError, match=r"images.npz: has no labels, expected one folder"):
        evaluate(folder, EvaluateOptions(asked.data, labels=asked.labels), progress=None)


def test_classes_are_certified_in_the_order_of_their_labels(labelled, tmp_path, out, capsys):
    folder = shutil.copytree(labelled, tmp_path / "sparo")
    measured(
        folder, {one.name: 100.0 * at for at, one in enumerate(ArtefactFolder(folder).variants, 1)}
    )
    asked = CalibrateOptions(
        data=str(folder / "data.npz"), split="all", risk=(0.9,), per_class=True,
        templates=folder / "templates.txt",
    )  # fmt: skip
    content = calibrate(folder, asked, progress=None).content
    assert content.class_names == WORDS
    template = "a photo of {}"
    with_labels(folder, out, WORDS, template)
    model = ArtefactFolder(folder).model
    assert routes_of(out, model)["policies"][0]["early"] == list(content.policies[0].early)
    with pytest.raises(SaccadeError, match="with --per-class and the labels in another order"):
        with_labels(folder, out, WORDS[::-1], template)


def in_step(at: int, **values: Any) -> Callable[[Any], None]:
    return lambda routes: routes["policies"][0]["steps"][at].update(values)


def in_policy(**values: Any) -> Callable[[Any], None]:
    return lambda routes: routes["policies"][0].update(values)


CHANGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "variant": (in_step(0, variant="tiny-b0250-fp32"), "needs tiny-b0250-fp32, which is not in"),
    "hash": (in_step(0, sha256="0" * 64), f"certified with {HALF} of SHA-256 000000000000"),
    "full": (in_policy(full="nobody"), "needs nobody, which is not in"),
    "threshold": (in_step(0, threshold=float("nan")), "threshold: found nan, expected a finite"),
    "no threshold": (in_step(0, threshold=None), "is not a chain"),
    "last threshold": (in_step(-1, threshold=0.5), "is not a chain"),
    "twice": (in_step(0, variant=FULL), "is not a chain"),
    "temperature": (in_step(0, temperature=0.0), "temperature is 0, expected above 0"),
    "share": (in_step(0, end_share=1.5), "end_share is 1.5, expected at least 0 and at most 1"),
    "measure": (in_policy(measure="guess"), "measure: found 'guess', expected one of top1"),
    "risk": (in_policy(risk=1.0), "risk is 1, expected"),
    "more": (in_policy(mood="good"), "unknown keys: mood"),
    "no list": (lambda routes: routes.update(policies="auto"), "found 'auto', expected a list"),
    "some classes": (
        lambda routes: routes["policies"][0].update(full=HALF, early=[0]),
        f"stops with some classes only, but does not end in the full model, {HALF}",
    ),
    "same name": (lambda routes: routes["policies"].append(routes["policies"][0]), "2 policies"),
    "none": (lambda routes: routes.update(policies=[]), "policies is \\[\\]"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a policy; copy it to change it."""
    place = tmp_path_factory.mktemp("policies")
    folder = tiny.artefacts(place / "artefacts", checkpoint=False)
    write_policy(folder)
    return deploy(folder, RepositoryOptions(place / "repository")).folder


@pytest.mark.parametrize("case", CHANGED)
def test_preflight_sees_what_was_changed_in_the_routes(made, out, case):
    shutil.copytree(made, out)
    assert [step["variant"] for step in routes_of(out)["policies"][0]["steps"]] == [HALF, FULL]
    change, words = CHANGED[case]
    change_routes(out, change)
    found = reasons(out, "routes")
    assert any(re.search(words, reason) for reason in found), found
