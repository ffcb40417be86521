# SPDX-License-Identifier: Apache-2.0
"""What has to hold before one router can stand before an artefact folder's variants."""

from collections.abc import Sequence
from pathlib import Path

from saccade.export.manifest import Manifest
from saccade.models.interface import TensorSpec
from saccade.plugins.errors import SaccadeError
from saccade.serving.frontier import FILE_NAME as FRONTIER
from saccade.serving.frontier import Entry, Frontier, read_frontier
from saccade.serving.machine import this_machine
from saccade.serving.variant_parts import VariantParts

OPSET, IR_VERSION = 20, 10


def check_alike(folder: Path, variants: Sequence[VariantParts]) -> None:
    """All variants take the same and answer the same kind of thing.

    Raises: SaccadeError naming the two that differ, and in what.
    """
    first = variants[0]
    for variant in variants:
        if set(variant.parts) != set(first.parts):
            raise SaccadeError(
                f"{folder}: {variant.name} has the parts {_roles(variant)}, {first.name} has "
                f"{_roles(first)}. Export them together."
            )
        for role, manifest in variant.parts.items():
            _check_format(manifest)
            _check_same(folder, manifest, first.parts[role])


def join(specs: Sequence[TensorSpec], where: str) -> TensorSpec:
    """One tensor for several of the same name: an axis in which they differ becomes a word.

    Raises: SaccadeError if they differ in type or number of axes.
    """
    first = specs[0]
    axes = [list(spec.axes.split()) for spec in specs]
    if len({(spec.dtype, len(own)) for spec, own in zip(specs, axes, strict=True)}) > 1:
        found = ", ".join(sorted({f"{spec.dtype} [{spec.axes}]" for spec in specs}))
        raise SaccadeError(
            f"{where}: {first.name} is {found}, so that one router cannot answer with it. "
            "Export them together."
        )
    joined = [
        column[0] if len(set(column)) == 1 else f"{first.name}_{index}"
        for index, column in enumerate(zip(*axes, strict=True))
    ]
    return TensorSpec(first.name, " ".join(joined), first.dtype)


def measurements(
    folder: Path, variants: Sequence[VariantParts], device: str | None
) -> dict[str, Entry]:
    """By variant, the figures of one device and runtime; empty where nothing was measured.

    Raises: SaccadeError if other bytes were measured, or several devices.
    """
    path = folder / FRONTIER
    if not path.exists():
        return {}
    frontier = read_frontier(path)
    if not frontier.entries:
        return {}
    hashes = {variant.name: variant.sha256 for variant in variants}
    for entry in frontier.entries:
        found = hashes.get(entry.variant, "no such variant")
        if found != entry.sha256:
            raise SaccadeError(
                f"{path}: measured {entry.variant} with SHA-256 {entry.sha256[:12]}..., but the "
                f"folder has {found[:15]}. Measure again "
                f"with `saccade bench {folder}`, or remove the file to route by budget only."
            )
    place = _place(path, frontier, device)
    return {each.variant: each for each in frontier.entries if (each.device, each.runtime) == place}


def _place(path: Path, frontier: Frontier, device: str | None) -> tuple[str, str]:
    """The device and runtime whose figures count: the only one, the named one, or this machine."""
    places = sorted({(entry.device, entry.runtime) for entry in frontier.entries})
    known = "; ".join(f"{name} ({runtime})" for name, runtime in places) or "none"
    if device is not None:
        places = [place for place in places if place[0] == device]
    elif len(places) > 1:
        here = this_machine()
        places = [place for place in places if place == (here.device, here.runtime)]
    if len(places) != 1:
        raise SaccadeError(
            f"{path}: has figures of {known}; expected those of one device and runtime, "
            f"{'this machine' if device is None else repr(device)}. Name the device with "
            "--device, or measure here with: saccade bench"
        )
    return places[0]


def _check_format(manifest: Manifest) -> None:
    name = manifest.variant.name
    if (manifest.opset, manifest.ir_version) != (OPSET, IR_VERSION):
        raise SaccadeError(
            f"{name}: opset {manifest.opset}, IR version {manifest.ir_version}; both "
            f"servers read opset {OPSET}, IR version {IR_VERSION}. Export again."
        )
    if bad := [label for label in manifest.labels if "\n" in label or not label]:
        raise SaccadeError(f"{name}: label {bad[0]!r} does not fit on a line of its own.")


def _check_same(folder: Path, manifest: Manifest, first: Manifest) -> None:
    differing = [
        field
        for field in ("inputs", "preprocessing", "labels")
        if getattr(manifest, field) != getattr(first, field)
    ]
    if [each.name for each in manifest.outputs] != [each.name for each in first.outputs]:
        differing.append("outputs")
    if differing:
        raise SaccadeError(
            f"{folder}: {manifest.variant.name} and {first.variant.name} differ in "
            f"{differing[0]}, so that one router cannot stand before both. Export them together."
        )


def _roles(variant: VariantParts) -> str:
    return ", ".join(repr(role) for role in variant.parts)
