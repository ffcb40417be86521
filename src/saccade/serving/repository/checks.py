# SPDX-License-Identifier: Apache-2.0
"""Checks that hold before one router can stand before an artefact folder's variants."""

import re
from collections.abc import Sequence
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import Entry, Frontier, with_ops
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.machine import this_machine
from saccade.models.interface import TensorSpec
from saccade.plugins.execution import OPS, Ops
from saccade.serving.repository.runtimes.registry import served_runtime

_TENSOR = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def check_alike(folder: ArtefactFolder, runtime: str = DEFAULT) -> None:
    """All variants take the same and answer the same kind of thing, in what the runtime reads.

    Raises: SaccadeError naming the two that differ, and in what.
    """
    first, served = folder.variants[0], served_runtime(runtime)
    for variant in folder.variants:
        if set(variant.components) != set(first.components):
            raise SaccadeError(
                f"{folder}: {variant.name} has the components {_roles(variant)}, {first.name} has "
                f"{_roles(first)}. Export them together."
            )
        for role, manifest in variant.components.items():
            _check_labels(manifest)
            served.check_manifest(manifest)
            if differing := _difference(manifest, first.components[role]):
                raise SaccadeError(
                    f"{folder}: {manifest.variant.name} and {first.components[role].variant.name} "
                    f"differ in {differing}, so that one router cannot stand before both. Export "
                    "them together."
                )
            _check_tensor_names(manifest)


def chosen(folder: ArtefactFolder, precisions: Sequence[str], runtime: str) -> ArtefactFolder:
    """The folder with the variants of these precisions, of all where none is named.

    Raises: SaccadeError if the folder has none of one, or the runtime cannot run one.
    """
    there = sorted({variant.main.variant.precision for variant in folder.variants})
    if missing := sorted(set(precisions) - set(there)):
        raise SaccadeError(
            f"{folder}: has no variant in {missing[0]}, only in {', '.join(there)}. Name one of "
            f"these, or export it with: saccade export CHECKPOINT --precision {missing[0]}"
        )
    wanted = [precision for precision in there if not precisions or precision in precisions]
    runs = runtime_named(runtime)
    if refused := [precision for precision in wanted if precision not in runs.precisions]:
        rest = [precision for precision in wanted if precision in runs.precisions] or ["fp32"]
        raise SaccadeError(
            f"{folder}: has variants in {refused[0]}, which {runs.title} {runs.refusal}. Leave "
            f"them out with --precisions {','.join(rest)}, or serve plans of them."
        )
    kept = [variant for variant in folder.variants if variant.main.variant.precision in wanted]
    return folder.only(kept) if len(kept) < len(folder.variants) else folder


def join(specs: Sequence[TensorSpec], where: str) -> TensorSpec:
    """One tensor for several of the same name: an axis in which they differ becomes a word.

    Raises: SaccadeError if they differ in type or number of axes.
    """
    first = specs[0]
    axes = [list(spec.axes.split()) for spec in specs]
    if len({(spec.dtype, len(own)) for spec, own in zip(specs, axes, strict=True)}) > 1:
        kinds = ", ".join(sorted({f"{spec.dtype} [{spec.axes}]" for spec in specs}))
        raise SaccadeError(
            f"{where}: {first.name} is {kinds}, so that one router cannot answer with it. "
            "Export them together."
        )
    joined = [
        column[0] if len(set(column)) == 1 else f"{first.name}_{index}"
        for index, column in enumerate(zip(*axes, strict=True))
    ]
    return TensorSpec(first.name, " ".join(joined), first.dtype)


def measurements(
    folder: ArtefactFolder, device: str | None, runtime: str = DEFAULT, ops: Ops = None
) -> dict[str, Entry]:
    """By variant, the figures of one device and version of the runtime; empty where there are none.

    Figures of custom ops count if these ran as `ops` says: nobody routes kernels by figures of
    bodies. Where it says nothing, those by kernels count, or else those by bodies.

    Raises: SaccadeError if other bytes were measured, or several devices.
    """
    frontier, path = folder.frontier, folder.path / FRONTIER
    if frontier is None or not frontier.entries:
        return {}
    known = {variant.name: variant for variant in folder.variants}
    for entry in frontier.entries:
        variant = known.get(entry.variant)
        digest = variant.sha256 if variant else "no such variant"
        if digest != entry.sha256:
            raise SaccadeError(
                f"{path}: measured {entry.variant} with SHA-256 {entry.sha256[:12]}..., but the "
                f"folder has {digest[:15]}. Measure again "
                f"with `saccade bench {folder}`, or remove the file to route by budget only."
            )
    place = _place(path, frontier, device, runtime)
    entries = [
        with_ops(entry, known[entry.variant])
        for entry in frontier.entries
        if (entry.device, entry.runtime) == place
    ]
    there = {entry.ops for entry in entries}
    counted = ops or next((kind for kind in OPS if kind in there), None)
    return {entry.variant: entry for entry in entries if entry.ops in (None, counted)}


def _place(
    path: Path, frontier: Frontier, device: str | None, runtime: str
) -> tuple[str, str] | None:
    """The device and runtime whose figures count: the only one, the named one, or this machine.

    None where the runtime was measured nowhere.
    """
    every = sorted({(entry.device, entry.runtime) for entry in frontier.entries})
    # The names go on with a version: `onnxruntime 1.31.1 CPU`, `tensorrt 10.16`.
    places = [place for place in every if place[1].split()[0] == runtime]
    if device is None and not places:
        return None
    known = "; ".join(f"{name} ({runtime})" for name, runtime in places) or "none"
    if device is not None:
        places = [place for place in places if place[0] == device]
    elif len(places) > 1:
        here = this_machine(runtime_named(runtime).label())
        places = [place for place in places if place == (here.device, here.runtime)]
    if len(places) != 1:
        raise SaccadeError(
            f"{path}: has figures of {known}; expected those of one device and runtime, "
            f"{'this machine' if device is None else repr(device)}. Name the device with "
            "--device, or measure here with: saccade bench"
        )
    return places[0]


def _check_labels(manifest: Manifest) -> None:
    # What reads the labels may take another sign for the end of a line than the line feed.
    if bad := [label for label in manifest.labels if label.splitlines() != [label]]:
        raise SaccadeError(
            f"{manifest.variant.name}: label {bad[0]!r} does not fit on a line of its own."
        )


def _check_tensor_names(manifest: Manifest) -> None:
    for spec in (*manifest.inputs, *manifest.outputs):
        # An input's name is also that of the file with which the server warms up.
        if not _TENSOR.fullmatch(spec.name):
            raise SaccadeError(
                f"{manifest.variant.name}: tensor {spec.name!r:.80} has a name that is not a word "
                "of letters, digits and _. Export again."
            )


def _difference(one: Manifest, other: Manifest) -> str | None:
    """The first thing in which two files differ for who stands before them."""
    for field in ("inputs", "preprocessing", "labels"):
        if getattr(one, field) != getattr(other, field):
            return field
    same = [value.name for value in one.outputs] == [value.name for value in other.outputs]
    return None if same else "outputs"


def _roles(variant: VariantFiles) -> str:
    return ", ".join(repr(role) for role in variant.components)
