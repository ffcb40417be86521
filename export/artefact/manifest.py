# SPDX-License-Identifier: Apache-2.0
"""The JSON next to each artefact: what it is, its origin, what was verified; variants."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes, write_atomically
from saccade.core.schema import Range
from saccade.exporter.artefact.manifest_checks import (
    MOST_CHARACTERS,
    MOST_LABELS,
    odd_hashes,
    odd_tensors,
    read_stored,
    unequal,
)
from saccade.exporter.artefact.variant import variant_name
from saccade.models.budget import Budget
from saccade.models.families import FAMILIES, entry_of
from saccade.models.interface import TensorSpec
from saccade.models.preprocessing import Preprocessing, with_later

SCHEMA = "saccade.manifest"
VERSION = 6
SUFFIX = ".manifest.json"
DATA_SUFFIX = ".data"  # of a file with weights, after the name of the ONNX file
_FILE_NAME_CHARACTERS = 255  # the limit of common file systems
BY_CLASS = ("logits", "probabilities")  # outputs with a number for each label
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class VariantEntry:
    """The variant's name and what it stands for.

    Units: kept and total count `unit`.
    """

    name: str
    model: str
    family: str
    role: str  # of this file; empty if one file is the whole variant
    setting: str
    budget: Budget
    kept: int
    total: int
    unit: str
    precision: str


@dataclass(frozen=True)
class DataEntry:
    """Name, hash and size of the file with the weights of a model that is too large for one."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class FileEntry:
    """Name, hash and size of the artefact file, which names the data file in turn."""

    name: str
    sha256: str
    bytes: int
    data: DataEntry | None = None

    @property
    def files(self) -> "tuple[FileEntry | DataEntry, ...]":
        """The ONNX file, and its data file if it has one."""
        return (self, self.data) if self.data else (self,)

    @property
    def total_bytes(self) -> int:
        """Bytes of both files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class ParentEntry:
    """The checkpoint that it was exported from; a copy is in the same folder."""

    name: str
    sha256: str


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of one sample, counted from the graph."""

    total: int
    by_part: dict[str, int]


@dataclass(frozen=True)
class Cost:
    """Cost of one sample, computed from the graph, not measured."""

    parameters: int
    multiply_adds: MultiplyAdds
    peak_activation_bytes: int


@dataclass(frozen=True)
class ScoreChange:
    """How much a type narrower than float32 changed the score on further calibration samples.

    Units: percentage points; low and high bound the change at 95 %, None for a family's own score.
    """

    samples: int
    points: float
    low: float | None = None
    high: float | None = None

    def decided(self, limit: float) -> bool:
        """True if the whole interval is within the limit, or beyond it."""
        if self.low is None or self.high is None:
            return False
        return max(-self.low, self.high) <= limit or max(self.low, -self.high) > limit


@dataclass(frozen=True)
class Parity:
    """The gate's figures and the thresholds that they were compared with.

    Units: seconds of the comparison, without the export.
    """

    passed: bool
    figures: dict[str, float]
    thresholds: dict[str, float]
    overridden: tuple[str, ...]  # thresholds that differ from the table
    real_inputs: int
    random_inputs: int
    batches: tuple[int, ...]
    # of relative errors |a - b| / (|b| + floor max|b|)
    floor: Annotated[float, Range(0, 1, above=True)]
    gate: str = "thorough"  # the level: quick, standard, thorough or custom
    seconds: float = 0.0
    score: ScoreChange | None = None  # None: `score_points` is that of the real inputs

    @property
    def overrides(self) -> dict[str, float]:
        """The thresholds that differ from the table."""
        return {name: self.thresholds[name] for name in self.overridden}


@dataclass(frozen=True)
class TriedRecipe:
    """A recipe of int8, and its outcome in words."""

    recipe: str
    outcome: str


@dataclass(frozen=True)
class Quantization:
    """The recipe by which a file was quantized, and those that were tried before it."""

    recipe: str
    target: str  # cpu: scales may have zero points; gpu: symmetric, as TensorRT requires
    tried: tuple[TriedRecipe, ...]  # in order; the last one was kept
    speedup: float | None  # over the fp32 file, where it was exported; None if it was not measured
    runtime: str  # that measured it
    device: str
    instruction_sets: tuple[str, ...]  # of that CPU for numbers of 8 and 16 bits
    samples: int  # calibration samples that the ranges come from


@dataclass(frozen=True)
class Manifest:
    """Everything that later stages know about an artefact without opening it."""

    variant: VariantEntry
    file: FileEntry
    parent: ParentEntry
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    preprocessing: Preprocessing | None  # None if it takes no image
    labels: tuple[str, ...]
    facts: dict[str, Any]  # what server and client need to know, such as a vocabulary
    custom_ops: tuple[str, ...]
    opset: int
    ir_version: int
    tools: dict[str, str]
    cost: Cost
    parity: Parity
    float32_layers: tuple[str, ...] = ()  # matrix nodes that a narrower variant keeps in float32
    activation_ranges: dict[str, float] = field(default_factory=dict)  # largest |x| by tensor
    inlined_ops: tuple[str, ...] = ()  # custom ops written as standard operators
    quantization: Quantization | None = None  # of an int8 file
    member: VariantEntry | None = None  # in a group: what it is in its own artefact folder
    step_only: bool = False  # requests do not choose it: it answers as a step of policies

    @property
    def exported(self) -> VariantEntry:
        """The variant as it was exported, under which its checkpoint knows it."""
        return self.member or self.variant

    @property
    def is_int8_for_gpu(self) -> bool:
        """True if its integers are for a GPU; those of a CPU without VNNI saturate on it."""
        return self.quantization is not None and self.quantization.target == "gpu"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, including schema and version."""
        content = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        if self.preprocessing is not None:
            content["preprocessing"] = self.preprocessing.to_dict()
        if self.file.data is None:
            del content["file"]["data"]
        if self.member is None:
            del content["member"]
        if not self.step_only:
            del content["step_only"]
        return content


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Write `<variant>.manifest.json` into the folder; equal content gives equal bytes."""
    path = folder / (manifest.variant.name + SUFFIX)
    write_atomically(path, json_bytes(manifest.to_dict()))
    return path


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and check every key, type and name.

    Raises: SaccadeError for a missing or foreign file, an unknown version, an unknown or
        missing key, a wrong type, and a name that contradicts another or leaves the folder.
    """
    return read_stored(
        path,
        Manifest,
        SCHEMA,
        VERSION,
        complete=_completed,
        problems=lambda manifest: _contradictions(manifest, path.name),
    )


def _completed(content: dict[str, Any]) -> dict[str, Any]:
    declared, file = content.get("preprocessing"), content.get("file")
    if isinstance(declared, dict):
        content["preprocessing"] = with_later(declared)
    if isinstance(file, dict):
        content["file"] = {"data": None, **file}  # most have none
    return {"member": None, "step_only": False, **content}


def _contradictions(manifest: Manifest, file: str) -> Iterator[str]:
    entry, data = manifest.variant, manifest.file.data
    exported = manifest.exported
    if not 1 <= entry.kept <= entry.total:
        yield f"keeps {entry.kept} of {entry.total} {entry.unit} at budget {entry.budget:g}"
    if unknown := set(manifest.parity.overridden) - set(manifest.parity.thresholds):
        yield f"overrides {sorted(unknown)} have no threshold"
    name = variant_name(entry.model, entry.role, entry.setting, entry.precision)
    yield from unequal(
        (
            (entry.name, name, "variant name"),
            (file, name + SUFFIX, "file name of the manifest"),
            (Path(manifest.file.name).stem, exported.name if data else name, "artefact's stem"),
        )
    )
    if exported.setting.startswith("b") and exported.setting != exported.budget.label:
        yield f"budget {exported.setting!r} stands for {exported.budget:g}"
    if data:
        expected = manifest.file.name + DATA_SUFFIX
        yield from unequal(((data.name, expected, "name of the data file"),))
    for other in (*(file.name for file in manifest.file.files), manifest.parent.name):
        if not FILE_NAME.fullmatch(other) or len(other) > _FILE_NAME_CHARACTERS:
            yield f"{other!r:.80} is not a plain name of a file in the same folder"
    yield from odd_hashes((*(file.sha256 for file in manifest.file.files), manifest.parent.sha256))
    if entry.family not in FAMILIES:
        yield (
            f"family {entry.family!r:.80} is not known to this release, which has "
            f"{', '.join(sorted(FAMILIES))}: the release of saccade that wrote it can read it"
        )
    if not entry.unit.isprintable() or len(entry.unit) > MOST_CHARACTERS:
        yield f"unit {entry.unit!r:.80} is not a word"
    yield from odd_tensors(manifest.inputs, manifest.outputs)
    most = max(map(len, manifest.labels), default=0)
    if len(manifest.labels) > MOST_LABELS or most > MOST_CHARACTERS:
        yield (
            f"has {len(manifest.labels)} labels of up to {most} characters, expected at most "
            f"{MOST_LABELS} of {MOST_CHARACTERS}"
        )


@dataclass(frozen=True)
class VariantFiles:
    """One variant: its files by role; the first answers a plain request."""

    name: str
    components: dict[str, Manifest]

    @property
    def main(self) -> Manifest:
        """The component that answers a plain request."""
        return next(iter(self.components.values()))

    @property
    def in_group(self) -> bool:
        """True if `saccade group` took it from another folder."""
        return self.main.member is not None

    @property
    def sha256(self) -> str:
        """The hash of the file; for several files, the hash of their hashes."""
        if len(self.components) == 1:
            return self.main.file.sha256
        text = "".join(
            f"{role} {component.file.sha256}\n"
            for role, component in sorted(self.components.items())
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def runtime_metadata(self) -> dict[str, Any]:
        """Everything that the server and the client need to know about the variant."""
        return {
            key: value
            for component in self.components.values()
            for key, value in component.facts.items()
        }

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one sample, in the component that answers a plain request."""
        return self.main.cost.multiply_adds.total

    @property
    def preprocessing(self) -> Preprocessing | None:
        """The preprocessing of images, or None if no component takes one."""
        declared = (
            component.preprocessing for component in self.components.values() if encoded(component)
        )
        return next(
            (preprocessing for preprocessing in declared if preprocessing is not None), None
        )

    def images(self) -> Preprocessing:
        """Return the preprocessing of images.

        Raises: SaccadeError if no component takes an image.
        """
        if self.preprocessing is None:
            names = sorted(spec.name for spec in self.main.inputs)
            raise SaccadeError(
                f"{self.name}: takes {', '.join(names)}, but saccade has no such data to measure "
                "with. Measure a model that takes images."
            )
        return self.preprocessing

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of `probabilities`; empty if the model has none."""
        return next(
            (component.labels for component in self.components.values() if component.labels), ()
        )


def grouped(manifests: Sequence[Manifest]) -> tuple[VariantFiles, ...]:
    """Group the manifests of a folder into variants, in the same order.

    Raises: SaccadeError if a variant lacks a component that every request needs.
    """
    variants: dict[str, dict[str, Manifest]] = {}
    for manifest in manifests:
        entry = manifest.variant
        name = variant_name(entry.model, "", entry.setting, entry.precision)
        variants.setdefault(name, {})[entry.role] = manifest
    for name, components in variants.items():
        needed = entry_of(next(iter(components.values())).variant.family).required
        if not set(needed) <= set(components):
            raise SaccadeError(
                f"{name}: found only {', '.join(sorted(components))}, expected the components "
                f"{' and '.join(needed)}, each with its manifest. Export the checkpoint again."
            )
    return tuple(VariantFiles(name, components) for name, components in variants.items())


def by_parent(manifests: Iterable[Manifest]) -> list[list[Manifest]]:
    """Return the manifests of each checkpoint, in the order of the first one of each."""
    found: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        found.setdefault(manifest.parent.sha256, []).append(manifest)
    return list(found.values())


def label_order(labels: Sequence[str], own: Sequence[str]) -> tuple[int, ...]:
    """Return the index of each label in a variant's own ones; empty if they have one order."""
    return () if tuple(labels) == tuple(own) else tuple(map(list(own).index, labels))


def encoded(manifest: Manifest) -> tuple[str, ...]:
    """Return the inputs whose pixels arrive at the router as encoded files."""
    if manifest.preprocessing is None:
        return ()
    return tuple(
        spec.name
        for spec in manifest.inputs
        if spec.dtype == "uint8" and spec.name.partition("_")[0] == "image"
    )


def filled(manifest: Manifest) -> tuple[str, ...]:
    """Return the inputs of this component that the router fills in itself."""
    names = entry_of(manifest.variant.family).filled.get(manifest.variant.role, ())
    return tuple(spec.name for spec in manifest.inputs if spec.name in names)
