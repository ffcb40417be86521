# SPDX-License-Identifier: Apache-2.0
"""An artefact folder to a model repository: one folder that a Triton server loads."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.export.manifest import Manifest, read_folder
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.errors import SaccadeError
from saccade.plugins.files import json_bytes, new_folder, refuse_existing, sha256_of
from saccade.plugins.path_fields import PathFields
from saccade.serving.frontier import FILE_NAME as FRONTIER
from saccade.serving.frontier import Entry
from saccade.serving.model_config import MAX_BATCH, MODEL_FILE, variant_config
from saccade.serving.repository_checks import check_alike, measurements
from saccade.serving.router_folder import RouterPlan, write_labels, write_router
from saccade.serving.variant_parts import VariantParts, grouped
from saccade.serving.zero_shot import Labelling, class_vectors, read_labelling

SCHEMA = "saccade.repository"
VERSION = 1
DEFAULT_RUN_BATCH = 8
DESCRIPTION = "saccade.json"
_AGAIN = "Write it again with: saccade repository FOLDER --out REPOSITORY --force"


@dataclass(frozen=True)
class RepositoryOptions(PathFields):
    """Where the repository goes, and which images its router refuses."""

    out: Path  # folder to write
    force: bool = False  # replace what stands there
    run_batch: int | None = None  # images in one run; default: as measured, else 8
    device: str | None = None  # whose measurements to route by, if the frontier has several
    max_image_mib: int | None = None  # cap on an encoded image; default: as in the checkpoint
    max_megapixels: int | None = None  # cap on width times height
    max_side_px: int | None = None  # cap on either side
    max_images: int | None = None  # cap on the images of one request, at most 64
    labels: Path | None = None  # zero-shot: a text file with a label a line
    templates: Path | None = None  # with --labels: a line a prompt, with {} for the label
    op_library: bool = False  # custom ops by our library's kernels, not by their function bodies


@dataclass(frozen=True)
class Deployment:
    """A folder that a server loads, and what it serves."""

    folder: Path
    model: str
    variants: tuple[str, ...]  # models behind the router; of a model of two parts, two a variant
    unmeasured: tuple[str, ...]  # variants that min_score and max_latency_ms can never choose

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "folder": str(self.folder),
            "model": self.model,
            "variants": list(self.variants),
            "unmeasured": list(self.unmeasured),
        }


def deploy(folder: Path | str, options: RepositoryOptions) -> Deployment:
    """Write the repository of every variant in an artefact folder and of the router over them.

    Raises: SaccadeError if the output exists, an artefact does not fit its manifest, the
        frontier measured other bytes, or the variants cannot stand behind one router.
    """
    folder, out = Path(folder), options.out
    refuse_existing(out, force=options.force)
    labelling = read_labelling(options.labels, options.templates)
    variants = grouped(read_folder(folder))
    check_alike(folder, variants)
    plan = _plan(folder, variants, options, labelling)
    library = _op_library(variants) if options.op_library else ""
    with new_folder(out, force=options.force) as partial:
        for variant in variants:
            for manifest in variant.parts.values():
                _write_part(folder, manifest, partial, plan.run_batch[variant.name], library)
        write_router(partial / plan.model, plan)
        if plan.measured:
            shutil.copyfile(folder / FRONTIER, partial / FRONTIER)
        deployment = Deployment(
            folder=out,
            model=plan.model,
            variants=tuple(part.variant.name for v in variants for part in v.parts.values()),
            unmeasured=tuple(v.name for v in variants if v.name not in plan.measured),
        )
        (partial / DESCRIPTION).write_bytes(json_bytes(_description(partial, deployment, plan)))
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


def _plan(
    folder: Path,
    variants: tuple[VariantParts, ...],
    options: RepositoryOptions,
    labelling: Labelling | None,
) -> RouterPlan:
    declared = variants[0].preprocessing
    preprocessing = _caps(declared, options) if declared else None
    measured = measurements(folder, variants, options.device)
    return RouterPlan(
        model=variants[0].main.variant.model,
        variants=variants,
        preprocessing=preprocessing,
        labels=labelling.labels if labelling else variants[0].labels,
        classes=class_vectors(folder, variants, labelling) if labelling else {},
        measured=measured,
        run_batch={each.name: _run_batch(measured.get(each.name), options) for each in variants},
        max_images=preprocessing.max_images if preprocessing else options.max_images or MAX_BATCH,
    )


def _write_part(
    folder: Path, manifest: Manifest, partial: Path, run_batch: int, library: str
) -> None:
    place = partial / manifest.variant.name
    (place / "1").mkdir(parents=True)
    copy = shutil.copyfile(folder / manifest.file.name, place / "1" / MODEL_FILE)
    if sha256_of(copy) != manifest.file.sha256:
        raise SaccadeError(
            f"{folder / manifest.file.name}: changed while it was copied. Run again."
        )
    config = variant_config(
        manifest,
        run_batch=run_batch,
        op_library=library if manifest.custom_ops else "",
        labelled=bool(manifest.labels),
    )
    (place / "config.pbtxt").write_text(config, "utf-8")
    write_labels(place, manifest.labels)


def _op_library(variants: Sequence[VariantParts]) -> str:
    """The library of kernels, where a file names custom ops.

    Raises: SaccadeError if none does, or the library cannot be built here.
    """
    from saccade.plugins import onnxruntime_library

    if not any(part.custom_ops for variant in variants for part in variant.parts.values()):
        raise SaccadeError(
            f"--op-library: {variants[0].main.variant.model} has no custom op. Leave it out."
        )
    library = Path(onnxruntime_library()).resolve()
    if not library.is_file():
        raise SaccadeError(f"{library}: no such file. Build it with: saccade ops --build")
    return str(library)


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


def _description(partial: Path, deployment: Deployment, plan: RouterPlan) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": deployment.model,
        "variants": list(deployment.variants),
        "unmeasured": list(deployment.unmeasured),
        "preprocessing": plan.preprocessing.to_dict() if plan.preprocessing else None,
        "files": {
            path.relative_to(partial).as_posix(): sha256_of(path) for path in _files(partial)
        },
    }


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
