# SPDX-License-Identifier: Apache-2.0
"""One measure of an error and one table of limits: whoever compares answers asks them."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from half_typed import add_variant, half_typed
from places import ROOT
from tiny_artefacts import FULL, INPUTS, artefacts, onnx_model

from saccade.core.errors import ServerFailed
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.gate import metrics
from saccade.exporter.gate.bisect import departure
from saccade.exporter.gate.gate import ExpectedAnswers, measure
from saccade.exporter.gate.metrics import FLOORS, THRESHOLDS, WHOLE, relative_error, thresholds_of
from saccade.exporter.gate.report import GateReport
from saccade.exporter.graph.samples import Samples
from saccade.models.interface import Component
from saccade.serving.bench import served
from saccade.serving.bench.work import Work
from saccade.serving.repository.preflight.model_checks import differences

IMAGE = np.zeros((1, 4, 4, 1), np.uint8)
COMPONENT = Component("", INPUTS, ("logits",), run=lambda image: {})
# The last number is near zero: there the floor decides how far off it is.
RIGHT = np.array([[8.0, -4.0, 0.08]])


def off(error: float, floor: float) -> np.ndarray:
    """RIGHT, its last number off by that error under that floor."""
    answer = RIGHT.copy()
    answer[0, 2] += error * (RIGHT[0, 2] + floor * RIGHT.max())
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in fp32 and in fp16."""
    folder = artefacts(tmp_path_factory.mktemp("limits") / "artefact", checkpoint=False)
    add_variant(folder, FULL, "fp16", half_typed(onnx_model(), "fp16"))
    return folder


def passes_gate(actual: np.ndarray, precision: str, folder: Path) -> bool:
    expected = ExpectedAnswers(
        COMPONENT, Samples({"image": IMAGE}, {}), {"logits": RIGHT}, lambda _: [{"logits": RIGHT}]
    )
    return measure([lambda: lambda inputs: {"logits": actual}], expected, precision, {}).passed


def passes_preflight(answer: np.ndarray, precision: str, folder: Path) -> bool:
    manifest = proved(ArtefactFolder(folder).manifests[0], precision)
    return not [*differences({"logits": answer}, {"logits": RIGHT}, manifest)]


def proved(manifest: Manifest, precision: str) -> Manifest:
    """A manifest as the gate leaves one of that precision."""
    limits = {"thresholds": thresholds_of(precision, {}), "floor": FLOORS[precision]}
    entry = replace(manifest.variant, precision=precision)
    return replace(manifest, variant=entry, parity=replace(manifest.parity, **limits))


def passes_bench(tensor: np.ndarray, precision: str, folder: Path) -> bool:
    work = Work(
        variant="it",
        role="",
        setting="b1000",
        precision=precision,
        run=lambda inputs: {"logits": RIGHT},
        inputs={"image": IMAGE},
        answers=("logits",),
        model="it",
        router="them",
    )
    answer = {"logits": tensor, "variant": [b"another"]}
    with mock.patch.object(served, "ask", lambda url, message: answer):
        try:
            served.streams("127.0.0.1:0", [work], (1,))
        except ServerFailed:
            return False
    return True


# What takes or refuses answers, with the precisions that it knows and whether it measures against
# the whole tensor.
EVERY = ("fp32", "fp16", "bf16")
USERS: dict[str, tuple[Callable[[np.ndarray, str, Path], bool], tuple[str, ...], bool]] = {
    "gate": (passes_gate, EVERY, False),
    "preflight": (passes_preflight, EVERY, False),
    "bench": (passes_bench, EVERY, True),
}
CASES = [
    (user, precision) for user, (_, precisions, _) in USERS.items() for precision in precisions
]


@pytest.mark.parametrize(("user", "precision"), CASES)
def test_all_take_and_refuse_by_the_table(user: str, precision: str, folder: Path) -> None:
    passes, _, whole = USERS[user]
    limit, floor = THRESHOLDS[precision]["relative_error"], WHOLE if whole else FLOORS[precision]
    assert passes(off(0.8 * limit, floor), precision, folder)
    assert not passes(off(1.2 * limit, floor), precision, folder)
    # Where the table moves, all follow: nobody has a copy.
    narrower = {"relative_error": limit / 2}
    with mock.patch.dict(THRESHOLDS[precision], narrower):
        assert passes(off(0.4 * limit, floor), precision, folder)
        assert not passes(off(0.8 * limit, floor), precision, folder)
    if not whole:
        with mock.patch.dict(FLOORS, {precision: floor / 2}):
            assert passes(off(0.8 * limit, floor / 2), precision, folder)
            assert not passes(off(1.2 * limit, floor / 2), precision, folder)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_preflight_takes_what_the_gate_takes_in_half_precision(
    precision: str, folder: Path
) -> None:
    limit = THRESHOLDS[precision]["relative_error"]
    taken, refused = off(0.8 * limit, FLOORS[precision]), off(1.2 * limit, FLOORS[precision])
    assert relative_error(taken, RIGHT, FLOORS["fp32"]) > limit, "float32's floor would refuse it"
    assert passes_gate(taken, precision, folder) and passes_preflight(taken, precision, folder)
    assert not passes_gate(refused, precision, folder)
    assert not passes_preflight(refused, precision, folder)


def test_preflight_holds_a_file_against_the_proof_in_its_manifest(folder: Path) -> None:
    half = proved(ArtefactFolder(folder).manifests[0], "fp16")
    answers = {"logits": off(0.02, 0.1)}, {"logits": RIGHT}
    assert not [*differences(*answers, half)]
    strict = {"relative_error": 0.01}
    overridden = replace(
        half.parity,
        thresholds=half.parity.thresholds | strict,
        overridden=tuple(strict),
    )
    assert [*differences(*answers, replace(half, parity=overridden))] == [
        "output 'logits' is 0.02 from the stored answer, expected at most 0.01."
    ]
    older = replace(half, parity=replace(half.parity, floor=0.01))
    assert "is 0.11 from" in "".join(differences(*answers, older))
    nothing = replace(overridden, thresholds=half.parity.thresholds | {"relative_error": 0.0})
    assert [*differences(*answers, replace(half, parity=nothing))]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_bisect_asks_the_table(precision: str, folder: Path) -> None:
    artefacts = ArtefactFolder(folder)
    (chosen,) = (
        manifest
        for manifest in artefacts.manifests
        if (manifest.variant.precision, manifest.variant.setting) == (precision, "b1000")
    )
    with mock.patch.dict(THRESHOLDS[precision], {"relative_error": 0.125}):
        found = departure(artefacts, chosen, artefacts.manifests, {"image": IMAGE + 7})
        assert found.tolerance == 0.125


def test_int8_is_held_together_by_its_row_isolation() -> None:
    assert "relative_error" not in THRESHOLDS["int8"]
    assert metrics.tensor_limit("int8") == THRESHOLDS["int8"]["row_isolation"]


def test_verify_shows_the_table_itself(tmp_path: Path) -> None:
    assert GateReport(tmp_path, ()).to_dict()["table"] is THRESHOLDS


def test_the_table_of_the_documents_is_the_table() -> None:
    text = (ROOT / "docs" / "artefacts.md").read_text()
    (heading,) = re.findall(r"^\| `--threshold` \|(.*)\|$", text, re.MULTILINE)
    precisions = [cell.strip() for cell in heading.split("|")][: len(THRESHOLDS)]
    said: dict[str, dict[str, float]] = {precision: {} for precision in precisions}
    for figure, cells in re.findall(r"^\| `(\w+)` \|((?: [-\d.e]+ \|){4})", text, re.MULTILINE):
        for precision, cell in zip(precisions, cells.split("|"), strict=False):
            if cell.strip() != "-":
                said[precision][figure] = float(cell)
    assert said == THRESHOLDS


# A second table, or a second measure, has one of these forms.
PLACES = ("export", "serving", "benchmarks")
HOME = Path("export", "gate", "metrics.py")
HISTORY = "_FLOORS_BEFORE_5"  # of manifests that are read: it has to stay as it is


def copies(path: Path) -> Iterator[str]:
    """Copies of limits by precision, or of a measure of errors, written by hand."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and "relative_error" in node.name:
            yield f"{node.lineno}: def {node.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if name != HISTORY and (_by_precision(node.value) or _tolerance(name, node.value)):
                yield f"{node.lineno}: {name}"
        elif isinstance(node, ast.Call) and {"rtol", "atol"} & {
            keyword.arg for keyword in node.keywords
        }:
            yield f"{node.lineno}: {ast.unparse(node.func)}"


def _by_precision(value: ast.expr) -> bool:
    """True for numbers below 1 by precision."""
    if not isinstance(value, ast.Dict):
        return False
    keys = {key.value for key in value.keys if isinstance(key, ast.Constant)}
    return len(keys & set(THRESHOLDS)) > 1 and any(map(_is_share, value.values))


def _tolerance(name: str, value: ast.expr) -> bool:
    return "TOLERANCE" in name.upper() and _is_share(value)


def _is_share(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, float) and value.value < 1


def test_nobody_has_a_table_or_a_measure_of_his_own() -> None:
    copies_by_hand = [
        f"{path.relative_to(ROOT)}:{copy}"
        for place in PLACES
        for path in sorted((ROOT / place).rglob("*.py"))
        if path.relative_to(ROOT) != HOME
        for copy in copies(path)
    ]
    assert not copies_by_hand, "take it from the table in saccade.exporter.gate.metrics"


@pytest.mark.parametrize(
    "text",
    [
        'TOLERANCES = {"fp32": 1e-3, "fp16": 3e-2}',
        'LIMITS: dict[str, float] = {"fp32": 1e-3, "fp16": 5e-2}',
        "_RELATIVE_TOLERANCE = 1e-3",
        "same = np.allclose(found, wanted, rtol=0, atol=scale)",
        "def relative_error(found, expected): ...",
    ],
)
def test_a_copy_would_be_seen(text: str, tmp_path: Path) -> None:
    path = tmp_path / "it.py"
    path.write_text(text)
    assert [*copies(path)]
