# SPDX-License-Identifier: Apache-2.0
"""An artefact folder to a model repository: one folder that a Triton server loads."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from saccade.export.manifest import Manifest, read_folder
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.errors import SaccadeError
from saccade.plugins.files import json_bytes, new_folder, refuse_existing, sha256_of
from saccade.serving.frontier import FILE_NAME as FRONTIER
from saccade.serving.frontier import Entry, Frontier, read_frontier
from saccade.serving.machine import this_machine
from saccade.serving.model_config import (
    LABELS_FILE,
    MAX_BATCH,
    MODEL_FILE,
    router_config,
    variant_config,
)

SCHEMA = "saccade.repository"
VERSION = 1
OPSET, IR_VERSION = 20, 10
DEFAULT_RUN_BATCH = 8
DESCRIPTION = "saccade.json"
_AGAIN = "Write it again with: saccade repository FOLDER --out REPOSITORY --force"


@dataclass(frozen=True)
class RepositoryOptions:
    """Where the repository goes, and which images its router refuses."""

    out: Path  # folder to write
    force: bool = False  # replace what stands there
    run_batch: int | None = None  # images in one run; default: as measured, else 8
    device: str | None = None  # whose measurements to route by, if the frontier has several
    max_image_mib: int | None = None  # cap on an encoded image; default: as in the checkpoint
    max_megapixels: int | None = None  # cap on width times height
    max_side_px: int | None = None  # cap on either side
    max_images: int | None = None  # cap on the images of one request, at most 64


@dataclass(frozen=True)
class Deployment:
    """A folder that a server loads, and what it serves."""

    folder: Path
    model: str
    variants: tuple[str, ...]
    unmeasured: tuple[str, ...]  # variants that min_score and max_latency_ms can never choose

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "folder": str(self.folder),
            "model": self.model,
            "variants": list(self.variants),
            "unmeasured": list(self.unmeasured),
        }


def deploy(folder: Path, options: RepositoryOptions) -> Deployment:
    """Write the repository of every variant in an artefact folder and of the router over them.

    Raises: SaccadeError if the output exists, an artefact does not fit its manifest, the
        frontier measured other bytes, or the variants cannot stand behind one router.
    """
    folder, out = Path(folder), Path(options.out)
    refuse_existing(out, force=options.force)
    manifests = read_folder(folder)
    model = manifests[0].variant.model
    _check_alike(folder, manifests)
    preprocessing = _caps(manifests[0].preprocessing, options)
    measured = _measurements(folder, manifests, options.device)
    with new_folder(out, force=options.force) as partial:
        routes = []
        for manifest in manifests:
            entry = measured.get(manifest.variant.name)
            run_batch = _run_batch(entry, options)
            _write_variant(folder, manifest, partial, run_batch)
            routes.append(_route(manifest, entry, run_batch))
        _write_router(partial / model, manifests[0], preprocessing, routes)
        if measured:
            shutil.copyfile(folder / FRONTIER, partial / FRONTIER)
        names = tuple(manifest.variant.name for manifest in manifests)
        unmeasured = tuple(name for name in names if name not in measured)
        deployment = Deployment(out, model, names, unmeasured)
        (partial / DESCRIPTION).write_bytes(
            json_bytes(_description(partial, deployment, preprocessing))
        )
    return deployment


def read_repository(folder: Path) -> Deployment:
    """A repository that `deploy` wrote, if every file in it is still as it was written.

    Raises: SaccadeError for another folder, another version, and a file that is missing, changed
        or not one of those written.
    """
    path = Path(folder) / DESCRIPTION
    try:
        content = json.loads(path.read_bytes())
        found = content["schema"], content["version"]
        if found != (SCHEMA, VERSION):
            raise ValueError(f"is {found}, expected {(SCHEMA, VERSION)}")
        files = {str(name): str(digest) for name, digest in content["files"].items()}
        model, variants = str(content["model"]), tuple(map(str, content["variants"]))
        unmeasured = tuple(map(str, content["unmeasured"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SaccadeError(
            f"{path}: describes no model repository ({error!r}). {_AGAIN}"
        ) from error
    present = {each.relative_to(folder).as_posix(): each for each in _files(path.parent)}
    if odd := sorted(set(files) ^ (set(present) - {DESCRIPTION})):
        state = "is missing" if odd[0] in files else "was not written by saccade"
        raise SaccadeError(f"{Path(folder) / odd[0]}: {state}. {_AGAIN}")
    for name, digest in files.items():
        if sha256_of(present[name]) != digest:
            raise SaccadeError(f"{present[name]}: was changed after it was written. {_AGAIN}")
    return Deployment(Path(folder), model, variants, unmeasured)


def _write_variant(folder: Path, manifest: Manifest, partial: Path, run_batch: int) -> None:
    place = partial / manifest.variant.name
    (place / "1").mkdir(parents=True)
    copy = shutil.copyfile(folder / manifest.file.name, place / "1" / MODEL_FILE)
    if sha256_of(copy) != manifest.file.sha256:
        raise SaccadeError(
            f"{folder / manifest.file.name}: changed while it was copied. Run again."
        )
    (place / "config.pbtxt").write_text(variant_config(manifest, run_batch=run_batch), "utf-8")
    _write_labels(place, manifest)


def _write_router(
    place: Path, first: Manifest, preprocessing: Preprocessing, routes: list[dict[str, Any]]
) -> None:
    (place / "1").mkdir(parents=True)
    for source in (resources.files("saccade.model_repository") / "router").iterdir():
        if source.name.endswith(".py"):
            (place / "1" / source.name).write_bytes(source.read_bytes())
    content = {
        "schema": "saccade.routes",
        "version": 1,
        "model": place.name,
        "preprocessing": preprocessing.to_dict(),
        "outputs": [spec.name for spec in first.outputs],
        "variants": routes,
    }
    (place / "1" / "routes.json").write_bytes(json_bytes(content))
    names = [route["name"] for route in routes]
    config = router_config(place.name, first, variants=names, max_images=preprocessing.max_images)
    (place / "config.pbtxt").write_text(config, "utf-8")
    _write_labels(place, first)


def _route(manifest: Manifest, entry: Entry | None, run_batch: int) -> dict[str, Any]:
    return {
        "name": manifest.variant.name,
        "sha256": manifest.file.sha256,
        "budget": manifest.variant.budget,
        "precision": manifest.variant.precision,
        "multiply_adds": manifest.cost.multiply_adds.total,
        "run_batch": run_batch,
        "score_name": entry.score.name if entry else None,
        "score": entry.score.value if entry else None,
        "lower_bound": entry.score.interval[0] if entry else None,
        "inferences_per_second": entry.speed if entry else None,
        "p95_ms": entry.p95_ms if entry else None,
    }


def _write_labels(place: Path, manifest: Manifest) -> None:
    (place / LABELS_FILE).write_text("".join(f"{label}\n" for label in manifest.labels), "utf-8")


def _check_alike(folder: Path, manifests: Sequence[Manifest]) -> None:
    first = manifests[0]
    for manifest in manifests:
        name = manifest.variant.name
        if (manifest.opset, manifest.ir_version) != (OPSET, IR_VERSION):
            raise SaccadeError(
                f"{name}: opset {manifest.opset}, IR version {manifest.ir_version}; both "
                f"servers read opset {OPSET}, IR version {IR_VERSION}. Export again."
            )
        for field in ("inputs", "outputs", "preprocessing", "labels"):
            if getattr(manifest, field) != getattr(first, field):
                raise SaccadeError(
                    f"{folder}: {name} and {first.variant.name} differ in {field}, so that one "
                    "router cannot stand before both. Export them together."
                )
        if bad := [label for label in manifest.labels if "\n" in label or not label]:
            raise SaccadeError(f"{name}: label {bad[0]!r} does not fit on a line of its own.")


def _caps(declared: Preprocessing, options: RepositoryOptions) -> Preprocessing:
    names = ("max_image_mib", "max_megapixels", "max_side_px", "max_images")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    caps = replace(declared, **given)
    if caps.max_images > MAX_BATCH:
        raise SaccadeError(
            f"max_images is {caps.max_images}, a variant takes at most {MAX_BATCH} at once. "
            "Pass a smaller --max-images; the client splits larger lists into requests."
        )
    return caps


def _run_batch(entry: Entry | None, options: RepositoryOptions) -> int:
    measured = entry.best_batch if entry else DEFAULT_RUN_BATCH
    chosen = measured if options.run_batch is None else options.run_batch
    if not 1 <= chosen <= MAX_BATCH:
        raise SaccadeError(f"run_batch is {chosen}, expected 1 to {MAX_BATCH} images.")
    return chosen


def _measurements(
    folder: Path, manifests: Sequence[Manifest], device: str | None
) -> dict[str, Entry]:
    """By variant, the figures of one device and runtime; empty where nothing was measured."""
    path = folder / FRONTIER
    if not path.exists():
        return {}
    frontier = read_frontier(path)
    if not frontier.entries:
        return {}
    hashes = {each.variant.name: each.file.sha256 for each in manifests}
    for entry in frontier.entries:
        if hashes.get(entry.variant) != entry.sha256:
            raise SaccadeError(
                f"{path}: measured {entry.variant} with SHA-256 {entry.sha256[:12]}..., but the "
                f"folder has {hashes.get(entry.variant, 'no such variant')[:15]}. Measure again "
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


def _description(
    partial: Path, deployment: Deployment, preprocessing: Preprocessing
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": deployment.model,
        "variants": list(deployment.variants),
        "unmeasured": list(deployment.unmeasured),
        "preprocessing": preprocessing.to_dict(),
        "files": {
            path.relative_to(partial).as_posix(): sha256_of(path) for path in _files(partial)
        },
    }


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
