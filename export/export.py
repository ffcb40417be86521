# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint to a folder of ONNX files, one per variant, each checked by the gate."""

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError, require
from saccade.core.files import check_digest, new_folder, refuse_existing, sha256_of
from saccade.core.progress import Report, StepCounter, bar, progress_of, reporting
from saccade.core.resources import check_export
from saccade.exporter.artefact.manifest import Manifest, ParentEntry
from saccade.exporter.artefact.variant import (
    PRECISIONS,
    check_budgets,
    check_chosen,
    check_model_name,
    choose_budgets,
    default_model_name,
)
from saccade.exporter.component_files import Variant, copied_component, export_component
from saccade.exporter.export_options import ExportOptions
from saccade.exporter.gate.metrics import thresholds_of
from saccade.exporter.gate.reference import Reference
from saccade.exporter.gate.report import GateReport, VariantReport
from saccade.exporter.graph.samples import GateSizes
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.models.checkpoint import Checkpoint, load, weights_bytes
from saccade.models.checkpoint_folder import checkpoint_file
from saccade.models.checkpoint_format import Header, refuse_foreign
from saccade.models.data.calibration import check_calibrated, own_images, recalibrated
from saccade.models.data.options import loaded_once
from saccade.models.families import config_class
from saccade.models.interface import Family
from saccade.models.official.hub_folder import foreign_text
from saccade.models.preprocessing import Preprocessing
from saccade.models.sparo.select import selected_checkpoint


@dataclass(frozen=True)
class ExportedModel:
    """An exported artefact folder and the manifest of each file in it."""

    folder: Path
    manifests: tuple[Manifest, ...]

    @property
    def report(self) -> GateReport:
        """The gate's figures from the manifests."""
        rows = tuple(
            VariantReport.of(manifest.variant.name, manifest.parity) for manifest in self.manifests
        )
        return GateReport(self.folder, rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        manifests = [manifest.to_dict() for manifest in self.manifests]
        return {"folder": str(self.folder), "manifests": manifests}

    def to_text(self) -> Any:
        """Return the gate's figures for a terminal."""
        return self.report.to_text()


@loaded_once()  # the images of --calibrate-on, which are read before the weights
def export(
    checkpoint: Checkpoint | Path | str,
    options: ExportOptions,
    sizes: GateSizes | None = None,
    *,
    progress: Report | None = bar,
) -> ExportedModel:
    """Write `<name>.safetensors`, and an ONNX file with its manifest for each variant.

    The folder is created only when every variant has passed the gate. The same weights and
    package versions give the same ONNX files on every CPU. int8 files are an exception: they are
    the same only on the same kind of CPU, because their scales are measured there. `sizes` replaces
    those of `options.gate`; the manifests record them.

    Raises: GateFailed if a variant does not pass, SaccadeError for an option or a checkpoint
        that cannot be exported, MissingPackage if torch, onnx or onnxruntime is missing.
    """
    refuse_existing(options.out, force=options.force)
    _check_precisions(options)
    source = checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint_file(checkpoint)
    if not isinstance(checkpoint, Checkpoint):
        refuse_foreign(source)  # first: a valid --name would not help such a file
        if source.is_dir() and (found := foreign_text(source, "a checkpoint")):
            raise SaccadeError(f"{source}: {found}")
    name = check_model_name(options.name) if options.name else default_model_name(source)
    check = partial(_check_request, source, options)
    if isinstance(checkpoint, Checkpoint):
        check(checkpoint)
    else:
        checkpoint = load(source, check=check)
    with new_folder(options.out, force=options.force) as folder:
        own = folder / f"{name}.safetensors"
        checkpoint = _parent(checkpoint, options, own)
        parent = ParentEntry(own.name, checkpoint.sha256)
        reference = Reference(checkpoint, sizes or options.gate)
        budgets = choose_budgets(reference.model, options.budget)
        _check_outputs(reference.model, options.outputs)
        manifests, by_role = list[Manifest](), dict[str, list[Manifest]]()
        # The reference runs once for all precisions; each precision is traced and measured.
        steps = 1 + 2 * len(options.precision)
        components = len(budgets) * len(reference.model.components())
        with reporting(progress), progress_of("export", steps * components) as advance:
            for budget in budgets:
                variant = Variant.of(name, budget, reference, parent)
                for component in variant.components:
                    counted = StepCounter(
                        advance, variant.entry(component, options.precision[0]).name
                    )
                    made = by_role.get(component.role, [])
                    if component.every_budget and made and not any(own.file.data for own in made):
                        made = [*copied_component(folder, variant, component, made)]
                    else:
                        made = [*export_component(folder, variant, component, options, counted)]
                    by_role[component.role] = made
                    manifests += made
                    counted.up_to(steps)
    return ExportedModel(options.out, tuple(manifests))


def _check_outputs(model: Family, wanted: tuple[str, ...]) -> None:
    known = sorted({name for component in model.components() for name in component.optional})
    for name in wanted:
        check_one_of("--outputs", name, known, "This model has no other additional outputs.")


def _check_request(path: Path, options: ExportOptions, checkpoint: Checkpoint | Header) -> None:
    """Check the options first, then the packages, whose imports take seconds.

    Raises: SaccadeError for a budget that the model does not have, for int8 without images to
        calibrate it on, and for too little memory or disk space; MissingPackage.
    """
    if options.calibrate_on is not None:
        taken = checkpoint.preprocessing
        images = Preprocessing.from_dict(taken) if isinstance(taken, dict) else taken
        own_images(options.calibrate_on, images, checkpoint.labels)
    elif "int8" in options.precision:
        check_calibrated(path, checkpoint)
    _check_size(path, options, checkpoint)
    if options.slots is None:  # a selection changes the total that budgets refer to
        check_budgets(checkpoint, options.budget)
    for package in ("torch", "onnx", "onnxscript"):
        require(package, extra="export")
    runtime_named(DEFAULT).require()


def _check_size(path: Path, options: ExportOptions, checkpoint: Checkpoint | Header) -> None:
    config = config_class(checkpoint.family).from_dict(checkpoint.config)
    budgets = len(options.budget) or len(config.budgets())
    if isinstance(checkpoint, Checkpoint):
        size = 4 * sum(tensor.numel() for tensor in checkpoint.weights.values())
    else:
        size = weights_bytes(path)
    check_export(options.out, options.precision, budgets, size)


def _check_precisions(options: ExportOptions) -> None:
    check_chosen("precision", options.precision, PRECISIONS)
    for precision in options.precision:
        thresholds_of(precision, options.threshold)


def _parent(checkpoint: Checkpoint, options: ExportOptions, target: Path) -> Checkpoint:
    """Write the checkpoint that the variants are compared with, and return it."""
    if options.slots is None and options.calibrate_on is None:
        _copy_parent(checkpoint, target)
        return checkpoint
    if options.slots is not None:
        checkpoint = selected_checkpoint(checkpoint, options.slots, target)
    if options.calibrate_on is not None:
        checkpoint, _ = recalibrated(checkpoint, options.calibrate_on, target)
    return checkpoint


def _copy_parent(checkpoint: Checkpoint, target: Path) -> None:
    try:
        shutil.copyfile(checkpoint.path, target)
    except OSError as error:
        raise SaccadeError(
            f"{checkpoint.path}: cannot be copied to {target} ({error}). "
            "Free some space, or load the checkpoint from where it is now."
        ) from error
    check_digest(
        checkpoint.path,
        sha256_of(target),
        checkpoint.sha256,
        "when it was loaded",
        "Wait until the process that writes it has finished, then export again.",
    )
