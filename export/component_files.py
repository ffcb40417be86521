# SPDX-License-Identifier: Apache-2.0
"""Write the files of one component of a variant, one per precision, and check each with the gate.

All graphs are written before the first is checked: the folded model, whose weights they contain,
and the float64 reference are never in memory together.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import GateFailed, SaccadeError
from saccade.core.leftovers import temporary_folder
from saccade.core.machine import instruction_sets, this_machine, version_of
from saccade.core.progress import Advance, silent
from saccade.exporter.artefact.manifest import (
    DATA_SUFFIX,
    FileEntry,
    Manifest,
    ParentEntry,
    Parity,
    Quantization,
    VariantEntry,
    write_manifest,
)
from saccade.exporter.artefact.variant import variant_name
from saccade.exporter.export_options import ExportOptions
from saccade.exporter.gate.gate import candidates_of, measure
from saccade.exporter.gate.metrics import exceeded, step_thresholds
from saccade.exporter.gate.reference import ExpectedAnswers, Reference, unbound
from saccade.exporter.gate.report import VariantReport, as_step, loosened
from saccade.exporter.graph.samples import calibration_inputs, gate_sizes, samples_of
from saccade.exporter.graph.trial import made_here
from saccade.exporter.quantization.recipes import QuantizationRecipe, recipes_for
from saccade.exporter.runtimes.runners import Runner
from saccade.models.budget import ComputeBudget
from saccade.models.checkpoint import Checkpoint
from saccade.models.interface import Arrays, Component, component_named

if TYPE_CHECKING:
    from saccade.exporter.graph.precision import TypedGraph
    from saccade.exporter.quantization.source import QuantizationSource

_TOOLS = ("saccade", "torch", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Variant:
    """A model at one budget, and what its manifests say of it."""

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
    ) -> "Variant":
        """Describe the variant; the model itself is not kept."""
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

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, with the preprocessing and samples of this variant's images."""
        return self.reference.sized(self.budget)

    def entry(self, component: Component, precision: str) -> VariantEntry:
        """Return the manifest's entry for one component in one precision."""
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


@dataclass(frozen=True)
class _ExportedFile:
    """A file that the gate has not checked yet."""

    entry: VariantEntry
    graph: "TypedGraph"  # without its weights, which are only in the file
    file: FileEntry
    inlined_ops: tuple[str, ...]
    custom_ops: tuple[str, ...]


@dataclass(frozen=True)
class _Job:
    """The work on one component: where, with which samples, and what of it is exported."""

    folder: Path
    variant: Variant
    component: Component
    options: ExportOptions
    few: Arrays  # to trace and count
    advance: Advance

    @property
    def outputs(self) -> tuple[str, ...]:
        optional = (name for name in self.component.optional if name in self.options.outputs)
        return (*self.component.outputs, *optional)

    def calibration(self, count: int) -> Arrays:
        return calibration_inputs(self.variant.checkpoint, self.component, count)

    def write(self, entry: VariantEntry, graph: "TypedGraph") -> _ExportedFile:
        from saccade.exporter.graph.model_file import without_initializers, write_model
        from saccade.exporter.graph.precision import with_ops_inlined
        from saccade.plugins.onnx_model import check_nodes

        inlined_ops = check_nodes(graph.proto) if self.options.inline_ops else ()
        if inlined_ops:
            graph = with_ops_inlined(graph, entry.precision)
        path = self.folder / f"{entry.name}.onnx"
        for earlier in (path, path.with_name(path.name + DATA_SUFFIX)):  # another int8 recipe
            earlier.unlink(missing_ok=True)
        file = write_model(graph.proto, graph.weights, path)
        custom_ops = check_nodes(graph.proto)
        graph = replace(graph, proto=without_initializers(graph.proto), weights={})
        return _ExportedFile(entry, graph, file, inlined_ops, custom_ops)

    def expected(self, written: _ExportedFile, advance: Advance = silent) -> ExpectedAnswers:
        reference, variant = self.variant.reference, self.variant
        total = written.graph.count.cost(variant.parameters).multiply_adds.total
        role = self.component.role
        expected = reference.expected(variant.budget, role, self.outputs, total, advance)
        reference.release()
        return expected

    def gate(
        self,
        written: _ExportedFile,
        advance: Advance = silent,
        float32: Callable[[], Runner] | None = None,
    ) -> Parity:
        """Measure a file. `float32` runs the folded model in float32; default: torch."""
        variant, options, entry = self.variant, self.options, written.entry
        runs = candidates_of(
            self.folder / written.file.name,
            written.file,
            written.custom_ops,
            partial(variant.reference.folded, variant.budget),
            entry,
            self.outputs,
            for_gpu=entry.precision == "int8" and options.int8_for == "gpu",
        )
        expected = self.expected(written, advance)
        if float32 is not None and expected.scored is not None:
            expected = replace(expected, scored=replace(expected.scored, float32=float32))
        lifted = step_thresholds(entry.precision) if options.as_step else {}
        overrides = {**lifted, **options.threshold}
        return measure(runs, expected, entry.precision, overrides, advance=advance)


def export_component(
    folder: Path,
    variant: Variant,
    component: Component,
    options: ExportOptions,
    advance: Advance,
) -> Iterator[Manifest]:
    """Write one component in each precision; the reference runs once for all of them.

    Raises: GateFailed if a file does not pass, SaccadeError if a graph cannot be made.
    """
    few = samples_of(variant.checkpoint, component, gate_sizes("quick", 0)).inputs
    job = _Job(folder, variant, component, options, few, advance)
    with temporary_folder("int8") as scratch:
        files, source = _traced(job, scratch)
        variant.reference.release()  # the folded model, whose graphs are written
        for precision in options.precision:
            if precision == "int8":
                assert source is not None
                written, parity, quantization = _int8_file(job, source)
            else:
                written, quantization = files[precision], None
                parity = _passed(written.entry, job.gate(written, advance), component)
            manifest = _manifest(job, written, parity, quantization)
            write_manifest(folder, manifest)
            made_here(manifest)
            yield manifest


def copied_component(
    folder: Path, variant: Variant, component: Component, made: Sequence[Manifest]
) -> Iterator[Manifest]:
    """Write the files of a component that is the same at every budget, for one more budget.

    `made` are its manifests at another budget, whose files have no data file: its name is in them.
    """
    for manifest in made:
        entry = variant.entry(component, manifest.variant.precision)
        file = replace(manifest.file, name=f"{entry.name}.onnx")
        shutil.copyfile(folder / manifest.file.name, folder / file.name)
        copied = replace(
            manifest,
            variant=entry,
            file=file,
            facts=variant.metadata,
            cost=replace(manifest.cost, parameters=variant.parameters),
        )
        write_manifest(folder, copied)
        yield copied


def _traced(
    job: _Job, scratch: Path
) -> tuple[dict[str, _ExportedFile], "QuantizationSource | None"]:
    """Trace the folded model and write it in each precision; for int8, write what is quantized."""
    from saccade.exporter.graph.tracing import trace_component
    from saccade.exporter.quantization.source import source_of

    reference, role = job.variant.reference, job.component.role
    folded = reference.folded(job.variant.budget)
    component, weights = component_named(folded, role), dict[str, Any]()
    files: dict[str, _ExportedFile] = {}
    float32, source = set[str](), None

    @cache
    def traced(precision: str) -> Any:
        # int8 quantizes the float32 graph, whose nodes these names are.
        names = float32 if precision == "fp32" else set[str]()
        asked = component, job.few, job.outputs, precision, weights, names
        return trace_component(folded, *asked)

    for precision in job.options.precision:
        entry = job.variant.entry(job.component, precision)
        job.advance(0, f"tracing the {precision} graph")
        if precision == "int8":
            source = source_of(traced("fp32"), weights, float32, scratch)
        else:
            files[precision] = job.write(
                entry, _typed_graph(job, entry, traced(precision), weights)
            )
        job.advance()
    return files, source


def _typed_graph(
    job: _Job, entry: VariantEntry, proto: Any, weights: dict[str, Any]
) -> "TypedGraph":
    """Check a graph in fp32, fp16 or bf16, whose large weights are in `weights`.

    In half precision, read-outs, softmax, normalizations and custom ops stay in float32. Ranges are
    measured on as many calibration samples as the gate takes.

    Raises: GateFailed if a number is too large for fp16, SaccadeError if the graph would not have
        that precision.
    """
    from saccade.exporter.graph.cost import count_of
    from saccade.exporter.graph.half_graph import activation_ranges, check_ranges
    from saccade.exporter.graph.precision import TypedGraph, checked_graph

    precision, count = entry.precision, count_of(proto, job.few, weights)
    if precision == "fp32":
        return TypedGraph(proto, count, weights)
    sizes = job.variant.reference.sizes(sum(count.multiply_adds.values()))
    ranges = activation_ranges(proto, job.calibration(sizes.real_inputs), weights)
    if precision == "fp16":
        check_ranges(entry.name, ranges)
    return checked_graph(entry.name, entry.role, precision, proto, weights, ranges, count)


def _int8_file(
    job: _Job, source: "QuantizationSource"
) -> tuple[_ExportedFile, Parity, Quantization]:
    """Return the first int8 file that passes the gate and pays, with its figures.

    Raises: GateFailed, with the reason for each recipe, if there is none.
    """
    from saccade.exporter.quantization import quantize
    from saccade.plugins.onnx_model import check_nodes

    sets, target = instruction_sets() or (), job.options.int8_for
    entry = job.variant.entry(job.component, "int8")
    samples = job.calibration(quantize.CALIBRATION_SAMPLES)
    job.variant.reference.release()  # what the file before it needed
    job.advance(0, "collecting ranges for int8")
    quantized = quantize.candidates(source, recipes_for(target, sets), samples)

    @cache
    def slow() -> Runner:
        return quantize.served_runner(source.path, check_nodes(source.graph()))

    def speed(written: _ExportedFile) -> float:
        job.expected(written, job.advance)  # its float64 model and the two sessions: not together
        path = job.folder / written.file.name
        return quantize.speed_over(
            slow(), quantize.served_runner(path, written.custom_ops), samples
        )

    written, parity, tried, ratio = quantize.first_that_passes(
        entry.name,
        _int8_candidates(job, entry, quantized),
        partial(job.gate, float32=slow),  # half the time and a third of the memory of torch
        speed if target == "cpu" else None,
        job.options.int8_speedup,
    )
    machine = this_machine()
    quantization = Quantization(
        recipe=tried[-1].recipe,
        target=target,
        tried=tried,
        speedup=ratio,
        runtime=machine.runtime,
        device=machine.device,
        instruction_sets=sets,
        samples=len(next(iter(samples.values()))),
    )
    return written, parity, quantization


def _int8_candidates(
    job: _Job, entry: VariantEntry, quantized: Iterator[tuple[QuantizationRecipe, Any]]
) -> Iterator[tuple[str, _ExportedFile | SaccadeError]]:
    """Yield the file of each recipe; an error if its islands leave too little in int8."""
    from saccade.exporter.graph.cost import count_of
    from saccade.exporter.graph.precision import checked_graph
    from saccade.exporter.quantization.quantize import quantized_ranges

    for recipe, proto in quantized:
        job.advance(0, f"int8 recipe {recipe.name}")
        ranges, count = quantized_ranges(proto), count_of(proto, job.few)
        try:
            graph = checked_graph(entry.name, entry.role, "int8", proto, {}, ranges, count)
        except SaccadeError as error:
            if not recipe.float_share:
                raise
            yield recipe.name, error
            return  # the recipes after it keep even more layers in float32
        written = job.write(entry, graph)
        del proto, graph
        job.variant.reference.release()  # the quantizer's copies of the weights
        yield recipe.name, written


def _manifest(
    job: _Job, written: _ExportedFile, parity: Parity, quantization: Quantization | None
) -> Manifest:
    from saccade.exporter.graph.canonical import tensor_specs
    from saccade.exporter.graph.layer_types import opset_of
    from saccade.plugins.onnx_model import IR_VERSION

    variant, graph = job.variant, written.graph
    checkpoint, main = variant.checkpoint, graph.proto.graph
    outputs = tensor_specs(main.output)
    takes_image = any(spec.name == "image" for spec in job.component.inputs)
    has_chances = any(spec.name == "probabilities" for spec in outputs)
    return Manifest(
        variant=written.entry,
        file=written.file,
        parent=variant.parent,
        inputs=tensor_specs(main.input),
        outputs=outputs,
        preprocessing=checkpoint.preprocessing if takes_image else None,
        labels=checkpoint.labels if has_chances else (),
        facts=variant.metadata,
        custom_ops=written.custom_ops,
        opset=opset_of(written.entry.precision),
        ir_version=IR_VERSION,
        tools={tool: version_of(tool) for tool in _TOOLS},
        cost=graph.count.cost(variant.parameters),
        parity=parity,
        float32_layers=graph.float32_layers,
        activation_ranges=graph.activation_ranges,
        inlined_ops=written.inlined_ops,
        quantization=quantization,
        step_only=job.options.as_step and written.entry.precision != "fp32",
    )


def _passed(entry: VariantEntry, parity: Parity, component: Component) -> Parity:
    if not parity.passed:
        problems = "; ".join(VariantReport.of(entry.name, parity).problems)
        sensitive = "sensitive_rows" in exceeded(parity.figures, parity.thresholds)
        remedy = f"{component.remedy} " if sensitive else ""
        raise GateFailed(
            f"{entry.name}: the exported file differs from the model: {problems}. Nothing was "
            f"written. {remedy.lstrip()}If this difference is acceptable, raise the limit with "
            f"--threshold, for example --threshold {loosened(parity)} LIMIT."
            f"{as_step(entry.precision)}"
        )
    return parity
