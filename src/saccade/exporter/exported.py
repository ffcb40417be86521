# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint to a folder of ONNX files, one per variant, each checked by the gate."""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
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
    check_budgets,
    check_chosen,
    check_model_name,
    choose_budgets,
    default_model_name,
    variant_name,
)
from saccade.exporter.gate.gate import Opener, candidates_of, measure
from saccade.exporter.gate.metrics import exceeded, thresholds_of
from saccade.exporter.gate.reference import Expected, Reference, unbound
from saccade.exporter.gate.report import GateReport, VariantReport, loosened
from saccade.exporter.graph.samples import (
    GateLevel,
    GateSizes,
    calibration_inputs,
    gate_sizes,
    samples_of,
)
from saccade.exporter.graph.trial import made_here
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.files import new_folder, refuse_existing, sha256_of, write_atomically
from saccade.machine import version_of
from saccade.models.budget import BudgetLike, ComputeBudget
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.checkpoint_folder import checkpoint_file
from saccade.models.checkpoint_format import Header, refuse_foreign
from saccade.models.interface import Component, Family, component_named
from saccade.models.sparo.select import selected_checkpoint
from saccade.path_fields import PathFields
from saccade.progress import Advance, Counted, Report, bar, progress_of, reporting
from saccade.spelling import did_you_mean

if TYPE_CHECKING:
    from saccade.exporter.graph.precision import TypedGraph

_TOOLS = ("saccade", "torch", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class ExportOptions(PathFields):
    """Export a checkpoint to ONNX, one file per budget, each verified against the checkpoint."""

    out: Path  # folder to create
    name: str | None = None  # model name; default: the checkpoint's file name without .safetensors
    budget: tuple[BudgetLike, ...] = ()  # 1,2/3,0.5 or t3,t1 or exact,fast; default: the family's
    outputs: tuple[str, ...] = ()  # additional outputs, such as attention
    slots: Path | None = None  # a selection of slots, written by `saccade select`
    precision: tuple[str, ...] = ("fp32",)  # any of fp32, fp16, bf16, int8: type of matrix products
    inline_ops: bool = False  # write custom ops as standard operators, for tools without functions
    # how much evidence: quick, standard, or thorough (320 samples in float64)
    gate: GateLevel = "standard"
    threshold: dict[str, float] = field(default_factory=dict)  # gate thresholds to override
    force: bool = False  # replace an existing folder


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
    name = check_model_name(options.name) if options.name else default_model_name(source)
    check = partial(_check_request, options)
    if isinstance(checkpoint, Checkpoint):
        check(checkpoint)
    else:
        checkpoint = load(source, check=check)
    with new_folder(options.out, force=options.force) as folder:
        own = folder / f"{name}.safetensors"
        if options.slots is None:
            parent = _copy_parent(checkpoint, own)
        else:
            checkpoint = selected_checkpoint(checkpoint, options.slots, own)
            parent = ParentEntry(own.name, checkpoint.sha256)
        reference = Reference(checkpoint, sizes or options.gate)
        budgets = choose_budgets(reference.model, options.budget)
        _check_outputs(reference.model, options.outputs)
        manifests: list[Manifest] = []
        # The reference runs once for all precisions; each precision is traced and measured.
        steps = 1 + 2 * len(options.precision)
        components = len(budgets) * len(reference.model.components())
        with reporting(progress), progress_of("export", steps * components) as advance:
            for budget in budgets:
                variant = _Variant.of(name, budget, reference, parent)
                for component in variant.components:
                    counted = Counted(advance, variant.entry(component, options.precision[0]).name)
                    manifests += _export_component(folder, variant, component, options, counted)
                    counted.up_to(steps)
    return ExportedModel(options.out, tuple(manifests))


@dataclass(frozen=True)
class _Variant:
    name: str
    budget: ComputeBudget
    reference: Reference
    parent: ParentEntry
    components: tuple[Component, ...]  # without their functions
    metadata: dict[str, Any]
    parameters: int

    @classmethod
    def of(
        cls, name: str, budget: ComputeBudget, reference: Reference, parent: ParentEntry
    ) -> "_Variant":
        from saccade.exporter.graph.cost import parameters_of

        model = reference.variant(budget)
        return cls(
            name,
            budget,
            reference,
            parent,
            tuple(map(unbound, model.components())),
            model.runtime_metadata(),
            parameters_of(model),
        )

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
            f"--outputs has {unknown[0]!r}, expected additional outputs of this model: "
            f"{', '.join(known) or 'it has none'}.{did_you_mean(unknown[0], known)}"
        )


def _check_request(options: ExportOptions, checkpoint: Checkpoint | Header) -> None:
    """Check the budgets first, then the packages, whose imports take seconds.

    Raises: SaccadeError for a budget that the model does not have, MissingPackage.
    """
    if options.slots is None:  # a selection changes the total that budgets refer to
        check_budgets(checkpoint, options.budget)
    for package in ("torch", "onnx", "onnxscript"):
        require(package, extra="export")
    runtime_named(DEFAULT).require()


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
            "Free some space, or load the checkpoint from where it is now."
        ) from error
    if (digest := sha256_of(target)) != checkpoint.sha256:
        raise SaccadeError(
            f"{checkpoint.path}: SHA-256 is {digest[:12]}..., was {checkpoint.sha256[:12]}... when "
            "it was loaded. Wait until the process that writes it has finished, then export again."
        )
    return ParentEntry(target.name, checkpoint.sha256)


def _export_component(
    folder: Path,
    variant: _Variant,
    component: Component,
    options: ExportOptions,
    advance: Advance,
) -> Iterator[Manifest]:
    """Write one component in each precision; the reference runs once for all of them."""
    from saccade.exporter.graph.canonical import serialize
    from saccade.exporter.graph.precision import typed_graph, with_ops_inlined
    from saccade.plugins.onnx_model import check_nodes

    outputs = (
        *component.outputs,
        *(name for name in component.optional if name in options.outputs),
    )
    reference, budget = variant.reference, variant.budget
    calibration = partial(calibration_inputs, reference.checkpoint, component)
    few = samples_of(reference.checkpoint, component, gate_sizes("quick", 0)).inputs
    folded = reference.folded(budget)

    @cache
    def traced(precision: str) -> Any:
        from saccade.exporter.graph.tracing import trace_component

        same = component_named(folded, component.role)
        return trace_component(folded, same, few, outputs, precision)

    for precision in options.precision:
        entry = variant.entry(component, precision)
        advance(0, f"tracing the {precision} graph")
        graph = typed_graph(
            entry.name, component.role, precision, traced, few, calibration, reference.sizes
        )
        inlined_ops = check_nodes(graph.proto) if options.inline_ops else ()
        if inlined_ops:
            graph = with_ops_inlined(graph, precision)
        data = serialize(graph.proto)
        candidates = candidates_of(data, check_nodes(graph.proto), lambda: folded, entry, outputs)
        advance()
        cost = graph.count.cost(variant.parameters)
        expected = reference.expected(
            budget, component.role, outputs, cost.multiply_adds.total, advance
        )
        reference.release()
        parity = _proved(entry, candidates, expected, options.threshold, advance)
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
        facts=variant.metadata,
        custom_ops=check_nodes(proto),
        opset=opset_of(entry.precision),
        ir_version=IR_VERSION,
        tools={tool: version_of(tool) for tool in _TOOLS},
        cost=graph.count.cost(variant.parameters),
        parity=parity,
        float32_layers=graph.float32_layers,
        activation_ranges=graph.activation_ranges,
        inlined_ops=inlined_ops,
    )


def _takes_image(component: Component) -> bool:
    return any(spec.name == "image" for spec in component.inputs)


def _proved(
    entry: VariantEntry,
    candidates: list[Opener],
    expected: Expected,
    overrides: dict[str, float],
    advance: Advance,
) -> Parity:
    parity = measure(candidates, expected, entry.precision, overrides, advance=advance)
    if not parity.passed:
        problems = "; ".join(VariantReport.of(entry.name, parity).problems)
        sensitive = "sensitive_rows" in exceeded(parity.figures, parity.thresholds)
        remedy = f"{expected.component.remedy} " if sensitive else ""
        raise GateFailed(
            f"{entry.name}: the exported file differs from the model: {problems}. Nothing was "
            f"written. {remedy.lstrip()}If this difference is acceptable, raise the limit with "
            f"--threshold, for example --threshold {loosened(parity)} LIMIT."
        )
    return parity
