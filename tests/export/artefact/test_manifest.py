# SPDX-License-Identifier: Apache-2.0
"""A manifest is believed only if every word of it can be."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import (
    SUFFIX,
    VERSION,
    Cost,
    FileEntry,
    Manifest,
    MultiplyAdds,
    ParentEntry,
    Parity,
    VariantEntry,
    read_manifest,
    write_manifest,
)
from saccade.exporter.artefact.variant import choose_budgets, default_model_name, variant_name
from saccade.exporter.gate.metrics import FLOORS, THRESHOLDS
from saccade.models.budget import ComputeBudget, fraction_budget
from saccade.models.interface import TensorSpec
from saccade.models.preprocessing import Preprocessing

LIMIT = {"relative_error": THRESHOLDS["fp32"]["relative_error"]}


def put(folder: Path, budget: float = 0.5, model: str = "nac", role: str = "") -> Manifest:
    """A consistent artefact in the folder, whose file is not ONNX: nobody opens it here."""
    compute_budget = fraction_budget(str(budget), 16, "modules")
    name = variant_name(model, role, compute_budget.label, "fp32")
    file = folder / f"{name}.onnx"
    file.write_bytes(name.encode())
    manifest = Manifest(
        variant=VariantEntry(
            name,
            model,
            "nac",
            role,
            compute_budget.label,
            budget,
            compute_budget.kept,
            16,
            "modules",
            "fp32",
        ),
        file=FileEntry(file.name, sha256_of(file), file.stat().st_size),
        parent=ParentEntry(f"{model}.safetensors", "0" * 64),
        inputs=(TensorSpec("image", "b 8 8 1", "uint8"),),
        outputs=(TensorSpec("logits", "b 10", "float32"),),
        preprocessing=Preprocessing(8, 8, 1, (0.3,), (0.4,)),
        labels=("zero", "one"),
        facts={"words": ["a", "b"]},
        custom_ops=(),
        opset=20,
        ir_version=10,
        tools={"torch": "2"},
        cost=Cost(7, MultiplyAdds(5, {"read-in": 5}), 64),
        parity=Parity(
            True, {"relative_error": 1e-6}, LIMIT, (), 256, 64, (1,), floor=FLOORS["fp32"]
        ),
    )
    write_manifest(folder, manifest)
    return manifest


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    written = [put(tmp_path, budget) for budget in (0.25, 1, 0.5)]
    read = ArtefactFolder(tmp_path).manifests
    assert list(read) == sorted(written, key=lambda each: -each.variant.budget)
    before = (tmp_path / f"nac-b0500-fp32{SUFFIX}").read_bytes()
    write_manifest(tmp_path, read[1])
    assert (tmp_path / f"nac-b0500-fp32{SUFFIX}").read_bytes() == before
    assert read[0].inputs[0].shape == ("b", 8, 8, 1)


WRONG: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "another schema": (("schema",), "saccade.frontier", "schema"),
    "older version": (("version",), 2, "version 2"),
    "newer version": (("version",), VERSION + 1, f"version {VERSION + 1}"),
    "version that equals 1 but is not": (("version",), True, "version True"),
    "unknown key": (("colour",), "blue", "unknown keys: colour"),
    "unknown nested key": (("cost", "seconds"), 1, "cost: unknown keys: seconds"),
    "text for a number": (("opset",), "20", "opset: found '20', expected a whole number"),
    "boolean for a number": (("cost", "parameters"), True, "parameters"),
    "number for a list": (("labels",), 3, "labels"),
    "wrong item": (("labels", 1), 3, "labels"),
    "null": (("parity", "figures", "relative_error"), None, "relative_error"),
    "folder in the file's name": (("file", "name"), "../nac-b0500-fp32.onnx", "plain name"),
    "absolute parent": (("parent", "name"), "/etc/passwd", "plain name"),
    "hidden parent": (("parent", "name"), "..", "plain name"),
    "another variant's file": (("file", "name"), "nac-b1000-fp32.onnx", "stem"),
    "another budget": (("variant", "budget"), 0.25, "budget 'b0500'"),
    "budget out of range": (("variant", "budget"), 1.5, "budget"),
    "budget beyond any number": (("variant", "budget"), 1e308, "budget"),
    "integer that no float holds": (("variant", "budget"), 10**400, "expected a finite number"),
    "another name of a budget": (("variant", "setting"), "b0250", "variant name"),
    "another role": (("variant", "role"), "text", "variant name"),
    "no such role": (("variant", "role"), "audio", "role 'audio'"),
    "more modules than there are": (("variant", "kept"), 17, "17 of 16"),
    "short hash": (("file", "sha256"), "abc", "SHA-256"),
    "axes": (("inputs", 0, "axes"), "b -1 8 1", "axes"),
    "axis that is no length": (("inputs", 0, "axes"), "b " + "8" * 5000, "axes"),
    "no outputs": (("outputs",), [], "empty"),
    "preprocessing out of range": (("preprocessing", "height_px"), 0, "height_px"),
    "override without threshold": (("parity", "overridden"), ["colour"], "threshold"),
    "no floor": (("parity", "floor"), 0, "floor: found 0.0, expected above 0"),
    "a floor above all": (("parity", "floor"), 1.5, "floor: found 1.5, expected .* at most 1"),
    "a floor that is not a number": (("parity", "floor"), "0.1", "floor: found '0.1'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(case: str, tmp_path: Path) -> None:
    keys, value, message = WRONG[case]
    put(tmp_path)
    path = tmp_path / f"nac-b0500-fp32{SUFFIX}"
    content = json.loads(path.read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(SaccadeError, match=message):
        read_manifest(path)


@pytest.mark.parametrize("key", ["schema", "version", "file", "parity"])
def test_refuses_without(key: str, tmp_path: Path) -> None:
    put(tmp_path)
    path = tmp_path / f"nac-b0500-fp32{SUFFIX}"
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(SaccadeError, match=key):
        read_manifest(path)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": NaN}', "[" * 100_000, "\xff"])
def test_refuses_what_is_not_an_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / f"nac-b0500-fp32{SUFFIX}"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(SaccadeError, match=path.name):
        read_manifest(path)


def test_folder_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match="no such folder"):
        ArtefactFolder(tmp_path / "absent").check_files()
    with pytest.raises(SaccadeError, match="saccade export"):
        ArtefactFolder(tmp_path).check_files()
    manifest = put(tmp_path)
    file = tmp_path / manifest.file.name
    file.write_bytes(file.read_bytes() + b"!")
    with pytest.raises(SaccadeError, match="changed after its export"):
        ArtefactFolder(tmp_path).check_files()
    file.unlink()
    with pytest.raises(SaccadeError, match="missing"):
        ArtefactFolder(tmp_path).check_files()
    put(tmp_path)
    (tmp_path / "stray.onnx").write_bytes(b"")
    with pytest.raises(SaccadeError, match=r"stray\.onnx: has no manifest"):
        ArtefactFolder(tmp_path).check_files()


def test_folder_holds_one_checkpoint(tmp_path: Path) -> None:
    other = put(tmp_path, 0.25)
    write_manifest(tmp_path, replace(other, parent=replace(other.parent, sha256="1" * 64)))
    put(tmp_path, 0.5)
    with pytest.raises(SaccadeError, match="different models or checkpoints"):
        ArtefactFolder(tmp_path).check_files()


def test_components_of_a_variant_are_neighbours(tmp_path: Path) -> None:
    for budget in (0.5, 1):
        for role in ("text", "image"):
            put(tmp_path, budget, "clip", role)
    assert [manifest.variant.name for manifest in ArtefactFolder(tmp_path).manifests] == [
        "clip-image-b1000-fp32",
        "clip-text-b1000-fp32",
        "clip-image-b0500-fp32",
        "clip-text-b0500-fp32",
    ]


def test_names() -> None:
    assert variant_name("nac", "", "b0125", "fp16") == "nac-b0125-fp16"
    assert variant_name("a-1", "text", "b1000", "fp32") == "a-1-text-b1000-fp32"
    assert default_model_name(Path("build/nac.safetensors")) == "nac"
    for name in ("", "NAC", "nac_2", "-nac", "nac.b", "nac/b", "n" * 65, "nac\n"):
        with pytest.raises(SaccadeError, match="--name"):
            variant_name(name, "", "b1000", "fp32")
    with pytest.raises(SaccadeError, match="--name"):
        default_model_name(Path("My Model.safetensors"))
    with pytest.raises(SaccadeError, match="fp32, fp16, bf16, int8"):
        variant_name("nac", "", "b1000", "fp8")


class Modules:
    """A family of which nothing is known but how it counts."""

    def __init__(self, total: int) -> None:
        self.total = total

    def budget(self, text: str) -> ComputeBudget:
        return fraction_budget(text, self.total, "modules")

    def budgets(self) -> tuple[ComputeBudget, ...]:
        return (self.budget("1"), self.budget("0.5"))


def test_budgets() -> None:
    model: Any = Modules(20)
    chosen = choose_budgets(model, (1, 0.5, "0.125", 0.1))
    assert [each.kept for each in chosen] == [20, 10, 3, 2]  # 2.5 is rounded up
    assert [budget.label for budget in choose_budgets(model, ("0.25", "1"))] == ["b1000", "b0250"]
    assert choose_budgets(model, ()) == model.budgets()


@pytest.mark.parametrize(
    "budgets",
    [
        ("0",),
        (-0.5,),
        (1.01,),
        ("nan",),
        ("inf",),
        ("half",),
        ("",),
        (1, 1),
        (0.5, 0.5004),
        (1e-4,),
    ],
)
def test_refuses_budgets(budgets: tuple[float | str, ...]) -> None:
    model: Any = Modules(4096)
    with pytest.raises(SaccadeError, match="budget"):
        choose_budgets(model, budgets)


def test_refuses_budgets_that_make_no_variant() -> None:
    model: Any = Modules(16)
    with pytest.raises(SaccadeError, match=r"keeps none of 16 modules.*1/32\."):
        choose_budgets(model, (1, 0.03))
    with pytest.raises(SaccadeError, match="both keep 8 of 16"):
        choose_budgets(model, (0.5, 0.48))


def test_needs_no_framework() -> None:
    code = (
        "import sys, saccade.exporter.artefact.manifest, saccade.exporter.artefact.variant, "
        "saccade.exporter.export, saccade.exporter.gate.gate, saccade.exporter.gate.metrics, "
        "saccade.exporter.runtimes.runners\n"
        "print({'torch', 'onnx', 'onnxruntime', 'rich'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_verify_prints_what_becomes_of_an_image(tmp_path: Path) -> None:
    from rich.console import Console

    from saccade.exporter.gate.report import GateReport

    put(tmp_path)
    said = ArtefactFolder(tmp_path).images_text()
    report = GateReport(tmp_path, (), images=said)
    assert report.to_dict()["images"] == list(said)
    with (console := Console(width=200)).capture() as capture:
        console.print(report.to_text())
    assert said[0] in capture.get()
