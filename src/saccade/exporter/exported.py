# SPDX-License-Identifier: Apache-2.0
"""A checkpoint becomes a folder of ONNX files, one a variant, each through the gate."""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.errors import GateFailed, SaccadeError, require
from saccade.exporter.artefact.manifest import (
    FileEntry,
    Manifest,
    ParentEntry,
    Parity,
    VariantEntry,
    write_manifest,
)
from saccade.exporter.artefact.variant import (
    PRECISIONS,
    check_chosen,
    check_model_name,
    choose_budgets,
    default_model_name,
    variant_name,
)
from saccade.exporter.gate.gate import (
    Expected,
    Reference,
    candidates_of,
    expected_of,
    folded_float32,
    measure,
)
from saccade.exporter.gate.metrics import exceeded, thresholds_of
from saccade.exporter.gate.report import GateReport, VariantReport
from saccade.exporter.graph.samples import GateSizes
from saccade.exporter.graph.trial import made_here
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.files import new_folder, refuse_existing, sha256_of, write_atomically
from saccade.machine import version_of
from saccade.models.budget import BudgetLike
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.interface import Component, ComputeBudget, Family, component_named
from saccade.models.shipped import located
from saccade.models.sparo.select import selected_checkpoint
from saccade.path_fields import PathFields
from saccade.progress import progress

if TYPE_CHECKING:
    from saccade.exporter.graph.precision import TypedGraph

_TOOLS = ("saccade", "torch", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class ExportOptions(PathFields):
    """Export a checkpoint to ONNX, one file a budget, each proved against the checkpoint."""

    out: Path  # folder to make
    name: str | None = None  # the model's name, by default the checkpoint's stem
    budget: tuple[BudgetLike, ...] = ()  # 1,2/3,0.5 or t3,t1 or exact,fast; default: the family's
    outputs: tuple[str, ...] = ()  # further outputs, such as attention
    slots: Path | None = None  # a selection of slots, as `saccade select` writes it
    precision: tuple[str, ...] = ("fp32",)  # of fp32, fp16, bf16, int8: type of the products
    inline_ops: bool = False  # write custom ops as standard operators, for tools without functions
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
        rows = tuple(
            VariantReport.of(manifest.variant.name, manifest.parity) for manifest in self.manifests
        )
        return GateReport(self.folder, rows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        manifests = [manifest.to_dict() for manifest in self.manifests]
        return {"folder": str(self.folder), "manifests": manifests}

    def to_text(self) -> Any:
        """The gate's figures, for a terminal."""
        return self.report.to_text()


def export(
    checkpoint: Checkpoint | Path | str, options: ExportOptions, gate: GateSizes | None = None
) -> ExportedModel:
    """Write `<name>.safetensors`, and an ONNX file with its manifest for each budget.

    The folder appears when every variant has passed the gate, or not at all. The same weights
    and versions give the same ONNX files on every CPU; int8 files on one kind of CPU, because
    their scales are measured there. A gate of other sizes than the usual is recorded.

    Raises: GateFailed if a variant does not pass, SaccadeError for an option or a checkpoint
        that cannot be exported, MissingPackage if torch, onnx or onnxruntime is missing.
    """
    refuse_existing(options.out, force=options.force)
    _check_precisions(options)
    source = checkpoint.path if isinstance(checkpoint, Checkpoint) else located(checkpoint)
    name = check_model_name(options.name) if options.name else default_model_name(source)
    for package in ("torch", "onnx", "onnxscript"):
        require(package, extra="export")
    runtime_named(DEFAULT).require()
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = load(source)
    with new_folder(options.out, force=options.force) as folder:
        own = folder / f"{name}.safetensors"
        if options.slots is None:
            parent = _copy_parent(checkpoint, own)
        else:
            checkpoint = selected_checkpoint(checkpoint, options.slots, own)
            parent = ParentEntry(own.name, checkpoint.sha256)
        reference = Reference(checkpoint, gate)
        budgets = choose_budgets(reference.model, options.budget)
        _check_outputs(reference.model, options.outputs)
        manifests = []
        steps = len(budgets) * len(reference.model.components()) * len(options.precision)
        with progress("export", steps) as advance:
            for budget in budgets:
                variant = _Variant(name, budget, reference.variant(budget), reference, parent)
                for component in variant.model.components():
                    for manifest in _export_component(folder, variant, component, options):
                        manifests.append(manifest)
                        advance(note=manifest.variant.name)
    return ExportedModel(options.out, tuple(manifests))


@dataclass(frozen=True)
class _Variant:
    name: str
    budget: ComputeBudget
    model: Family  # float64, unfolded
    reference: Reference
    parent: ParentEntry

    def entry(self, component: Component, precision: str) -> VariantEntry:
        budget = self.budget
        return VariantEntry(
            name=variant_name(self.name, component.role, budget.label, precision),
            model=self.name,
            family=self.reference.checkpoint.family,
            role=component.role,
            setting=budget.label,
            budget=budget.share,
            kept=budget.kept,
            total=budget.total,
            unit=budget.unit,
            precision=precision,
        )


def _check_outputs(model: Family, wanted: tuple[str, ...]) -> None:
    known = sorted({name for component in model.components() for name in component.optional})
    if unknown := sorted(set(wanted) - set(known)):
        raise SaccadeError(
            f"--outputs names {unknown[0]!r}; this model can also give: "
            f"{', '.join(known) or 'nothing more'}."
        )


def _check_precisions(options: ExportOptions) -> None:
    check_chosen("precision", options.precision, PRECISIONS)
    for precision in options.precision:
        thresholds_of(precision, options.threshold)


def _copy_parent(checkpoint: Checkpoint, target: Path) -> ParentEntry:
    try:
        shutil.copyfile(checkpoint.path, target)
    except OSError as error:
        raise SaccadeError(
            f"{checkpoint.path}: cannot be copied to {target} ({error}). "
            "Make room, or load it from where it is now."
        ) from error
    if (digest := sha256_of(target)) != checkpoint.sha256:
        raise SaccadeError(
            f"{checkpoint.path}: SHA-256 is {digest[:12]}..., was {checkpoint.sha256[:12]}... when "
            "it was loaded. Export it again when whoever writes it is done."
        )
    return ParentEntry(target.name, checkpoint.sha256)


def _export_component(
    folder: Path, variant: _Variant, component: Component, options: ExportOptions
) -> Iterator[Manifest]:
    """Write the component in each precision; the reference answers once for all of them."""
    from saccade.exporter.graph.canonical import serialize
    from saccade.exporter.graph.precision import typed_graph, with_ops_inlined
    from saccade.plugins.onnx_model import check_nodes

    outputs = (
        *component.outputs,
        *(name for name in component.optional if name in options.outputs),
    )
    expected = expected_of(
        variant.reference, variant.model, variant.budget, component.role, outputs
    )
    folded = folded_float32(variant.model)
    samples = expected.samples

    @cache
    def traced(precision: str) -> Any:
        from saccade.exporter.graph.tracing import trace_component

        same = component_named(folded, component.role)
        return trace_component(folded, same, samples.inputs, outputs, precision)

    for precision in options.precision:
        entry = variant.entry(component, precision)
        graph = typed_graph(entry.name, component.role, precision, traced, samples)
        inlined_ops = check_nodes(graph.proto) if options.inline_ops else ()
        if inlined_ops:
            graph = with_ops_inlined(graph, precision)
        data = serialize(graph.proto)
        candidates = candidates_of(data, check_nodes(graph.proto), lambda: folded, entry, outputs)
        parity = _proved(entry, candidates, expected, options.threshold)
        write_atomically(folder / f"{entry.name}.onnx", data)
        manifest = _manifest(variant, entry, graph, expected, parity, data, inlined_ops)
        write_manifest(folder, manifest)
        made_here(manifest)
        yield manifest


def _manifest(
    variant: _Variant,
    entry: VariantEntry,
    graph: "TypedGraph",
    expected: Expected,
    parity: Parity,
    data: bytes,
    inlined_ops: tuple[str, ...],
) -> Manifest:
    from saccade.exporter.graph.canonical import tensor_specs
    from saccade.exporter.graph.cost import parameters_of
    from saccade.exporter.graph.layer_types import opset_of
    from saccade.plugins.onnx_model import IR_VERSION, check_nodes

    checkpoint, proto = variant.reference.checkpoint, graph.proto
    return Manifest(
        variant=entry,
        file=FileEntry(f"{entry.name}.onnx", hashlib.sha256(data).hexdigest(), len(data)),
        parent=variant.parent,
        inputs=tensor_specs(proto.graph.input),
        outputs=tensor_specs(proto.graph.output),
        preprocessing=checkpoint.preprocessing if _takes_image(expected.component) else None,
        labels=checkpoint.labels if "probabilities" in expected.answers else (),
        facts=variant.model.runtime_metadata(),
        custom_ops=check_nodes(proto),
        opset=opset_of(entry.precision),
        ir_version=IR_VERSION,
        tools={tool: version_of(tool) for tool in _TOOLS},
        cost=graph.count.cost(parameters_of(variant.model)),
        parity=parity,
        float32_layers=graph.float32_layers,
        activation_ranges=graph.activation_ranges,
        inlined_ops=inlined_ops,
    )


def _takes_image(component: Component) -> bool:
    return any(spec.name == "image" for spec in component.inputs)


def _proved(
    entry: VariantEntry,
    candidates: list[Runner],
    expected: Expected,
    overrides: dict[str, float],
) -> Parity:
    parity = measure(candidates, expected, entry.precision, overrides)
    if not parity.passed:
        problems = "; ".join(VariantReport.of(entry.name, parity).problems)
        raise GateFailed(
            f"{entry.name}: the exported file differs from the model: {problems}. Nothing was "
            "written. If the model is meant to be this coarse, raise that limit with --threshold, "
            f"as in --threshold {next(iter(exceeded(parity.figures, parity.thresholds)))} LIMIT."
        )
    return parity
