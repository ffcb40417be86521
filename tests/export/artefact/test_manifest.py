# SPDX-License-Identifier: Apache-2.0
"""A manifest is believed only if every word of it can be."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.json_files import edited, put
from tiny_artefacts import manifest_of

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import (
    SUFFIX,
    VERSION,
    FileEntry,
    Manifest,
    ParentEntry,
    VariantEntry,
    read_manifest,
    write_manifest,
)
from saccade.exporter.artefact.variant import default_model_name, variant_name
from saccade.models.budget import fraction_budget

HALF = f"nac-b0500-fp32{SUFFIX}"


def written(folder: Path, budget: float = 0.5, model: str = "nac", role: str = "") -> Manifest:
    """A consistent artefact in the folder, whose file is not ONNX: nobody opens it here."""
    own = fraction_budget(str(budget), 16, "modules")
    name = variant_name(model, role, own.label, "fp32")
    file = folder / f"{name}.onnx"
    file.write_bytes(name.encode())
    manifest = manifest_of(
        "b1000",
        b"",
        ParentEntry(f"{model}.safetensors", "0" * 64),
        variant=VariantEntry(
            name, model, "nac", role, own.label, budget, own.kept, 16, "modules", "fp32"
        ),
        file=FileEntry(file.name, sha256_of(file), file.stat().st_size),
        facts={"words": ["a", "b"]},
    )
    write_manifest(folder, manifest)
    return manifest


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    manifests = [written(tmp_path, budget) for budget in (0.25, 1, 0.5)]
    read = ArtefactFolder(tmp_path).manifests
    assert list(read) == sorted(manifests, key=lambda each: -each.variant.budget)
    before = (tmp_path / HALF).read_bytes()
    write_manifest(tmp_path, read[1])
    assert (tmp_path / HALF).read_bytes() == before
    assert read[0].inputs[0].shape == ("b", 4, 4, 1)


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
    "no such role": (("variant", "role"), "audio", "role is 'audio', expected one of image"),
    "more modules than there are": (("variant", "kept"), 17, "17 of 16"),
    "short hash": (("file", "sha256"), "abc", "SHA-256"),
    "axes": (("inputs", 0, "axes"), "b -1 8 1", "axes"),
    "axis that is no length": (("inputs", 0, "axes"), "b " + "8" * 5000, "axes"),
    "no outputs": (("outputs",), [], "empty"),
    "preprocessing out of range": (("preprocessing", "height_px"), 0, "height_px"),
    "override without threshold": (("parity", "overridden"), ["colour"], "threshold"),
    "no floor": (("parity", "floor"), 0, "floor: found 0.0, expected above 0"),
    "a floor above all": (("parity", "floor"), 1.5, "floor: found 1.5, expected above 0 and"),
    "a floor that is not a number": (("parity", "floor"), "0.1", "floor: found '0.1'"),
    "a number of 4,000 digits": (("cost", "parameters"), 10**4000, "whole number of at most"),
    "a number beyond 64 bits": (("variant", "total"), 2**63, "whole number of at most"),
    "no tensor's type": (("inputs", 0, "dtype"), "object", "type 'object', expected one of"),
    "no axes": (("outputs", 0, "axes"), "", "are not words and numbers"),
    "an image of 1e20 numbers": (("inputs", 0, "axes"), "b 9999999999 9999999999", "2147483648"),
    "20 axes": (("inputs", 0, "axes"), "b " + "1 " * 20, "at most 16"),
    "1,000 outputs": (
        ("outputs",), [{"name": f"o{i}", "axes": "b 3", "dtype": "float32"} for i in range(1000)],
        "1001 inputs and outputs",
    ),
    "an escape in a tensor's name": (("inputs", 0, "name"), "\x1b[2J", "control characters"),
    "no family": (("variant", "family"), "\x1b[2J", "family '\\x1b[2J' is not known"),
    "an escape in the unit": (("variant", "unit"), "m\x1b[2J", "is not a word"),
    "a long unit": (("variant", "unit"), "m" * 5000, "is not a word"),
    "a long name of a file": (("parent", "name"), "x" * 5000, "is not a plain name"),
    "a file elsewhere": (("parent", "name"), "../../etc/passwd", "is not a plain name"),
    "a million labels": (("labels",), ["a"] * 10**6, "1000000 labels"),
    "a long label": (("labels", 0), "a" * 10**6, "of up to 1000000 characters"),
    "labels as an object": (("labels",), {}, "expected a list"),
    "a hash of another length": (("file", "sha256"), "0" * 63, "is not a SHA-256"),
    "null as a manifest's part": (("parity",), None, "expected an object"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refuses(case: str, tmp_path: Path) -> None:
    keys, value, words = WRONG[case]
    written(tmp_path)
    path = put(tmp_path / HALF, keys, value)
    with pytest.raises(SaccadeError) as caught:
        read_manifest(path)
    message = str(caught.value)
    assert words in message and len(message) < 500
    assert str(path) in message or case == "no such role"  # which is known to all of saccade
    assert message.isprintable()


@pytest.mark.parametrize("key", ["schema", "version", "file", "parity"])
def test_refuses_without(key: str, tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(SaccadeError, match=key):
        read_manifest(edited(tmp_path / HALF, lambda content: content.pop(key) and None))


@pytest.mark.parametrize("text", ["", "[]", '{"schema": NaN}', "[" * 100_000, "\xff"])
def test_refuses_what_is_not_an_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / HALF
    path.write_text(text, encoding="latin-1")
    with pytest.raises(SaccadeError, match=path.name):
        read_manifest(path)


def test_folder_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match=r"no such folder.*--out FOLDER$"):
        ArtefactFolder(tmp_path / "absent").check_files()
    (tmp_path / "digits").mkdir()
    written(tmp_path / "digits")
    with pytest.raises(SaccadeError, match=r"no such folder. Did you mean digits\? Create it"):
        ArtefactFolder(tmp_path / "digit").check_files()
    shutil.rmtree(tmp_path / "digits")
    with pytest.raises(SaccadeError, match="saccade export"):
        ArtefactFolder(tmp_path).check_files()
    written(tmp_path)
    (tmp_path / "stray.onnx").write_bytes(b"")
    with pytest.raises(SaccadeError, match=r"stray\.onnx: has no manifest"):
        ArtefactFolder(tmp_path).check_files()


def test_folder_holds_one_checkpoint(tmp_path: Path) -> None:
    other = written(tmp_path, 0.25)
    write_manifest(tmp_path, replace(other, parent=replace(other.parent, sha256="1" * 64)))
    written(tmp_path, 0.5)
    with pytest.raises(SaccadeError, match="different models or checkpoints"):
        ArtefactFolder(tmp_path).check_files()


def test_components_of_a_variant_are_neighbours(tmp_path: Path) -> None:
    for budget in (0.5, 1):
        for role in ("text", "image"):
            written(tmp_path, budget, "clip", role)
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

    written(tmp_path)
    said = ArtefactFolder(tmp_path).images_text()
    report = GateReport(tmp_path, (), images=said)
    assert report.to_dict()["images"] == list(said)
    with (console := Console(width=200)).capture() as capture:
        console.print(report.to_text())
    assert said[0] in capture.get()
