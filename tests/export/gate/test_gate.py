# SPDX-License-Identifier: Apache-2.0
"""The gate: it passes what is right, and each way of being wrong is a figure that says so."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_folders import family_folder
from quick_gate import FEW_SAMPLES

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import SUFFIX, Parity, ScoreChange
from saccade.exporter.gate.gate import measure, verify
from saccade.exporter.gate.metrics import (
    FLOORS,
    THRESHOLDS,
    exceeded,
    figures_of,
    one_minus_cosine,
    row_errors,
    step_thresholds,
    thresholds_of,
    top1_flips,
)
from saccade.exporter.gate.reference import ExpectedAnswers
from saccade.exporter.gate.report import GateReport, VariantReport, loosened
from saccade.exporter.graph.samples import THOROUGH, GateSizes, Samples, samples_of
from saccade.models.interface import Component, TensorSpec, component_named

Arrays = dict[str, np.ndarray]
FULL, FLOOR = "nac-b1000-fp32", FLOORS["fp32"]
COMPONENT = Component(
    "", (TensorSpec("image", "b 4 4 1", "uint8"),), ("logits",), run=lambda image: {}
)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "nac"))


@pytest.fixture
def pair(folder: Path) -> Path:
    """The copy with the largest and the smallest variant alone."""
    for path in [*folder.glob("nac-b0500*"), *folder.glob("nac-b0250*")]:
        path.unlink()
    return folder


def rehash(folder: Path, name: str = FULL, **changes: Any) -> None:
    """Make the manifest's hash and size fit the file, as someone would who means harm."""
    path, file = folder / (name + SUFFIX), folder / f"{name}.onnx"
    content = json.loads(path.read_text())
    content["file"] |= {"sha256": sha256_of(file), "bytes": file.stat().st_size}
    path.write_text(json.dumps(content | changes))


def failing(report: GateReport) -> dict[str, str]:
    """The variants that did not pass, with why."""
    return {row.name: "; ".join(row.problems) for row in report.variants if not row.passed}


def shown(report: GateReport) -> str:
    from rich.console import Console

    text = io.StringIO()
    Console(width=120, file=text).print(report.to_text())
    return text.getvalue()


def test_verify_passes_on_an_export(tiny_folder: Path) -> None:
    report = verify(tiny_folder)
    assert report.passed and len(report.variants) == 4
    for row in json.loads(json.dumps(report.to_dict()))["variants"]:
        assert row["thresholds"] == THRESHOLDS["fp32"]
        # Not a bound of the gate but of the arithmetic: float32 against float64.
        assert 0 < row["figures"]["relative_error"] < row["thresholds"]["relative_error"]
        assert row["floor"] == FLOOR
    text = shown(report)
    assert "at most, fp32" in text


def test_a_score_that_few_samples_decide_has_its_interval(tiny_folder: Path) -> None:
    row = verify(tiny_folder).variants[0]
    assert row.parity is not None

    def said(change: ScoreChange) -> str:
        measured = VariantReport.of(row.name, replace(row.parity, score=change))
        return " ".join(shown(GateReport(tiny_folder, (measured,))).split())

    few = said(ScoreChange(samples=4, points=0.0, low=-70.3, high=70.3))
    assert f"{row.name}: 4 samples say little about the score: with 95 %" in few
    assert "by -70 to +70 points" in few
    assert "say little" not in said(ScoreChange(samples=4000, points=0.0, low=-0.1, high=0.1))
    assert "say little" not in said(ScoreChange(samples=4, points=0.0))  # of the family's own


def test_one_changed_weight_fails(pair: Path) -> None:
    import onnx

    proto = onnx.load(pair / f"{FULL}.onnx")
    (weight,) = [tensor for tensor in proto.graph.initializer if tensor.name == "head.weight"]
    values = onnx.numpy_helper.to_array(weight).copy()
    values[0, 0] += 0.01
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(proto, pair / f"{FULL}.onnx")
    rehash(pair)
    report = verify(pair, FEW_SAMPLES)
    assert not report.passed
    assert list(failing(report)) == [FULL]
    assert "relative error is" in failing(report)[FULL]
    assert "NO" in shown(report) and "relative error is" in shown(report)


def test_a_recorded_override_and_floor_are_used_and_shown(pair: Path) -> None:
    path = pair / (FULL + SUFFIX)
    content = json.loads(path.read_text())
    content["parity"]["overridden"] = ["relative_error"]
    content["parity"]["thresholds"]["relative_error"] = 1e-12
    path.write_text(json.dumps(content))
    # The other variant was proved with another floor, by an older or a newer table.
    small = "nac-b0125-fp32"
    other = json.loads((pair / (small + SUFFIX)).read_text())
    other["parity"]["floor"] = 1e-6
    (pair / (small + SUFFIX)).write_text(json.dumps(other))
    report = verify(pair)
    assert list(failing(report)) == [FULL]
    assert "override: 1e-12" in shown(report)
    row = next(variant for variant in report.to_dict()["variants"] if variant["name"] == small)
    assert row["floor"] == 1e-6
    assert row["figures"]["relative_error"] > other["parity"]["figures"]["relative_error"]
    assert shown(report).count("(floor: 1e-06)") == 1


def test_files_that_are_not_what_they_claim(folder: Path) -> None:
    half, quarter, eighth = (f"nac-b{budget}-fp32" for budget in ("0500", "0250", "0125"))
    file = folder / f"{FULL}.onnx"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    shutil.copy(folder / f"{quarter}.onnx", folder / f"{half}.onnx")
    rehash(folder, half)
    truncated = folder / f"{quarter}.onnx"
    truncated.write_bytes(truncated.read_bytes()[:5000])
    rehash(folder, quarter)
    rehash(folder, eighth, labels=[f"digit {9 - digit}" for digit in range(10)])
    problems = failing(verify(folder, FEW_SAMPLES))
    assert "changed after its export" in problems[FULL]
    assert "relative error" in problems[half]
    assert "not a complete ONNX model" in problems[quarter]
    assert "labels" in problems[eighth]


def test_the_parent_must_be_there_and_the_one(folder: Path, tiny_nac: Callable[..., Any]) -> None:
    tiny_nac(folder / "nac.safetensors", seed=1)
    with pytest.raises(SaccadeError, match=r"SHA-256 is .* as in the manifests"):
        verify(folder)
    (folder / "nac.safetensors").unlink()
    with pytest.raises(SaccadeError, match=r"nac\.safetensors: missing"):
        verify(folder)
    with pytest.raises(SaccadeError, match="no such folder"):
        verify(folder / "absent")


def truth(inputs: Arrays) -> Arrays:
    """A fixed classifier in float64 that keeps rows apart."""
    rng = np.random.default_rng(3)
    flat = inputs["image"].reshape(len(inputs["image"]), -1) / 255 - 0.5
    state = np.tanh(flat @ rng.normal(size=(16, 6)))
    logits = state @ rng.normal(size=(6, 5))
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return {
        "logits": logits,
        "probabilities": shifted / shifted.sum(axis=-1, keepdims=True),
        "embedding": state / np.linalg.norm(state, axis=-1, keepdims=True),
    }


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], Arrays]:
    """The truth with one output changed."""

    def run(inputs: Arrays) -> Arrays:
        outputs = truth(inputs)
        return {**outputs, name: change(outputs[name])}

    return run


def only_row(row: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(rows: np.ndarray) -> np.ndarray:
        rows = rows.copy()
        rows[row, 0] += value
        return rows

    return change


RUNNERS: dict[str, tuple[Callable[[Arrays], Arrays], set[str]]] = {
    "right": (truth, set()),
    "float32": (lambda x: {k: v.astype(np.float32) for k, v in truth(x).items()}, set()),
    "scaled logits": (changed("logits", lambda v: v * 1.002), {"relative_error"}),
    "turned embedding": (
        changed("embedding", lambda v: np.roll(v, 1, axis=-1)),
        {"relative_error", "one_minus_cosine"},
    ),
    "classes in another order": (
        changed("probabilities", lambda v: v[:, ::-1]),
        {"relative_error", "score_points", "top1_flips"},
    ),
    "not a number": (
        changed("logits", lambda v: np.where(v > 2.9, np.nan, v)),
        {"relative_error", "one_minus_cosine", "row_isolation"},
    ),
    "batch mates": (
        changed("embedding", lambda v: v + 2e-3 * v.mean(axis=0)),
        {"relative_error", "row_isolation"},
    ),
    "position": (changed("logits", only_row(-1, 0.05)), {"relative_error", "row_isolation"}),
    "batch size": (
        changed("logits", lambda v: v * (1 + 4e-4 * (len(v) == 7))),
        {"row_isolation"},
    ),
}


IMAGE = np.random.default_rng(0).integers(0, 256, (320, 4, 4, 1), dtype=np.uint8)
RIGHT = truth({"image": IMAGE})
SAMPLES = Samples(
    {"image": IMAGE}, {"labels": RIGHT["logits"].argmax(axis=-1)[: THOROUGH.real_inputs]}
)


def opened(run: Any) -> Any:
    return run


def measured(*runs: Any, models: tuple[Arrays, ...] = (RIGHT,)) -> Parity:
    """What the gate finds of a runner, and of further ways to run the same file."""
    expected = ExpectedAnswers(COMPONENT, SAMPLES, RIGHT, lambda _: [*models])
    return measure([partial(opened, each) for each in runs], expected, "fp32", {})


def above(parity: Parity) -> set[str]:
    """The figures above their thresholds."""
    return set(exceeded(parity.figures, parity.thresholds))


@pytest.mark.parametrize("case", RUNNERS)
def test_each_wrong_answer_has_its_figure(case: str) -> None:
    run, expected = RUNNERS[case]
    parity = measured(run)
    # What is not a number also loses its cosine; the figures named are the least expected.
    assert expected <= above(parity) and parity.passed == (not expected)
    assert above(parity) - expected <= {"one_minus_cosine"}


def test_a_row_that_float32_cannot_hold_is_held_against_the_model_in_float32() -> None:
    def figures(actual: float, own: float, rows: slice) -> tuple[bool, dict[str, float]]:
        def off(by: float) -> dict[str, np.ndarray]:
            embedding = RIGHT["embedding"].copy()
            embedding[rows] *= 1 + by
            return {**RIGHT, "embedding": embedding}

        place = {row.tobytes(): number for number, row in enumerate(IMAGE)}
        answers = off(actual)

        def run(inputs: Any) -> Any:
            asked = [place[row.tobytes()] for row in inputs["image"]]
            return {name: answer[asked] for name, answer in answers.items()}

        parity = measured(run, models=(RIGHT, off(own)))
        return parity.passed, parity.figures

    few, many = slice(5, 7), slice(0, 100)
    passed, actual = figures(0.01, 0.005, few)
    assert passed and actual["sensitive_rows"] == 2 / 320 and actual["relative_error"] == 0
    assert actual["float32_error"] == pytest.approx(0.005, rel=0.1)
    passed, actual = figures(0.01, 0.001, few)
    assert not passed and actual["relative_error"] == pytest.approx(0.01, rel=0.1)
    passed, actual = figures(0.05, 0.05, few)  # beyond the row of half precision
    assert not passed and actual["relative_error"] > 0.03
    passed, actual = figures(0.01, 0.005, many)
    assert not passed and actual["sensitive_rows"] == 100 / 320
    assert "sensitive_rows" not in figures(1e-4, 1e-4, many)[1]


def test_two_ways_to_compute_a_file_may_differ_where_each_isolates_its_rows() -> None:
    rows = np.linspace(1, 2, 12).reshape(3, 4)
    one, other = {"embedding": rows}, {"embedding": rows * (1 + 5e-4)}
    figures = figures_of(one, [[one, one], [other]], {}, {}, COMPONENT, FLOOR)
    assert figures["row_isolation"] == 0 and not exceeded(figures, THRESHOLDS["fp32"])
    assert figures_of(one, [[one, other]], {}, {}, COMPONENT, FLOOR)["row_isolation"] > 4e-4


def test_a_black_pixel_has_no_direction() -> None:
    white, black = np.ones((1, 2, 3)), np.full((1, 2, 3), 1e-9)
    right = np.concatenate([white, black])
    assert (one_minus_cosine(np.concatenate([white, -black]), right) < 1e-12).all()
    assert one_minus_cosine(np.concatenate([-white, black]), right).max() == pytest.approx(2)


def test_close_calls_may_flip_but_clear_ones_may_not() -> None:
    logits = np.array([[1.0, 0.999, 0.0], [1.0, 0.0, 0.0]])
    moved = np.array([[1.0, 1.001, 0.0], [1.0, 0.0, 0.0]])
    reference = dict.fromkeys(("logits", "probabilities", "embedding"), logits)
    close = dict.fromkeys(reference, moved)
    clear = {**reference, "probabilities": logits[:, ::-1]}
    labelled = {"labels": np.zeros(2, dtype=np.int64)}
    figures = figures_of(reference, [[close]], {}, labelled, COMPONENT, FLOOR)
    assert (figures["top1_flips"], figures["score_points"]) == (0, 50)
    assert figures_of(reference, [[clear]], {}, labelled, COMPONENT, FLOOR)["top1_flips"] == 2


def test_a_broken_invariant_fails_the_gate() -> None:
    rows = np.full((3, 4), 0.25)

    def rows_sum_to_1(inputs: Any, actual: Any, expected: Any) -> float:
        return float(np.abs(actual["attention"].sum(-1) - 1).max() / 1e-5)

    part = replace(COMPONENT, invariants={"rows_sum_to_1": rows_sum_to_1})
    right = figures_of({"attention": rows}, [[{"attention": rows}]], {}, {}, part, FLOOR)
    assert right["op_laws"] == 0 and not exceeded(right, THRESHOLDS["fp32"])
    broken = figures_of({"attention": rows}, [[{"attention": rows * 1.0001}]], {}, {}, part, FLOOR)
    assert exceeded(broken, THRESHOLDS["fp32"]) == ["op_laws"]


def test_a_runtime_that_answers_from_memory_is_noticed() -> None:
    place = 0

    def remembered(inputs: Arrays) -> Arrays:
        nonlocal place
        rows = np.arange(place, place + len(inputs["image"])) % 320
        place += len(inputs["image"])
        return {name: each[rows] for name, each in RIGHT.items()}

    assert {"relative_error", "row_isolation"} <= above(measured(remembered))


@pytest.mark.parametrize("size", (1, 2, 7))
def test_every_size_of_a_batch_is_asked(size: int) -> None:
    run = changed("logits", lambda v: v * (1 + 4e-4 * (len(v) == size)))
    assert above(measured(run)) == {"row_isolation"}


def test_a_file_is_right_in_every_way_to_run_it() -> None:
    assert above(measured(truth, truth)) == set()
    assert above(measured(truth, RUNNERS["scaled logits"][0])) == {"relative_error"}


def test_errors_are_shares_of_a_number_and_of_the_largest() -> None:
    right = {"embedding": np.array([[1.0, 0.0], [0.5, 1e-9], [0.02, 0.01]])}
    moved = {"embedding": right["embedding"] + 1e-5}
    errors = row_errors([moved, right], right, FLOOR)["embedding"]
    np.testing.assert_allclose(errors, [1e-3, 1e-3, 5e-4], rtol=1e-6)
    errors = row_errors([moved], right, floor=0.1)["embedding"]
    np.testing.assert_allclose(errors, [1e-4, 1e-4, 1e-5 / 0.11], rtol=1e-6)
    for wrong in (np.nan, np.inf):
        broken = {"embedding": np.where(right["embedding"] == 0.5, wrong, right["embedding"])}
        assert np.isposinf(row_errors([right, broken], right, FLOOR)["embedding"]).all()
    assert np.isposinf(
        row_errors([{"embedding": np.ones((3, 1))}], right, FLOOR)["embedding"]
    ).all()


def test_a_threshold_that_float32_cannot_keep_is_the_one_that_is_blamed() -> None:
    figures = {"relative_error": 0.0, "sensitive_rows": 1.0, "float32_error": 1.7e-4}
    thresholds = {"relative_error": 1e-12, "sensitive_rows": 0.1}
    parity = Parity(False, figures, thresholds, ("relative_error",), 8, 8, (1, 8), 0.01)
    (problem,) = VariantReport.of("nac-b1000-fp32", parity).problems
    assert problem.startswith("relative error may be at most 1e-12 (--threshold relative_error)")
    assert "in float32 on 100 % of the samples, with errors of up to 0.00017" in problem
    assert loosened(parity) == "relative_error"
    above = replace(parity, figures={**figures, "relative_error": 2e-7})
    (problem,) = VariantReport.of("nac-b1000-fp32", above).problems
    assert problem == "relative error is 2e-07, at most 1e-12 is allowed"
    usual = replace(parity, thresholds={**thresholds, "relative_error": 1e-3}, overridden=())
    assert VariantReport.of("n", usual).problems == ("sensitive rows is 1, at most 0.1 is allowed",)


def test_the_table_explains_itself_and_shows_the_limits_of_what_was_made(
    tiny_folder: Path,
) -> None:
    text = shown(verify(tiny_folder))
    assert "at most, fp32" in text and "int8" not in text and "fp16" not in text
    assert "cosine distance (one_minus_cosine): 0 for" in text and "minus" not in text.replace(
        "one_minus_cosine", ""
    )


def test_what_is_not_a_number_is_above_any_threshold() -> None:
    assert exceeded({"relative_error": np.nan}, {"relative_error": 1.0}) == ["relative_error"]
    for value in (np.nan, np.inf, -1.0):
        with pytest.raises(SaccadeError, match="expected a number of at least 0"):
            thresholds_of("fp32", {"relative_error": value})
    with pytest.raises(SaccadeError, match="--threshold of fp32 is 'speed'"):
        thresholds_of("fp32", {"speed": 1.0})


def test_a_margin_within_twice_the_error_is_a_close_call() -> None:
    reference = {"logits": np.array([[1.0, 0.9985, 0.0]])}
    moved = {"logits": np.array([[0.999, 0.9995, 0.0]])}
    assert top1_flips(moved, reference) == 0
    moved = {"logits": np.array([[0.999, 0.9985, 0.0]]), "probabilities": np.eye(3)[1:2]}
    assert top1_flips(moved, {**reference, "logits": np.array([[1.0, 0.99, 0.0]])}) == 0
    moved["logits"] = np.array([[0.998, 0.991, 0.0]])
    assert top1_flips(moved, {**reference, "logits": np.array([[1.0, 0.99, 0.0]])}) == 1


def test_samples_are_spread_over_the_data_and_the_same_each_time(
    tiny_nac: Callable[..., Any], tmp_path: Path
) -> None:
    checkpoint = tiny_nac(tmp_path / "nac.safetensors", images=600)
    component = component_named(checkpoint.build(), "")
    first, again = samples_of(checkpoint, component), samples_of(checkpoint, component)
    assert len(first) == 320
    np.testing.assert_array_equal(first.inputs["image"], again.inputs["image"])
    stored = checkpoint.calibration["image"]
    for place, row in ((0, 0), (255, 599), (128, 300)):
        np.testing.assert_array_equal(first.inputs["image"][place], stored[row])
    few = tiny_nac(tmp_path / "few.safetensors", images=100)
    assert samples_of(few, component).sizes.real_inputs == 100
    fewer = tiny_nac(tmp_path / "fewer.safetensors", images=7)
    with pytest.raises(SaccadeError, match="has 7 calibration samples, expected at least 8"):
        samples_of(fewer, component)


def test_a_smaller_gate_is_asked_for_and_recorded(tiny_folder: Path) -> None:
    few = GateSizes(real_inputs=8, random_inputs=3, batches=(2, 5))
    (row, *_) = verify(tiny_folder, few).variants
    assert row.passed and row.parity is not None
    parity = row.parity
    assert (parity.real_inputs, parity.random_inputs, parity.batches) == (8, 3, (2, 5))
    for manifest in ArtefactFolder(family_folder("sot")).manifests:
        parity = manifest.parity
        assert GateSizes(parity.real_inputs, parity.random_inputs, parity.batches) == FEW_SAMPLES
    for wrong in ({"real_inputs": 0}, {"batches": ()}, {"batches": (4, 0)}):
        with pytest.raises(SaccadeError, match="at least 1"):
            GateSizes(**wrong)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_a_step_may_err_but_not_depend_on_its_batch(precision):
    limits = thresholds_of(precision, step_thresholds(precision))
    bad = dict.fromkeys(limits, 0.0) | {
        "relative_error": 100.0, "one_minus_cosine": 1.9, "score_points": 80.0, "top1_flips": 300.0
    }  # fmt: skip
    assert exceeded(bad, limits) == []
    assert exceeded({**bad, "row_isolation": 1.0}, limits) == ["row_isolation"]
    assert exceeded({**bad, "op_laws": 1e3}, limits) == ["op_laws"]
    assert exceeded({**bad, "one_minus_cosine": float("nan")}, limits) == ["one_minus_cosine"]


def test_a_step_in_float32_is_still_the_model():
    assert step_thresholds("fp32") == {}
