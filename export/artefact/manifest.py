# SPDX-License-Identifier: Apache-2.0
"""The JSON beside each artefact: what it is, where it comes from, what was proved of it."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.export.artefact.manifest_checks import (
    MOST_CHARACTERS,
    MOST_LABELS,
    check_equal,
    check_hashes,
    check_tensors,
)
from saccade.export.artefact.variant import known_roles, variant_name
from saccade.files import json_bytes, sha256_of, write_atomically
from saccade.models.budget import Budget
from saccade.models.families import FAMILIES
from saccade.models.interface import TensorSpec
from saccade.models.preprocessing import Preprocessing, upgraded
from saccade.schema import AGAIN, read_json, typed

SCHEMA = "saccade.manifest"
VERSION = 5
SQUASHING = 3  # the oldest that is read; it came before resize modes and squashed every image
# What versions before 5 do not say: the floor of the gate that they passed. This is history, and
# stays as it is when the gate's own table changes.
_FLOORS_BEFORE_5 = {"fp32": 1e-2, "fp16": 1e-1, "bf16": 1e-1, "int8": 1e-1}
SUFFIX = ".manifest.json"
_FILE_NAME_CHARACTERS = 255  # what a file system takes
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class VariantEntry:
    """The variant's name and what the name stands for.

    Units: kept and total count `unit`.
    """

    name: str
    model: str
    family: str
    role: str  # of this file; empty where one file is the whole variant
    setting: str
    budget: Budget
    kept: int
    total: int
    unit: str
    precision: str


@dataclass(frozen=True)
class FileEntry:
    """The artefact's own bytes."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class ParentEntry:
    """The checkpoint it was made from; the copy lies in the same folder."""

    name: str
    sha256: str


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of one sample, counted from the graph."""

    total: int
    by_part: dict[str, int]


@dataclass(frozen=True)
class Cost:
    """What one sample costs, read from the graph and not from a clock."""

    parameters: int
    multiply_adds: MultiplyAdds
    peak_activation_bytes: int


@dataclass(frozen=True)
class Parity:
    """The gate's figures, with the thresholds they were held against."""

    passed: bool
    figures: dict[str, float]
    thresholds: dict[str, float]
    overridden: tuple[str, ...]  # thresholds that are not the table's
    real_inputs: int
    random_inputs: int
    batches: tuple[int, ...]
    floor: float  # of the errors: a share of the largest magnitude, in every denominator

    @property
    def overrides(self) -> dict[str, float]:
        """The thresholds that are not the table's."""
        return {name: self.thresholds[name] for name in self.overridden}


@dataclass(frozen=True)
class Manifest:
    """Everything later stages may know of an artefact without opening it."""

    variant: VariantEntry
    file: FileEntry
    parent: ParentEntry
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    preprocessing: Preprocessing | None  # none where no image comes in
    labels: tuple[str, ...]
    facts: dict[str, Any]  # what server and client need of the family, such as a vocabulary
    custom_ops: tuple[str, ...]
    opset: int
    ir_version: int
    tools: dict[str, str]
    cost: Cost
    parity: Parity
    float32_layers: tuple[str, ...] = ()  # matrix nodes that a narrower variant keeps in float32
    activation_ranges: dict[str, float] = field(default_factory=dict)  # largest |x| by tensor
    inlined_ops: tuple[str, ...] = ()  # custom ops that the file holds as standard operators

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, schema and version included."""
        return {"schema": SCHEMA, "version": VERSION, **asdict(self)}


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Write `<variant>.manifest.json` into the folder; the same content is the same bytes."""
    path = folder / (manifest.variant.name + SUFFIX)
    write_atomically(path, json_bytes(manifest.to_dict()))
    return path


def read_manifest(path: Path) -> Manifest:
    """A manifest, believed only after every key, type and name was checked.

    Raises: SaccadeError for a missing or foreign file, an unknown version, an unknown or
        missing key, a wrong type, and a name that contradicts another or leaves the folder.
    """
    content = read_json(path)
    schema, version = content.pop("schema", None), content.pop("version", None)
    if schema != SCHEMA:
        raise SaccadeError(f"{path}: schema is {schema!r}, expected {SCHEMA!r}. {AGAIN}")
    if version not in range(SQUASHING, VERSION + 1) or isinstance(version, bool):
        raise SaccadeError(
            f"{path}: manifest version {version!r} is not known to this release, which reads "
            f"{SQUASHING} to {VERSION}. Use the release that wrote it, or export again."
        )
    if version == SQUASHING:
        content.setdefault("inlined_ops", [])
        if isinstance(declared := content.get("preprocessing"), dict):
            content["preprocessing"] = upgraded(declared)
    if version < VERSION:
        _add_floor(content)
    manifest: Manifest = typed(Manifest, content, f"{path}: ")
    _check_counts(manifest, path)
    _check_names(manifest, path)
    check_tensors(path, manifest.inputs, manifest.outputs, AGAIN)
    _check_labels(manifest, path)
    return manifest


def _add_floor(content: dict[str, Any]) -> None:
    """The floor into what an older release wrote, if it is as it should be so far."""
    variant, parity = content.get("variant"), content.get("parity")
    if isinstance(variant, dict) and isinstance(parity, dict):
        floor = _FLOORS_BEFORE_5.get(str(variant.get("precision")), 1.0)
        parity.setdefault("floor", floor)


def read_folder(folder: Path) -> list[Manifest]:
    """The manifests of an artefact folder, largest budget first, each file's hash checked.

    Raises: SaccadeError for what `read_manifests` refuses and a file that is not its manifest's.
    """
    manifests = read_manifests(folder)
    for manifest in manifests:
        check_file(folder, manifest)
    return manifests


def read_manifests(folder: Path) -> list[Manifest]:
    """The manifests of an artefact folder, largest budget first; the files are not opened.

    The parts of a variant are neighbours, first the one that answers a plain request.

    Raises: SaccadeError if there is none, an artefact lacks its manifest, or the manifests do
        not belong to one model and one checkpoint.
    """
    if not folder.is_dir():
        raise SaccadeError(f"{folder}: no such folder. Make it with: saccade export CHECKPOINT")
    manifests = [read_manifest(path) for path in sorted(folder.glob("*" + SUFFIX))]
    if not manifests:
        raise SaccadeError(f"{folder}: no {SUFFIX} in it. Make it with: saccade export CHECKPOINT")
    known = {each.file.name for each in manifests}
    if strays := sorted({path.name for path in folder.glob("*.onnx")} - known):
        raise SaccadeError(f"{folder / strays[0]}: has no manifest. Remove it, or export again.")
    first = manifests[0]
    for each in manifests:
        if (each.variant.model, each.parent) != (first.variant.model, first.parent):
            raise SaccadeError(
                f"{folder}: {each.variant.name} and {first.variant.name} come from different "
                "models or checkpoints. Export each into its own folder."
            )
    return sorted(manifests, key=_order)


def images_text(folder: Path, manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """What becomes of an image, a line for each way that the manifests say it, in words."""
    lines: dict[str, None] = {}
    for each in manifests:
        if each.preprocessing is None:
            continue
        text = f"images: {each.preprocessing.described()}"
        if read_json(folder / (each.variant.name + SUFFIX))["version"] == SQUASHING:
            text += (
                f". The manifest has version {SQUASHING}, which knew no other way than to squash: "
                "convert or train and export again to keep the shape of images"
            )
        lines[text] = None
    return tuple(lines)


def _order(manifest: Manifest) -> tuple[float, str, str, int]:
    entry = manifest.variant
    return -entry.budget, entry.precision, entry.setting, known_roles().index(entry.role)


def check_file(folder: Path, manifest: Manifest) -> None:
    """The artefact is there and has the bytes that its manifest promises.

    Raises: SaccadeError otherwise.
    """
    path = folder / manifest.file.name
    if not path.is_file():
        raise SaccadeError(f"{path}: missing, though its manifest is there. {AGAIN}")
    if (found := sha256_of(path)) != manifest.file.sha256:
        raise SaccadeError(
            f"{path}: SHA-256 is {found[:12]}..., its manifest says {manifest.file.sha256[:12]}... "
            f"The file was changed after its export. {AGAIN}"
        )
    if (size := path.stat().st_size) != manifest.file.bytes:
        raise SaccadeError(
            f"{path}: has {size} bytes, its manifest says {manifest.file.bytes}. {AGAIN}"
        )


def _check_names(manifest: Manifest, path: Path) -> None:
    entry = manifest.variant
    name = variant_name(entry.model, entry.role, entry.setting, entry.precision)
    claims = (
        (entry.name, name, "variant name"),
        (path.name, name + SUFFIX, "file name of the manifest"),
        (Path(manifest.file.name).stem, name, "artefact's stem"),
    )
    check_equal(path, claims, AGAIN)
    if entry.setting.startswith("b") and entry.setting != entry.budget.label:
        raise SaccadeError(
            f"{path}: setting {entry.setting!r} has budget {entry.budget:g}. {AGAIN}"
        )
    for file in (manifest.file.name, manifest.parent.name):
        if not FILE_NAME.fullmatch(file) or len(file) > _FILE_NAME_CHARACTERS:
            raise SaccadeError(
                f"{path}: {file!r:.80} is not the plain name of a file in the same folder. {AGAIN}"
            )
    check_hashes(path, (manifest.file.sha256, manifest.parent.sha256), AGAIN)
    if entry.family not in FAMILIES:
        raise SaccadeError(
            f"{path}: family {entry.family!r:.80} is not known to this release, which has "
            f"{', '.join(sorted(FAMILIES))}. Use the release that wrote it, or export again."
        )
    if not entry.unit.isprintable() or len(entry.unit) > MOST_CHARACTERS:
        raise SaccadeError(f"{path}: unit {entry.unit!r:.80} is not a word. {AGAIN}")


def _check_labels(manifest: Manifest, path: Path) -> None:
    most = max(map(len, manifest.labels), default=0)
    if len(manifest.labels) > MOST_LABELS or most > MOST_CHARACTERS:
        raise SaccadeError(
            f"{path}: has {len(manifest.labels)} labels of up to {most} characters, expected at "
            f"most {MOST_LABELS} of {MOST_CHARACTERS}. {AGAIN}"
        )


def _check_counts(manifest: Manifest, path: Path) -> None:
    entry = manifest.variant
    if not 1 <= entry.kept <= entry.total:
        raise SaccadeError(
            f"{path}: keeps {entry.kept} of {entry.total} {entry.unit} at budget "
            f"{entry.budget:g}. {AGAIN}"
        )
    if not 0 < manifest.parity.floor <= 1:
        raise SaccadeError(
            f"{path}: parity.floor is {manifest.parity.floor:g}, expected above 0 and at most 1. "
            f"{AGAIN}"
        )
    if unknown := set(manifest.parity.overridden) - set(manifest.parity.thresholds):
        raise SaccadeError(f"{path}: overrides {sorted(unknown)} have no threshold. {AGAIN}")
