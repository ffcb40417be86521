# SPDX-License-Identifier: Apache-2.0
"""An artefact folder to a model repository: one folder that a Triton server loads."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.export.graph_trial import refuse_untried
from saccade.export.manifest import read_folder
from saccade.export.typed_json import AGAIN as EXPORT_AGAIN
from saccade.export.typed_json import typed
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.errors import SaccadeError
from saccade.plugins.files import json_bytes, new_folder, refuse_existing, sha256_of
from saccade.serving.frontier import FILE_NAME as FRONTIER
from saccade.serving.frontier import Entry
from saccade.serving.image_caps import absurd_caps
from saccade.serving.model_config import MAX_BATCH
from saccade.serving.plans import Plans, check_batches, read_plans
from saccade.serving.repository_checks import check_alike, chosen, measurements
from saccade.serving.repository_files import regular_files
from saccade.serving.repository_options import RUNTIMES, RepositoryOptions
from saccade.serving.repository_parts import PartPlan, op_library, write_part
from saccade.serving.router_folder import RouterPlan, write_router
from saccade.serving.stored_sample import samples
from saccade.serving.variant_parts import VariantParts, grouped
from saccade.serving.zero_shot import Labelling, class_vectors, read_labelling

__all__ = ["Deployment", "RepositoryOptions", "deploy", "read_repository"]

SCHEMA = "saccade.repository"
VERSION = 2
DEFAULT_RUN_BATCH = 8
DESCRIPTION = "saccade.json"
MAX_DESCRIPTION_BYTES = 16 << 20  # a hundred bytes a file: what is larger is no description
_AGAIN = "Write it again with: saccade repository FOLDER --out REPOSITORY --force"


@dataclass(frozen=True)
class Deployment:
    """A folder that a server loads, and what it serves."""

    folder: Path
    model: str
    variants: tuple[str, ...]  # models behind the router; of a model of two parts, two a variant
    unmeasured: tuple[str, ...]  # variants that min_score and max_latency_ms can never choose
    runtime: str = "onnxruntime"  # or tensorrt
    samples: tuple[str, ...] = ()  # variants that keep a sample with its answer

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "folder": str(self.folder),
            "model": self.model,
            "variants": list(self.variants),
            "unmeasured": list(self.unmeasured),
            "runtime": self.runtime,
            "samples": list(self.samples),
        }


def deploy(folder: Path | str, options: RepositoryOptions) -> Deployment:
    """Write the repository of every variant in an artefact folder and of the router over them.

    Raises: SaccadeError if the output exists, an artefact does not fit its manifest, a plan does
        not fit its artefact, the frontier measured other bytes, the variants cannot stand
        behind one router, or a server would not load what comes of them.
    """
    folder, out = Path(folder), options.out
    texts = [each for each in (options.labels, options.templates) if each is not None]
    inputs = [folder, *map(Path, options.engines), *texts]
    refuse_existing(out, force=options.force, inputs=inputs)
    labelling = read_labelling(options.labels, options.templates)
    manifests = read_folder(folder)
    refuse_untried(folder, manifests)
    every = grouped(manifests)
    variants = chosen(folder, every, options.precisions, options.runtime)
    check_alike(folder, variants, options.runtime)
    plans = read_plans(options.engines, variants) if options.engines else {}
    router = _router(folder, variants, options, labelling, plans)
    library = op_library(variants) if options.op_library else None
    kept = samples(folder, variants)
    parts = [
        PartPlan(
            manifest,
            run_batch=router.run_batch[variant.name],
            sample=kept[manifest.variant.name],
            options=options,
            library=library if manifest.custom_ops else None,
            plans=plans.get(manifest.variant.name, ()),
        )
        for variant in variants
        for manifest in variant.parts.values()
    ]
    try:
        with new_folder(out, force=options.force) as partial:
            return _write(folder, partial, parts, router)
    except OSError as error:
        raise SaccadeError(
            f"{out}: cannot be written ({error.strerror}). Make room, or choose another place "
            "with --out."
        ) from error


def _write(
    folder: Path, partial: Path, parts: Sequence[PartPlan], router: RouterPlan
) -> Deployment:
    for part in parts:
        write_part(folder, partial / part.name, part)
    write_router(partial / router.model, router)
    if router.measured:
        shutil.copyfile(folder / FRONTIER, partial / FRONTIER)
    deployment = Deployment(
        folder=parts[0].options.out,
        model=router.model,
        variants=tuple(part.name for part in parts),
        unmeasured=tuple(v.name for v in router.variants if v.name not in router.measured),
        runtime=parts[0].options.runtime,
        samples=tuple(part.name for part in parts if part.sample.answers),
    )
    (partial / DESCRIPTION).write_bytes(json_bytes(_description(partial, deployment, router)))
    _hold_to_rules(partial)
    return deployment


def read_repository(folder: Path) -> Deployment:
    """A repository that `deploy` wrote, if every file in it is still as it was written.

    Raises: SaccadeError for another folder, another version, a link, and a file that is missing,
        changed or not one of those written.
    """
    deployment, files = read_description(folder)
    present = regular_files(Path(folder))
    if odd := sorted(set(files) ^ (set(present) - {DESCRIPTION})):
        state = "is missing" if odd[0] in files else "was not written by saccade"
        raise SaccadeError(f"{Path(folder) / odd[0]}: {state}. {_AGAIN}")
    for name, digest in files.items():
        if sha256_of(present[name]) != digest:
            raise SaccadeError(f"{present[name]}: was changed after it was written. {_AGAIN}")
    return deployment


def read_description(folder: Path) -> tuple[Deployment, dict[str, str]]:
    """What a repository says it is, and the hash of each of its files; none of them is opened.

    Raises: SaccadeError for another folder and another version.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        state = f"holds no {DESCRIPTION}" if Path(folder).is_dir() else "is no folder"
        raise SaccadeError(
            f"{folder}: describes no model repository: it {state}. Write one with: saccade "
            "repository ARTEFACT --out REPOSITORY"
        )
    try:
        if (size := path.stat().st_size) > MAX_DESCRIPTION_BYTES:
            raise ValueError(f"has {size} bytes, expected at most {MAX_DESCRIPTION_BYTES}")
        content = json.loads(path.read_bytes())
        found = content["schema"], content["version"]
        if found != (SCHEMA, VERSION):
            raise ValueError(f"is {found}, expected {(SCHEMA, VERSION)}")
        files = typed(dict[str, str], content["files"], "files: ")
        model = typed(str, content["model"], "model: ")
        variants, unmeasured, kept = (
            typed(tuple[str, ...], content[key], f"{key}: ")
            for key in ("variants", "unmeasured", "samples")
        )
        if (runtime := content["runtime"]) not in RUNTIMES:
            raise ValueError(f"runtime is {runtime!r}, expected {' or '.join(RUNTIMES)}")
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SaccadeError
    ) as error:  # fmt: skip
        raise SaccadeError(
            f"{path}: describes no model repository ({_said(error)}). {_AGAIN}"
        ) from error
    return Deployment(Path(folder), model, variants, unmeasured, runtime, kept), files


def _said(error: Exception) -> str:
    # A KeyError says no more than a name.
    said = f"no {error}" if isinstance(error, KeyError) else str(error)
    return said.replace(f". {EXPORT_AGAIN}", "")


def _hold_to_rules(folder: Path) -> None:
    # Imported late: the checks read repositories by this file.
    from saccade.serving.preflight.examine import broken_rules
    from saccade.serving.preflight.target import Target

    if broken := broken_rules(folder, Target(bundled=False)):
        raise SaccadeError(f"A server would not load this repository: {broken[0]} Export again.")


def _router(
    folder: Path,
    variants: tuple[VariantParts, ...],
    options: RepositoryOptions,
    labelling: Labelling | None,
    plans: Plans,
) -> RouterPlan:
    declared = variants[0].preprocessing
    preprocessing = _caps(declared, options) if declared else None
    measured = measurements(folder, variants, options.device, options.runtime)
    max_images = preprocessing.max_images if preprocessing else options.max_images or MAX_BATCH
    check_batches(plans, max_images)
    return RouterPlan(
        model=variants[0].main.variant.model,
        variants=variants,
        preprocessing=preprocessing,
        labels=labelling.labels if labelling else variants[0].labels,
        classes=class_vectors(folder, variants, labelling) if labelling else {},
        measured=measured,
        run_batch={
            each.name: _run_batch(each, measured.get(each.name), options, plans)
            for each in variants
        },
        max_images=max_images,
    )


def _caps(declared: Preprocessing, options: RepositoryOptions) -> Preprocessing:
    names = ("max_image_mib", "max_megapixels", "max_side_px", "max_images", "min_side_px")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    caps = replace(declared, **given)
    if caps.max_images > MAX_BATCH:
        raise SaccadeError(
            f"max_images is {caps.max_images}, a variant takes at most {MAX_BATCH} at once. "
            "Pass a smaller --max-images; the client splits larger lists into requests."
        )
    if absurd := next(absurd_caps(caps), None):
        raise SaccadeError(f"{absurd}. Pass a smaller one to `saccade repository`.")
    return caps


def _run_batch(
    variant: VariantParts, entry: Entry | None, options: RepositoryOptions, plans: Plans
) -> int:
    own = [plan for part in variant.parts.values() for plan in plans.get(part.variant.name, ())]
    largest = min((plan.max_batch for plan in own), default=MAX_BATCH)
    usual = min((plan.usual_batch for plan in own), default=DEFAULT_RUN_BATCH)
    measured = entry.best_batch if entry else usual
    chosen = measured if options.run_batch is None else options.run_batch
    if not 1 <= chosen <= min(largest, MAX_BATCH):
        raise SaccadeError(
            f"run_batch is {chosen}, expected 1 to {min(largest, MAX_BATCH)} images."
        )
    return chosen


def _description(partial: Path, deployment: Deployment, plan: RouterPlan) -> dict[str, Any]:
    content = deployment.to_dict()
    del content["folder"]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        **content,
        "preprocessing": plan.preprocessing.to_dict() if plan.preprocessing else None,
        "files": {name: sha256_of(path) for name, path in sorted(regular_files(partial).items())},
    }
