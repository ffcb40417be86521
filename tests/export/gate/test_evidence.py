# SPDX-License-Identifier: Apache-2.0
"""The gate's evidence: sizes by cost, extreme inputs, and a score that stops early."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_folders import family_folder

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.gate import reference as references
from saccade.exporter.gate.further_samples import ScoreReference, compare_further
from saccade.exporter.gate.gate import measure, verify
from saccade.exporter.gate.reference import Reference
from saccade.exporter.graph.samples import THOROUGH, gate_sizes, samples_of
from saccade.exporter.runtimes.runners import torch_runner
from saccade.models.checkpoint import Checkpoint
from saccade.models.interface import component_named

VIT_B, TOY = 17_600_000_000, 1_000_000
Arrays = dict[str, np.ndarray]


def test_large_models_get_fewer_samples() -> None:
    toy, large = gate_sizes("standard", TOY), gate_sizes("standard", VIT_B)
    assert (toy.real_inputs, toy.random_inputs, toy.batches) == (256, 64, (1, 2, 7, 64))
    assert toy.score_s is None  # all of it is compared with float64
    assert (large.real_inputs, large.random_inputs, large.batches) == (8, 8, (1, 7, 16))
    assert large.score_s is not None
    between = gate_sizes("standard", 10**9)
    assert between.real_inputs + between.random_inputs == 100 and between.real_inputs == 80
    assert between.batches == (1, 7, 64)
    for cost in (TOY, VIT_B):
        quick, thorough = gate_sizes("quick", cost), gate_sizes("thorough", cost)
        assert quick.real_inputs + quick.random_inputs == 8
        assert (thorough, thorough.level) == (THOROUGH, "thorough")


def test_black_white_and_one_pixel_are_among_the_samples(
    tiny_nac: Callable[..., Any], tmp_path: Path
) -> None:
    checkpoint = tiny_nac(tmp_path / "nac.safetensors")
    samples = samples_of(
        checkpoint, component_named(checkpoint.build(), ""), gate_sizes("standard", VIT_B)
    )
    black, white, pixel, noise, *_ = samples.inputs["image"][8:]
    assert not black.any() and (white == 255).all()
    lit = pixel.reshape(-1, pixel.shape[-1]).any(axis=-1)
    assert lit.sum() == 1 and pixel.max() == 255
    assert len(np.unique(noise)) > 3


class Data:
    """A checkpoint's calibration data, of which the right class is always 0."""

    path = Path("data.safetensors")

    def __init__(self, count: int) -> None:
        self.calibration = {
            "image": np.arange(count)[:, None],
            "labels": np.zeros(count, np.int64),
        }


def answers(wrong: Callable[[np.ndarray], np.ndarray], asked: list[int]) -> Any:
    """A classifier of two classes that is wrong on some images."""

    def run(inputs: Arrays) -> Arrays:
        asked.append(len(inputs["image"]))
        return {"logits": np.eye(2)[wrong(inputs["image"][:, 0]).astype(int)]}

    return run


def change(count: int, wrong: Callable[[np.ndarray], np.ndarray], seconds: float) -> Any:
    """What is found of a file with these errors, with a clock that moves by 1 s a look."""
    from saccade.models.interface import Component, TensorSpec

    part = Component("", (TensorSpec("image", "b 1", "int64"),), ("logits",), run=dict)
    data: Any = Data(count)
    scored = ScoreReference(data, part, lambda: answers(lambda x: x < 0, []))
    ticks = iter(range(10**6))
    asked: list[int] = []
    run = answers(wrong, asked)
    further = compare_further(run, scored, 1.0, seconds, lambda: float(next(ticks)))
    assert further.score is not None
    assert sum(asked) == further.score.samples == len(further.answers[0]["logits"])
    return further.score


def test_a_score_that_falls_far_is_found_early() -> None:
    found = change(10_000, lambda image: image % 2 == 0, seconds=1e6)
    assert found.samples < 200 and found.points < -30 and found.high < -1


def test_a_score_that_stays_is_shown_from_enough_samples_or_for_the_time_given() -> None:
    found = change(10_000, lambda image: image < 0, seconds=1e6)
    assert 500 < found.samples < 5_000 and found.points == 0
    assert -1 <= found.low < 0 < found.high <= 1
    short = change(10_000, lambda image: image < 0, seconds=3)
    assert short.samples < 100 and short.high > 1  # not shown, and recorded so


def test_a_change_beyond_the_limit_is_not_reported_from_few_samples() -> None:
    """Two errors among the first samples, which are two of a thousand."""
    first = set(np.random.default_rng(2).permutation(1_000)[:20:10])
    found = change(1_000, lambda image: np.isin(image, list(first)), seconds=0)
    assert found.points == pytest.approx(-0.2, abs=0.9) and found.samples > 100


def test_batches_grow_while_there_is_time() -> None:
    """Without right answers, samples are compared for the time given, 256 at most."""
    from saccade.models.interface import Component, TensorSpec

    part = Component("", (TensorSpec("image", "b 1", "int64"),), ("embedding",), run=dict)
    data: Any = Data(1_000)

    def sizes(seconds: float, pace_s: float, noise: int = 0) -> list[int]:
        now, asked = [0.0], []

        def run(inputs: Arrays) -> Arrays:
            asked.append(len(inputs["image"]))
            now[0] += asked[-1] * pace_s
            return {"embedding": inputs["image"]}

        drawn = {"image": -1 - np.arange(noise)[:, None]}
        same = lambda inputs: {"embedding": inputs["image"]}  # noqa: E731
        scored = ScoreReference(data, part, lambda: same, lambda: drawn)
        further = compare_further(run, scored, 1.0, seconds, lambda: now[0])
        assert further.score is None
        for answers in (*further.answers, further.expected):
            assert np.array_equal(further.inputs["image"], answers["embedding"])
        return asked

    assert sizes(1e6, 0.02) == [4, 64, 64, 64, 64]
    assert sizes(1.6, 0.02) == [4, 64, 4, 4, 4]
    assert sizes(0.42, 0.02) == [4, 16, 4]
    assert sizes(0.06, 0.02) == [4]
    assert sizes(1e6, 0.1) == [4, *[16] * 16]
    assert sizes(1e6, 1.0) == [4] * 64  # large batches of a slow model take much memory
    # Random inputs are first: as many as fit into a quarter of the time, and again at the end.
    assert sizes(1e6, 0.02, noise=40) == [4, 36, 4, 64, 64, 64, 64, 40]
    assert sizes(2.0, 0.02, noise=40) == [4, 16, 4, 4, 64, 4, 4, 16, 8]
    assert sizes(0.0, 0.02, noise=40) == [4]


def test_a_fault_that_only_further_samples_show(
    tiny_nac: Callable[..., Any], tmp_path: Path
) -> None:
    """A file in half precision that is wrong on images that the float64 reference did not see."""
    checkpoint: Checkpoint = tiny_nac(tmp_path / "nac.safetensors")
    sizes = gate_sizes("standard", VIT_B)
    reference = Reference(checkpoint, sizes)
    model: Any = reference.model
    budget = model.budget("1")
    expected = reference.expected(budget, "", ["logits", "probabilities"], VIT_B)
    seen = {image.tobytes() for image in expected.samples.inputs["image"]}
    right = torch_runner(reference.folded(budget), "", ["logits", "probabilities"])

    def wrong(inputs: Arrays) -> Arrays:
        found = dict(right(inputs))
        unseen = [image.tobytes() not in seen for image in inputs["image"]]
        found["logits"] = found["logits"] + np.array(unseen)[:, None] * np.linspace(0, 1, 10)
        return found

    assert measure([lambda: right], expected, "fp16", {}).passed
    for ways in ([lambda: wrong], [lambda: right, lambda: wrong]):
        parity = measure(ways, expected, "fp16", {})
        assert parity.figures["relative_error"] > 0.03 and not parity.passed
    assert measure([lambda: wrong], expected, "fp32", {}).passed  # it has no further samples


def test_a_fault_that_only_further_noise_shows(
    tiny_nac: Callable[..., Any], tmp_path: Path
) -> None:
    """A file in half precision that mixes rows, of images that are far from all that are stored."""
    checkpoint: Checkpoint = tiny_nac(tmp_path / "nac.safetensors")
    reference = Reference(checkpoint, gate_sizes("standard", VIT_B))
    budget = reference.model.budget("1")
    outputs = ["logits", "probabilities"]
    expected = reference.expected(budget, "", outputs, VIT_B)
    assert expected.scored is not None
    noise = expected.scored.noise()["image"]
    assert len(noise) == THOROUGH.random_inputs - 8
    thorough = samples_of(checkpoint, expected.component).inputs["image"]
    assert np.array_equal(noise, thorough[-len(noise) :])  # of which it takes the same ones
    right = torch_runner(reference.folded(budget), "", outputs)
    # The tiny model's calibration images are from the same seed as the noise.
    compared = {image.tobytes() for image in expected.samples.inputs["image"]}
    drawn = {image.tobytes() for image in noise} - compared
    assert len(drawn) > 40

    def mixed(inputs: Arrays) -> Arrays:
        found = dict(right(inputs))
        among = [image.tobytes() in drawn for image in inputs["image"]]
        first = np.arange(len(among)) == 0
        found["logits"] = found["logits"] + np.outer(among & first, np.linspace(0, 1, 10))
        return found

    parity = measure([lambda: mixed], expected, "fp16", {})
    assert parity.figures["row_isolation"] > 0.03 and not parity.passed


def test_a_family_has_its_own_score(tiny_nac: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint: Checkpoint = tiny_nac(tmp_path / "nac.safetensors")
    part = component_named(checkpoint.build(), "")

    def run(inputs: Arrays) -> Arrays:
        return {"logits": np.zeros((len(inputs["image"]), 10))}

    own = replace(part, score=lambda outputs, labelled: 0.25)
    further = compare_further(
        run, ScoreReference(checkpoint, own, lambda: run), 1.0, 0.0, lambda: 0.0
    )
    found = further.score
    assert found is not None and (found.points, found.low, found.high) == (0, None, None)
    none = replace(part, score=lambda outputs, labelled: float("nan"))
    further = compare_further(
        run, ScoreReference(checkpoint, none, lambda: run), 1.0, 0.0, lambda: 0.0
    )
    assert further.score is None


def test_levels_are_recorded_and_a_large_model_is_built_again(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model gives back its memory between two files; answers serve all precisions."""
    monkeypatch.setattr(references, "_KEPT_PARAMETERS", 1)
    report = verify(tiny_folder, "quick")
    assert report.passed
    for row in report.variants:
        assert row.parity is not None and row.parity.gate == "quick"
        assert (row.parity.real_inputs, row.parity.random_inputs) == (4, 4)
    folder = ArtefactFolder(tiny_folder)
    reference = Reference(folder.parent, "quick")
    budget = reference.budget(folder.manifests[0].variant)
    first = reference.expected(budget, "", ["logits"], TOY)
    model = reference.model
    reference.release()
    assert reference.expected(budget, "", ["logits"], TOY) is first
    assert reference.model is not model
    with pytest.raises(AssertionError, match="no model"):
        first.component.run()


def test_answers_of_a_part_that_no_budget_changes_serve_all_budgets() -> None:
    folder = ArtefactFolder(family_folder("slot-attention"))
    reference = Reference(folder.parent, "quick")
    by_role: dict[str, list[Any]] = {"": [], "decode": []}
    for manifest in folder.manifests:
        entry, outputs = manifest.variant, [spec.name for spec in manifest.outputs]
        found = reference.expected(reference.budget(entry), entry.role, outputs, TOY)
        by_role[entry.role].append(found)
    whole, decoders = by_role[""], by_role["decode"]
    assert decoders[0] is decoders[1] and whole[0] is not whole[1]


def test_folding_does_not_change_weights_that_are_stored_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference would be built from changed ones: a model shares what it need not cast."""
    import torch

    monkeypatch.setattr("saccade.models.families.SHARED_BYTES", 0)
    folder = ArtefactFolder(family_folder("sot"))
    stored = {
        name: weight.double() if weight.is_floating_point() else weight
        for name, weight in folder.parent.weights.items()
    }
    before = {name: weight.clone() for name, weight in stored.items()}
    reference = Reference(replace(folder.parent, weights=stored))
    reference.folded(reference.budget(folder.manifests[0].variant))
    assert all(torch.equal(weight, before[name]) for name, weight in stored.items())


def test_an_unknown_level_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(SaccadeError, match=r"gate is 'slow'.*quick, standard, thorough"):
        verify(tiny_folder, "slow")  # type: ignore[arg-type]
