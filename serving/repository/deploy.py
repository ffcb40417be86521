# SPDX-License-Identifier: Apache-2.0
"""An artefact folder to a model repository: one folder that a Triton server loads."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.export.artefact.frontier import FILE_NAME as FRONTIER
from saccade.export.artefact.frontier import Entry
from saccade.export.artefact.manifest import read_folder
from saccade.export.artefact.variant_files import VariantParts, grouped
from saccade.export.graph.trial import refuse_untried
from saccade.files import json_bytes, new_folder, refuse_existing
from saccade.models.preprocessing import Preprocessing
from saccade.serving.client.zero_shot import Labelling, class_vectors, read_labelling
from saccade.serving.repository.checks import check_alike, chosen, measurements
from saccade.serving.repository.components import PartPlan, op_library, write_part
from saccade.serving.repository.description import DESCRIPTION, Deployment, description
from saccade.serving.repository.image_caps import absurd_caps
from saccade.serving.repository.model_config import MAX_BATCH
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.plans import Plans, check_batches, read_plans
from saccade.serving.repository.preflight.examine import broken_rules
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.router_folder import RouterPlan, write_router
from saccade.serving.repository.stored_sample import samples

DEFAULT_RUN_BATCH = 8


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
    (partial / DESCRIPTION).write_bytes(
        json_bytes(description(partial, deployment, router.preprocessing))
    )
    _hold_to_rules(partial)
    return deployment


def _hold_to_rules(folder: Path) -> None:
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
