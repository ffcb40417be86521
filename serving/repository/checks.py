# SPDX-License-Identifier: Apache-2.0
"""Check that one router can serve all variants of an artefact folder."""

import re
from collections.abc import Sequence
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.machine import this_machine
from saccade.core.schema import GROUP_AGAIN
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import Frontier, FrontierEntry
from saccade.exporter.artefact.manifest import Manifest, VariantFiles, encoded
from saccade.exporter.artefact.precedence import chosen_place, runtime_name
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.models.interface import TensorSpec
from saccade.plugins.contract import OPS, Ops
from saccade.serving.repository.runtimes.registry import served_runtime

_TENSOR = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def check_alike(folder: ArtefactFolder, runtime: str = DEFAULT) -> None:
    """Check that all variants have the same inputs and outputs, in a format the runtime reads.

    Raises: SaccadeError that names the two variants that differ, and the difference.
    """
    first, served = folder.variants[0], served_runtime(runtime)
    if all(variant.main.step_only for variant in folder.variants):
        raise SaccadeError(
            f"{folder}: every variant is only a step of policies (--as-step), expected one that "
            "answers. Export the checkpoint with fp32 too, or group it with others."
        )
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
                    f"differ in {differing}, so one router cannot serve both. "
                    f"{GROUP_AGAIN if first.in_group else 'Export them together.'}"
                )
            _check_tensor_names(manifest)


def chosen(folder: ArtefactFolder, precisions: Sequence[str], runtime: str) -> ArtefactFolder:
    """Return the folder with only the variants of these precisions; with all if none is named.

    Raises: SaccadeError if the folder lacks a precision, or the runtime cannot run one.
    """
    there = sorted({variant.main.variant.precision for variant in folder.variants})
    if missing := sorted(set(precisions) - set(there)):
        raise SaccadeError(
            f"{folder}: has no variant in {missing[0]}, only in {', '.join(there)}. Choose one of "
            f"these, or export one with: saccade export CHECKPOINT --precision {missing[0]}"
        )
    wanted = [precision for precision in there if not precisions or precision in precisions]
    runs = runtime_named(runtime)
    if refused := [precision for precision in wanted if precision not in runs.precisions]:
        rest = [precision for precision in wanted if precision in runs.precisions] or ["fp32"]
        raise SaccadeError(
            f"{folder}: has variants in {refused[0]}, which {runs.title} {runs.refusal}. Leave "
            f"them out with --precisions {','.join(rest)}, or serve them as plans of TensorRT."
        )
    kept = [variant for variant in folder.variants if variant.main.variant.precision in wanted]
    return folder.only(kept) if len(kept) < len(folder.variants) else folder


def join(specs: Sequence[TensorSpec], where: str) -> TensorSpec:
    """Return one tensor for several of the same name: an axis in which they differ gets a name.

    Raises: SaccadeError if they differ in type or number of axes.
    """
    first = specs[0]
    axes = [list(spec.axes.split()) for spec in specs]
    if len({(spec.dtype, len(own)) for spec, own in zip(specs, axes, strict=True)}) > 1:
        kinds = ", ".join(sorted({f"{spec.dtype} [{spec.axes}]" for spec in specs}))
        raise SaccadeError(
            f"{where}: {first.name} is {kinds}, so one router cannot return it for all variants. "
            "Export them together."
        )
    joined = [
        column[0] if len(set(column)) == 1 else f"{first.name}_{index}"
        for index, column in enumerate(zip(*axes, strict=True))
    ]
    return TensorSpec(first.name, " ".join(joined), first.dtype)


def measurements(
    folder: ArtefactFolder, device: str | None, runtime: str = DEFAULT, ops: Ops = None
) -> dict[str, FrontierEntry]:
    """Return the measurements of one device and runtime version by variant; empty without any.

    Measurements of custom ops count only if the ops ran as `ops` says, since figures of function
    bodies say nothing about kernels. If `ops` is None, those with kernels count, or else those with
    bodies.

    Raises: SaccadeError if the measured files differ, or several devices were measured.
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
                f"{path}: has measurements of {entry.variant} with SHA-256 "
                f"{entry.sha256[:12]}..., but the folder has {digest[:15]}. Measure again with "
                f"`saccade bench {folder} --out REPORT`, or remove the file to route by budget "
                "only."
            )
    place = _place(path, frontier, device, runtime)
    entries = [entry for entry in frontier.entries if (entry.device, entry.runtime) == place]
    there = {entry.ops for entry in entries if entry.ops}
    if ops and there and ops not in there:
        note(
            f"{path}: was measured with custom ops run by {there.pop()}, but the repository runs "
            f"them by {ops}. The router chooses among these variants by budget only. To measure "
            f"them again, run: saccade bench {folder} --out REPORT"
        )
    counted = ops or next((kind for kind in OPS if kind in there), None)
    return {entry.variant: entry for entry in entries if entry.ops in (None, counted)}


def _place(
    path: Path, frontier: Frontier, device: str | None, runtime: str
) -> tuple[str, str] | None:
    """Return the device and runtime whose figures count: the only, the named, or this machine's.

    None if there are no figures of the runtime.
    """
    every = sorted({(entry.device, entry.runtime) for entry in frontier.entries})
    places = [place for place in every if runtime_name(place[1]) == runtime]
    if device is None and len(places) <= 1:
        return places[0] if places else None
    here = this_machine(runtime_named(runtime).label())
    if place := chosen_place(places, device, (here.device, here.runtime)):
        return place
    known = "; ".join(f"{name} ({runtime})" for name, runtime in places) or "none"
    raise SaccadeError(
        f"{path}: has figures of {known}, expected one device, "
        f"{'this machine' if device is None else repr(device)}. Name the device with "
        "--device, or measure here with: saccade bench"
    )


def _check_labels(manifest: Manifest) -> None:
    # Readers of the labels may treat other characters than the line feed as the end of a line.
    if bad := [label for label in manifest.labels if label.splitlines() != [label]]:
        raise SaccadeError(
            f"{manifest.variant.name}: label {bad[0]!r} is empty or has a line break, expected one "
            "line of text. Export again with other labels."
        )


def _check_tensor_names(manifest: Manifest) -> None:
    for spec in (*manifest.inputs, *manifest.outputs):
        # An input's name is also the name of its warm-up file.
        if not _TENSOR.fullmatch(spec.name):
            raise SaccadeError(
                f"{manifest.variant.name}: tensor {spec.name!r:.80} has an invalid name, expected "
                "a letter and then at most 63 letters, digits and underscores. Export again."
            )


def _difference(one: Manifest, other: Manifest) -> str | None:
    """Return the first field in which two manifests differ for a router, or None.

    The router decodes images for each variant. It also brings the labels of a group's members into
    one order, and answers with the outputs that they share.
    """
    if _taken(one) != _taken(other):
        return "inputs"
    if sorted(one.labels) != sorted(other.labels):
        return "labels"
    same = [value.name for value in one.outputs] == [value.name for value in other.outputs]
    return None if same or one.member else "outputs"


def _taken(manifest: Manifest) -> list[TensorSpec | str]:
    """Return the inputs; of those that arrive as image files, only the name."""
    files = encoded(manifest)
    return [spec.name if spec.name in files else spec for spec in manifest.inputs]


def shared_outputs(manifests: Sequence[Manifest], where: str) -> tuple[TensorSpec, ...]:
    """Return the outputs that a component has in every variant.

    Members of a group may each have others, or others of the same name.

    Raises: SaccadeError as `join` does, for variants of one checkpoint.
    """
    kinds = [
        {spec.name: (spec.dtype, len(spec.shape)) for spec in one.outputs} for one in manifests
    ]
    return tuple(
        join([spec for one in manifests for spec in one.outputs if spec.name == name], where)
        for name, kind in kinds[0].items()
        if manifests[0].member is None or all(own.get(name) == kind for own in kinds)
    )


def _roles(variant: VariantFiles) -> str:
    return ", ".join(repr(role) for role in variant.components)
