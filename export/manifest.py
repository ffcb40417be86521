# SPDX-License-Identifier: Apache-2.0
"""The JSON beside each artefact: what it is, where it comes from, what was proved of it."""

import json
import math
import re
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from saccade.export.variants import Variant
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.errors import SaccadeError
from saccade.plugins.files import json_bytes, sha256_of, write_atomically

SCHEMA = "saccade.manifest"
VERSION = 1
SUFFIX = ".manifest.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_AXIS = re.compile(r"[a-z][a-z0-9_]*|[1-9][0-9]*")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: what it is called, what its axes mean, what it holds."""

    name: str
    axes: str  # "b 8 8 1": a word is dynamic, a number is fixed
    dtype: str

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The axes one by one, fixed ones as numbers."""
        return tuple(int(axis) if axis.isdigit() else axis for axis in self.axes.split())


@dataclass(frozen=True)
class VariantEntry:
    """The variant's name and what the name stands for."""

    name: str
    model: str
    family: str
    budget: float
    precision: str
    modules_kept: int
    modules_total: int


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


@dataclass(frozen=True)
class Manifest:
    """Everything later stages may know of an artefact without opening it."""

    variant: VariantEntry
    file: FileEntry
    parent: ParentEntry
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    preprocessing: Preprocessing
    labels: tuple[str, ...]
    custom_ops: tuple[str, ...]
    opset: int
    ir_version: int
    tools: dict[str, str]
    cost: Cost
    parity: Parity

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
    content = _read_json(path)
    schema, version = content.pop("schema", None), content.pop("version", None)
    if schema != SCHEMA:
        raise SaccadeError(f"{path}: schema is {schema!r}, expected {SCHEMA!r}. {_AGAIN}")
    if version != VERSION or isinstance(version, bool):
        raise SaccadeError(
            f"{path}: manifest version {version!r} is not known to this release, which reads "
            f"{VERSION}. Use the release that wrote it, or export again."
        )
    manifest: Manifest = _typed(Manifest, content, f"{path}: ")
    _check_names(manifest, path)
    _check_tensors(manifest, path)
    return manifest


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
    return sorted(manifests, key=lambda each: (-each.variant.budget, each.variant.name))


def check_file(folder: Path, manifest: Manifest) -> None:
    """The artefact is there and has the bytes that its manifest promises.

    Raises: SaccadeError otherwise.
    """
    path = folder / manifest.file.name
    if not path.is_file():
        raise SaccadeError(f"{path}: missing, though its manifest is there. {_AGAIN}")
    if (found := sha256_of(path)) != manifest.file.sha256:
        raise SaccadeError(
            f"{path}: SHA-256 is {found[:12]}..., its manifest says {manifest.file.sha256[:12]}... "
            f"The file was changed after its export. {_AGAIN}"
        )


_AGAIN = "Export again with: saccade export CHECKPOINT"


def _read_json(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not a number")

    try:
        content = json.loads(path.read_bytes(), parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise SaccadeError(f"{path}: cannot be read as JSON ({error}). {_AGAIN}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise SaccadeError(f"{path}: holds a {kind}, expected an object. {_AGAIN}")
    return content


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, without any conversion but list to tuple and int to float."""
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise _wrong_type(where, value, "an object")
        expected = {field.name for field in fields(kind)}
        if missing := sorted(expected - set(value)):
            raise SaccadeError(f"{where}missing keys: {', '.join(missing)}. {_AGAIN}")
        if extra := sorted(set(value) - expected):
            raise SaccadeError(f"{where}unknown keys: {', '.join(extra)}. {_AGAIN}")
        hints = get_type_hints(kind)
        checked = {key: _typed(hints[key], value[key], f"{where}{key}: ") for key in value}
        try:
            build: Any = kind
            return build(**checked)
        except SaccadeError as error:
            raise SaccadeError(f"{where}{error}") from error
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong_type(where, value, "a list")
        return tuple(_typed(arguments[0], each, f"{where}[{i}]: ") for i, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong_type(where, value, "an object")
        return {key: _typed(arguments[1], each, f"{where}{key}: ") for key, each in value.items()}
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _wrong_type(where, value, f"{kind.__name__}")
    return value


def _wrong_type(where: str, value: Any, expected: str) -> SaccadeError:
    return SaccadeError(f"{where}found {value!r:.60}, expected {expected}. {_AGAIN}")


def _check_names(manifest: Manifest, path: Path) -> None:
    entry = manifest.variant
    name = Variant(entry.model, entry.family, entry.budget, entry.precision).name
    for found, expected, what in (
        (entry.name, name, "variant name"),
        (path.name, name + SUFFIX, "file name of the manifest"),
        (Path(manifest.file.name).stem, name, "artefact's stem"),
    ):
        if found != expected:
            raise SaccadeError(f"{path}: {what} is {found!r}, expected {expected!r}. {_AGAIN}")
    for file in (manifest.file.name, manifest.parent.name):
        if not _FILE_NAME.fullmatch(file):
            raise SaccadeError(
                f"{path}: {file!r} is not the plain name of a file in the same folder. {_AGAIN}"
            )
    for digest in (manifest.file.sha256, manifest.parent.sha256):
        if not _SHA256.fullmatch(digest):
            raise SaccadeError(f"{path}: {digest!r:.80} is not a SHA-256 in hexadecimal. {_AGAIN}")


def _check_tensors(manifest: Manifest, path: Path) -> None:
    if not manifest.inputs or not manifest.outputs:
        raise SaccadeError(f"{path}: inputs or outputs are empty. {_AGAIN}")
    for spec in (*manifest.inputs, *manifest.outputs):
        if not all(_AXIS.fullmatch(axis) for axis in spec.axes.split()):
            raise SaccadeError(
                f"{path}: axes {spec.axes!r} of {spec.name!r} are not words and numbers. {_AGAIN}"
            )
    entry = manifest.variant
    if not 1 <= entry.modules_kept <= entry.modules_total:
        raise SaccadeError(
            f"{path}: keeps {entry.modules_kept} of {entry.modules_total} modules. {_AGAIN}"
        )
    if unknown := set(manifest.parity.overridden) - set(manifest.parity.thresholds):
        raise SaccadeError(f"{path}: overrides {sorted(unknown)} have no threshold. {_AGAIN}")
