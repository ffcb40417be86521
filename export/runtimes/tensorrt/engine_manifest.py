# SPDX-License-Identifier: Apache-2.0
"""The JSON next to each plan: what it was built from, with what, for which GPU and shapes."""

import hashlib
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from saccade.core.errors import SaccadeError
from saccade.core.files import check_digest, json_bytes, read_regular, write_atomically
from saccade.exporter.artefact.manifest import (
    FILE_NAME,
    SUFFIX,
    FileEntry,
    ParentEntry,
    VariantEntry,
)
from saccade.exporter.artefact.manifest_checks import (
    odd_hashes,
    odd_tensors,
    read_stored,
    unequal,
)
from saccade.exporter.artefact.variant import variant_name
from saccade.models.interface import TensorSpec

SCHEMA = "saccade.engine"
VERSION = 1
PLAN_SUFFIX = ".plan"
Engine = Literal["tensorrt", "tensorrt-rtx"]
BUILD = "saccade build ARTEFACT"
AGAIN = f"Write it again with: {BUILD}"
_CAPABILITY = re.compile(r"[1-9][0-9]?\.[0-9]")

Profile = dict[str, tuple[int, ...]]  # min, opt, max -> the shape


@dataclass(frozen=True)
class EngineManifest:
    """Everything that later stages know about a plan without opening it.

    Units: build_seconds is the time of the build only, on the machine that built it.
    """

    variant: VariantEntry
    file: FileEntry
    parent: ParentEntry  # the ONNX file
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    engine: Engine
    version: str
    compute_capabilities: tuple[str, ...]
    driver: str | None  # of the machine that built it; None without a GPU
    profiles: dict[str, Profile]  # by input
    options: dict[str, Any]
    timing_cache_sha256: str | None
    plugins: dict[str, str]  # library -> SHA-256
    layer_types: dict[str, int]  # precision -> matrix layers of the parsed network
    build_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, including schema and version."""
        return {"schema": SCHEMA, "version": VERSION} | {"engine": asdict(self)}


@dataclass(frozen=True)
class _Content:
    engine: EngineManifest


def write_engine_manifest(folder: Path, manifest: EngineManifest) -> Path:
    """Write `<variant>.manifest.json` into the folder; equal content gives equal bytes."""
    path = folder / (manifest.variant.name + SUFFIX)
    write_atomically(path, json_bytes(manifest.to_dict()))
    return path


def read_engine_manifest(path: Path, name: str | None = None) -> EngineManifest:
    """Read a plan's manifest and check every key, type and name.

    Raises: SaccadeError for a missing or foreign file, a link, an unknown version, an unknown or
        missing key, a wrong type, and a name that contradicts another or leaves the folder.
    """
    _refuse_link(path)
    return read_stored(
        path,
        _Content,
        SCHEMA,
        VERSION,
        problems=lambda content: _contradictions(content.engine, name or path.name),
        command=BUILD,
    ).engine


def read_engines(folder: Path) -> list[EngineManifest]:
    """Read the manifests of a folder of engines, sorted by name, and check each plan's hash.

    Raises: SaccadeError if there is none, a plan lacks its manifest, and for what
        `read_engine_manifest` and `plan_bytes` refuse.
    """
    if not folder.is_dir():
        raise SaccadeError(f"{folder}: no such folder. Create it with: saccade build ARTEFACT")
    manifests = [read_engine_manifest(path) for path in sorted(folder.glob("*" + SUFFIX))]
    if not manifests:
        raise SaccadeError(f"{folder}: no {SUFFIX} in it. Create it with: saccade build ARTEFACT")
    known = {manifest.file.name for manifest in manifests}
    for plan in sorted(folder.glob("*" + PLAN_SUFFIX)):
        if plan.name not in known:
            raise _unknown_plan(plan)
    for manifest in manifests:
        plan_bytes(folder / manifest.file.name, manifest)
    return manifests


def manifest_of(plan: Path) -> EngineManifest:
    """Read the manifest next to a plan.

    Raises: SaccadeError if there is none, and for what `read_engine_manifest` refuses.
    """
    _refuse_link(plan)
    path = plan.with_name(plan.name.removesuffix(PLAN_SUFFIX) + SUFFIX)
    if plan.suffix != PLAN_SUFFIX or not path.exists():
        raise _unknown_plan(plan)
    manifest = read_engine_manifest(path)
    if manifest.file.name != plan.name:
        raise SaccadeError(f"{path}: is the manifest of {manifest.file.name!r}. {AGAIN}")
    return manifest


def plan_bytes(path: Path, manifest: EngineManifest) -> bytes:
    """Read a plan once and compare it with its manifest's hash.

    Raises: SaccadeError if it is missing, a link, or has other bytes.
    """
    _refuse_link(path)
    if path.stat().st_size != manifest.file.bytes:
        raise SaccadeError(
            f"{path}: has {path.stat().st_size} bytes, its manifest has {manifest.file.bytes}. "
            f"A plan is executable code: it is not loaded. {AGAIN}"
        )
    data = read_regular(path, manifest.file.bytes)
    refused = f"A plan is executable code: it is not loaded. {AGAIN}"
    digest = hashlib.sha256(data).hexdigest()
    check_digest(path, digest, manifest.file.sha256, "in its manifest", refused)
    return data


def _unknown_plan(plan: Path) -> SaccadeError:
    return SaccadeError(
        f"{plan}: has no manifest with its hash. A plan is executable code, and only plans "
        f"that saccade built are loaded. {AGAIN}"
    )


def _refuse_link(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise SaccadeError(f"{path}: cannot be read ({error.strerror}). {AGAIN}") from error
    if not stat.S_ISREG(mode):
        raise SaccadeError(
            f"{path}: is a link or not a regular file, expected the file itself. {AGAIN}"
        )


def _contradictions(manifest: EngineManifest, stored_as: str) -> Iterator[str]:
    entry = manifest.variant
    name = variant_name(entry.model, entry.role, entry.setting, entry.precision)
    yield from unequal(
        (
            (entry.name, name, "variant name"),
            (stored_as, name + SUFFIX, "file name of the manifest"),
            (manifest.file.name, name + PLAN_SUFFIX, "plan's name"),
            (manifest.parent.name, f"{name}.onnx", "parent's name"),
        )
    )
    for library in manifest.plugins:
        if not FILE_NAME.fullmatch(library):
            yield f"plugin {library!r} is not a plain file name"
    cache = manifest.timing_cache_sha256
    digests = (manifest.file.sha256, manifest.parent.sha256, *manifest.plugins.values())
    yield from odd_hashes((*digests, *(() if cache is None else (cache,))))
    capabilities = manifest.compute_capabilities
    if not capabilities or not all(map(_CAPABILITY.fullmatch, capabilities)):
        yield f"compute capabilities are {list(capabilities)}, expected one or more such as 8.9"
    yield from odd_tensors(manifest.inputs, manifest.outputs)
    specs = {spec.name: spec for spec in manifest.inputs}
    if set(manifest.profiles) != set(specs):
        yield f"profiles are of {sorted(manifest.profiles)}, inputs are {sorted(specs)}"
    for name, profile in manifest.profiles.items():
        shapes = [profile.get(key, ()) for key in ("min", "opt", "max")]
        fits = len(profile) == 3 and all(len(shape) == len(specs[name].shape) for shape in shapes)
        if not fits or not all(0 < a <= b <= c for a, b, c in zip(*shapes, strict=True)):
            yield f"profile of {name!r} is {profile}, which is not a range"
