# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint to a folder of ONNX files, one per variant, each checked by the gate."""

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
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
    Quantization,
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
from saccade.exporter.gate.gate import candidates_of, measure
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
from saccade.exporter.quantization.recipes import RECIPES, Recipe, Target, recipes_for
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.files import new_folder, refuse_existing, sha256_of, write_atomically
from saccade.instruction_sets import instruction_sets
from saccade.leftovers import temporary_folder
from saccade.machine import this_machine, version_of
from saccade.models.budget import BudgetLike, ComputeBudget
from saccade.models.checkpoint import Checkpoint, load, weights_bytes
from saccade.models.checkpoint_folder import checkpoint_file
from saccade.models.checkpoint_format import Header, refuse_foreign
from saccade.models.data.loaded_once import loaded_once
from saccade.models.data.own_calibration import check_calibrated, own_images, recalibrated
from saccade.models.families import config_class
from saccade.models.interface import Arrays, Component, Family, component_named
from saccade.models.preprocessing import Preprocessing
from saccade.models.sparo.select import selected_checkpoint
from saccade.path_fields import PathFields
from saccade.progress import Advance, Counted, Report, bar, progress_of, reporting, silent
from saccade.resources import check_export
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
    # your images for the gate and the ranges of int8, instead of the checkpoint's samples: a folder
    # of images, or data as of `evaluate`
    calibrate_on: str | None = None
    outputs: tuple[str, ...] = ()  # additional outputs, such as attention
    slots: Path | None = None  # a selection of slots, written by `saccade select`
    precision: tuple[str, ...] = ("fp32",)  # any of fp32, fp16, bf16, int8: type of matrix products
    int8_for: Target = "cpu"  # where int8 is to run; gpu: symmetric scales, as TensorRT requires
    int8_speedup: float = 1.2  # on a CPU, write int8 only if it is so many times as fast as fp32
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
    check_chosen("int8-for", (options.int8_for,), tuple(RECIPES))
    if not 0 <= options.int8_speedup < math.inf:
        raise SaccadeError(
            f"--int8-speedup is {options.int8_speedup:g}, expected a number of at least 0."
        )
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
    if (digest := sha256_of(target)) != checkpoint.sha256:
        raise SaccadeError(
            f"{checkpoint.path}: SHA-256 is {digest[:12]}..., was {checkpoint.sha256[:12]}... when "
            "it was loaded. Wait until the process that writes it has finished, then export again."
        )


def _export_component(
    folder: Path,
    variant: _Variant,
    component: Component,
    options: ExportOptions,
    advance: Advance,
) -> Iterator[Manifest]:
    """Write one component in each precision; the reference runs once for all of them."""
    from saccade.exporter.graph.precision import typed_graph

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

    def expected_for(file: _File, advance: Advance = silent) -> Expected:
        total = file.graph.count.cost(variant.parameters).multiply_adds.total
        expected = reference.expected(budget, component.role, outputs, total, advance)
        reference.release()
        return expected

    def gate(entry: VariantEntry, file: _File, advance: Advance = silent) -> Parity:
        for_gpu = entry.precision == "int8" and options.int8_for == "gpu"
        runs = candidates_of(
            file.data, file.custom_ops, lambda: folded, entry, outputs, for_gpu=for_gpu
        )
        expected = expected_for(file, advance)
        return measure(runs, expected, entry.precision, options.threshold, advance=advance)

    for precision in options.precision:
        entry, quantization = variant.entry(component, precision), None
        advance(0, f"tracing the {precision} graph")
        if precision == "int8":
            tell = partial(advance, 0)
            file, parity, quantization = _int8_file(
                entry, traced, few, calibration, options, partial(gate, entry), tell
            )
        else:
            graph = typed_graph(
                entry.name, component.role, precision, traced, few, calibration, reference.sizes
            )
            file = _file(graph, options, precision)
            advance()
            parity = _passed(entry, gate(entry, file, advance), component)
        write_atomically(folder / f"{entry.name}.onnx", file.data)
        expected = expected_for(file)
        manifest = _manifest(variant, entry, file, expected, parity, quantization)
        write_manifest(folder, manifest)
        made_here(manifest)
        yield manifest


@dataclass(frozen=True)
class _File:
    """A graph in its final form, and its bytes."""

    graph: "TypedGraph"
    data: bytes
    custom_ops: tuple[str, ...]
    inlined_ops: tuple[str, ...]


def _file(graph: "TypedGraph", options: ExportOptions, precision: str) -> _File:
    from saccade.exporter.graph.canonical import serialize
    from saccade.exporter.graph.precision import with_ops_inlined
    from saccade.plugins.onnx_model import check_nodes

    inlined_ops = check_nodes(graph.proto) if options.inline_ops else ()
    if inlined_ops:
        graph = with_ops_inlined(graph, precision)
    return _File(graph, serialize(graph.proto), check_nodes(graph.proto), inlined_ops)


def _int8_file(
    entry: VariantEntry,
    traced: Callable[[str], Any],
    few: Arrays,
    calibration: Callable[[int], Arrays],
    options: ExportOptions,
    gate: Callable[[_File], Parity],
    tell: Callable[[str], None],
) -> tuple[_File, Parity, Quantization]:
    """Return the first int8 file that passes the gate and pays, with its figures.

    Raises: GateFailed, with the reason for each recipe, if there is none.
    """
    from saccade.exporter.graph.layer_types import float32_layers
    from saccade.exporter.quantization import search
    from saccade.exporter.quantization.source import source_of
    from saccade.plugins.onnx_model import check_nodes

    machine, sets, target = this_machine(), instruction_sets() or (), options.int8_for
    float32, samples = traced("fp32"), calibration(search.CALIBRATION_SAMPLES)
    with temporary_folder("int8") as folder:
        # The half-precision graph tells which products are in read-outs: nodes have the same names.
        source = source_of(float32, float32_layers(traced("fp16")), folder)

        tell("collecting ranges for int8")
        made = search.candidates(source, recipes_for(target, sets), samples)
        slow = cache(lambda: search.served_runner(source.path, check_nodes(float32)))

        def speed(file: _File) -> float:
            fast = search.served_runner(file.data, file.custom_ops)
            return search.speed_over(slow(), fast, samples)

        file, parity, tried, ratio = search.first_that_passes(
            entry.name,
            _int8_candidates(entry, made, few, options, tell),
            gate,
            speed if target == "cpu" else None,
            options.int8_speedup,
        )
    return (
        file,
        parity,
        Quantization(
            recipe=tried[-1].recipe,
            target=target,
            tried=tried,
            speedup=ratio,
            runtime=machine.runtime,
            device=machine.device,
            instruction_sets=sets,
            samples=len(next(iter(samples.values()))),
        ),
    )


def _int8_candidates(
    entry: VariantEntry,
    quantized: Iterator[tuple[Recipe, Any]],
    few: Arrays,
    options: ExportOptions,
    tell: Callable[[str], None],
) -> Iterator[tuple[str, _File | SaccadeError]]:
    """Yield the file of each recipe; an error if its islands leave too little in int8."""
    from saccade.exporter.graph.cost import count_of
    from saccade.exporter.graph.precision import checked_graph
    from saccade.exporter.quantization.quantize import quantized_ranges

    for recipe, proto in quantized:
        tell(f"int8 recipe {recipe.name}")
        ranges, count = quantized_ranges(proto), count_of(proto, few)
        try:
            graph = checked_graph(entry.name, entry.role, "int8", proto, ranges, count)
        except SaccadeError as error:
            if not recipe.float_share:
                raise
            yield recipe.name, error
            return  # the recipes after it keep even more layers in float32
        yield recipe.name, _file(graph, options, "int8")


def _manifest(
    variant: _Variant,
    entry: VariantEntry,
    file: _File,
    expected: Expected,
    parity: Parity,
    quantization: Quantization | None,
) -> Manifest:
    from saccade.exporter.graph.canonical import tensor_specs
    from saccade.exporter.graph.layer_types import opset_of
    from saccade.plugins.onnx_model import IR_VERSION

    checkpoint, graph, data = variant.reference.checkpoint, file.graph, file.data
    return Manifest(
        variant=entry,
        file=FileEntry(f"{entry.name}.onnx", hashlib.sha256(data).hexdigest(), len(data)),
        parent=variant.parent,
        inputs=tensor_specs(graph.proto.graph.input),
        outputs=tensor_specs(graph.proto.graph.output),
        preprocessing=checkpoint.preprocessing if _takes_image(expected.component) else None,
        labels=checkpoint.labels if "probabilities" in expected.answers else (),
        facts=variant.metadata,
        custom_ops=file.custom_ops,
        opset=opset_of(entry.precision),
        ir_version=IR_VERSION,
        tools={tool: version_of(tool) for tool in _TOOLS},
        cost=graph.count.cost(variant.parameters),
        parity=parity,
        float32_layers=graph.float32_layers,
        activation_ranges=graph.activation_ranges,
        inlined_ops=file.inlined_ops,
        quantization=quantization,
    )


def _takes_image(component: Component) -> bool:
    return any(spec.name == "image" for spec in component.inputs)


def _passed(entry: VariantEntry, parity: Parity, component: Component) -> Parity:
    if not parity.passed:
        problems = "; ".join(VariantReport.of(entry.name, parity).problems)
        sensitive = "sensitive_rows" in exceeded(parity.figures, parity.thresholds)
        remedy = f"{component.remedy} " if sensitive else ""
        raise GateFailed(
            f"{entry.name}: the exported file differs from the model: {problems}. Nothing was "
            f"written. {remedy.lstrip()}If this difference is acceptable, raise the limit with "
            f"--threshold, for example --threshold {loosened(parity)} LIMIT."
        )
    return parity
