# SPDX-License-Identifier: Apache-2.0
"""The folder of one part in a repository: its file or plans, configuration, labels, sample."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.export.artefact.manifest import SUFFIX, Manifest
from saccade.export.artefact.variant_files import VariantParts
from saccade.files import json_bytes, sha256_of
from saccade.serving.repository.model_config import (
    MAX_BATCH,
    MODEL_FILE,
    OP_LIBRARY_FILE,
    Served,
    variant_config,
)
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.plans import Plan, engine_file, plan_file
from saccade.serving.repository.router_folder import write_labels
from saccade.serving.repository.stored_sample import Sample, write_sample


@dataclass(frozen=True)
class PartPlan:
    """Everything that is decided about a part before its folder is written."""

    manifest: Manifest
    run_batch: int
    sample: Sample
    options: RepositoryOptions
    library: Path | None = None  # kernels of the custom ops that the file calls
    plans: tuple[Plan, ...] = ()

    @property
    def name(self) -> str:
        """Of the part, its file and its folder."""
        return self.manifest.variant.name


def write_part(folder: Path, place: Path, part: PartPlan) -> None:
    """Write the folder of a part of a variant from the artefact folder.

    Raises: SaccadeError if a file changes while it is copied.
    """
    manifest = part.manifest
    (place / "1").mkdir(parents=True)
    if part.plans:
        _copy_plans(place, part.plans)
    else:
        source = folder / manifest.file.name
        _copy(source, place / "1" / MODEL_FILE, manifest.file.sha256)
        if part.library:
            shutil.copyfile(part.library, place / "1" / OP_LIBRARY_FILE)
    # What it is, for whoever has the repository but not the artefact folder.
    (place / (part.name + SUFFIX)).write_bytes(json_bytes(manifest.to_dict()))
    served = Served(
        options=part.options,
        op_library=part.library is not None,
        plans={each.capability: plan_file(each.capability, part.plans) for each in part.plans},
        max_batch=min([MAX_BATCH, *(each.max_batch for each in part.plans)]),
        sample=part.sample.shapes,
    )
    config = variant_config(
        manifest, run_batch=part.run_batch, served=served, labelled=bool(manifest.labels)
    )
    (place / "config.pbtxt").write_text(config, "utf-8")
    write_labels(place, manifest.labels)
    write_sample(place, part.sample)


def op_library(variants: Sequence[VariantParts]) -> Path:
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
    return library


def _copy_plans(place: Path, plans: Sequence[Plan]) -> None:
    for plan in plans:
        source = plan.folder / plan.engine.file.name
        target = place / "1" / plan_file(plan.capability, plans)
        _copy(source, target, plan.engine.file.sha256)
        (place / engine_file(plan.capability)).write_bytes(json_bytes(plan.engine.to_dict()))


def _copy(source: Path, target: Path, sha256: str) -> None:
    if sha256_of(shutil.copyfile(source, target)) != sha256:
        raise SaccadeError(f"{source}: changed while it was copied. Run again.")
