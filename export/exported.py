# SPDX-License-Identifier: Apache-2.0
"""A checkpoint becomes a folder of ONNX files, one a variant, each through the gate."""

import hashlib
import shutil
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from saccade.export.compare import thresholds_of
from saccade.export.gate import Reference, measure
from saccade.export.manifest import (
    FileEntry,
    Manifest,
    ParentEntry,
    Parity,
    VariantEntry,
    write_manifest,
)
from saccade.export.runners import onnx_runner, onnx_session
from saccade.export.variants import (
    EXPORTED_PRECISIONS,
    check_model_name,
    choose_variants,
    default_model_name,
    parse_budgets,
)
from saccade.export.verdict import GateReport, VariantReport
from saccade.models.checkpoint import Checkpoint, load
from saccade.plugins.errors import GateFailed, SaccadeError, require
from saccade.plugins.files import new_folder, refuse_existing, sha256_of, write_atomically
from saccade.plugins.progress import progress

_TOOLS = ("saccade", "torch", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class ExportOptions:
    """Export a checkpoint to ONNX, one file a budget, each proved against the checkpoint."""

    out: Path  # folder to make
    name: str | None = None  # the model's name, by default the checkpoint's stem
    budget: tuple[float, ...] = (1, 0.5, 0.25, 0.125)  # fractions of the modules to keep
    precision: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"  # type of the weights
    threshold: dict[str, float] = field(default_factory=dict)  # gate thresholds to override
    force: bool = False  # replace an existing folder


@dataclass(frozen=True)
class ExportedModel:
    """The folder, and what is promised of each file in it."""

    folder: Path
    manifests: tuple[Manifest, ...]

    @property
    def report(self) -> GateReport:
        """The gate's figures as they stand in the manifests."""
        rows = tuple(VariantReport.of(each.variant.name, each.parity) for each in self.manifests)
        return GateReport(self.folder, rows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        manifests = [each.to_dict() for each in self.manifests]
        return {"folder": str(self.folder), "manifests": manifests}


def export(checkpoint: Checkpoint | Path | str, options: ExportOptions) -> ExportedModel:
    """Write `<name>.safetensors`, and an ONNX file with its manifest for each budget.

    The folder appears when every variant has passed the gate, or not at all. The same weights
    and versions give the same bytes.

    Raises: GateFailed if a variant does not pass, SaccadeError for an option or a checkpoint
        that cannot be exported, MissingPackage if torch, onnx or onnxruntime is missing.
    """
    refuse_existing(options.out, force=options.force)
    budgets = parse_budgets(options.budget)
    _check_precision(options.precision)
    thresholds_of(options.precision, options.threshold)
    source = checkpoint.path if isinstance(checkpoint, Checkpoint) else Path(checkpoint)
    name = check_model_name(options.name) if options.name else default_model_name(source)
    for package in ("torch", "onnx", "onnxscript"):
        require(package, extra="export")
    require("onnxruntime", extra="cpu")
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = load(source)
    reference = Reference.of(checkpoint)
    total = reference.model.config.modules
    variants = choose_variants(name, checkpoint.family, budgets, options.precision, total)
    with new_folder(options.out, force=options.force) as folder:
        parent = _copy_parent(checkpoint, folder / f"{name}.safetensors")
        manifests = []
        with progress("export", len(variants)) as advance:
            for variant, kept in variants.items():
                advance(0, note=variant.name)
                entry = VariantEntry(
                    variant.name, **asdict(variant), modules_kept=kept, modules_total=total
                )
                manifest = _export_variant(folder, entry, parent, reference, options.threshold)
                manifests.append(manifest)
                advance()
    return ExportedModel(options.out, tuple(manifests))


def _check_precision(precision: str) -> None:
    if precision not in EXPORTED_PRECISIONS:
        raise SaccadeError(
            f"precision {precision!r} is not exported by this release, only "
            f"{', '.join(EXPORTED_PRECISIONS)}: the others come with the engines that use them. "
            "Pass --precision fp32."
        )


def _copy_parent(checkpoint: Checkpoint, target: Path) -> ParentEntry:
    try:
        shutil.copyfile(checkpoint.path, target)
    except OSError as error:
        raise SaccadeError(
            f"{checkpoint.path}: cannot be copied to {target} ({error}). "
            "Make room, or load it from where it is now."
        ) from error
    if (found := sha256_of(target)) != checkpoint.sha256:
        raise SaccadeError(
            f"{checkpoint.path}: SHA-256 is {found[:12]}..., was {checkpoint.sha256[:12]}... when "
            "it was loaded. Export it again when whoever writes it is done."
        )
    return ParentEntry(target.name, checkpoint.sha256)


def _export_variant(
    folder: Path,
    entry: VariantEntry,
    parent: ParentEntry,
    reference: Reference,
    overrides: dict[str, float],
) -> Manifest:
    from saccade.export.cost import cost_of
    from saccade.export.onnx_graph import serialize, tensor_specs
    from saccade.export.tracing import trace
    from saccade.plugins.onnx_model import IR_VERSION, OPSET, check_nodes

    checkpoint, pruned = reference.checkpoint, reference.model.prune(entry.budget)
    # Folded in float64, where the fold is exact, and rounded once.
    proto = trace(pruned.fold().float(), checkpoint.preprocessing)
    data = serialize(proto)
    parity = _proved(entry, data, reference, overrides)
    file = FileEntry(f"{entry.name}.onnx", hashlib.sha256(data).hexdigest(), len(data))
    write_atomically(folder / file.name, data)
    manifest = Manifest(
        variant=entry,
        file=file,
        parent=parent,
        inputs=tensor_specs(proto.graph.input),
        outputs=tensor_specs(proto.graph.output),
        preprocessing=checkpoint.preprocessing,
        labels=checkpoint.labels,
        custom_ops=check_nodes(proto),
        opset=OPSET,
        ir_version=IR_VERSION,
        tools={tool: version(tool) for tool in _TOOLS},
        cost=cost_of(proto, sum(each.numel() for each in pruned.parameters())),
        parity=parity,
    )
    write_manifest(folder, manifest)
    return manifest


def _proved(
    entry: VariantEntry, data: bytes, reference: Reference, overrides: dict[str, float]
) -> Parity:
    run = onnx_runner(onnx_session(data))
    expected = reference.outputs(entry.budget)
    parity = measure(run, expected, reference.samples, entry.precision, overrides)
    if not parity.passed:
        problems = "; ".join(VariantReport.of(entry.name, parity).problems)
        raise GateFailed(
            f"{entry.name}: the exported file differs from the model: {problems}. Nothing was "
            "written. If the model is meant to be this coarse, raise that limit with --threshold."
        )
    return parity
