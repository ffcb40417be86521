# SPDX-License-Identifier: Apache-2.0
"""The parity gate: compare the unfolded float64 model with the file that will be served."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from saccade.errors import SaccadeError, require
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest, Parity, VariantEntry
from saccade.exporter.artefact.variant import budget_option
from saccade.exporter.gate.conditioning import ill_conditioned_rows, perturbed
from saccade.exporter.gate.metrics import FLOORS, exceeded, figures_of, row_errors, thresholds_of
from saccade.exporter.gate.report import GateReport, VariantReport
from saccade.exporter.graph.samples import GATE_SIZES, GateSizes, Samples, samples_of
from saccade.exporter.graph.trial import tried
from saccade.exporter.policy.certificate import check_certificates
from saccade.exporter.runtimes.runners import (
    Runner,
    half_runner,
    onnx_runner,
    onnx_session,
    run_in_batches,
    torch_runner,
)
from saccade.exporter.runtimes.runtime import DEFAULT, peers_of, runtime_named
from saccade.models.budget import ComputeBudget
from saccade.models.checkpoint import Checkpoint
from saccade.models.interface import Arrays, Component, Family, component_named
from saccade.plugins.native.library import available_library
from saccade.progress import (
    Advance,
    Counted,
    Report,
    bar,
    part_of,
    progress_of,
    reporting,
    silent,
)

_PERTURBATIONS = 4
_STEPS = 2  # of progress per file: answers of the reference, answers of the file
_REFERENCE_BATCH = 8  # an unfolded read-in keeps b x modules x tokens x dim numbers in memory


class Reference:
    """The reference for a checkpoint's artefacts: its model, unfolded, in float64."""

    def __init__(self, checkpoint: Checkpoint, sizes: GateSizes | None = None) -> None:
        torch = require("torch", extra="export")
        self.checkpoint, self.sizes = checkpoint, sizes or GATE_SIZES
        self.model = cast(Family, checkpoint.build(torch.float64))
        self._float32: Family | None = None
        self._samples: dict[tuple[str, str], Samples] = {}

    def budget(self, entry: VariantEntry) -> ComputeBudget:
        """Return the budget of a manifest, as the model itself counts it.

        Raises: SaccadeError if the model has no such budget.
        """
        budget = self.model.budget(budget_option(entry.setting, entry.budget))
        # Older releases counted in floats and kept 31 of 45 at 0.7, where half a module rounds up.
        if entry.kept == math.floor(float(entry.budget) * entry.total + 0.5):
            return replace(budget, kept=entry.kept)
        return budget

    def variant(self, budget: ComputeBudget) -> Family:
        """Return the model at a budget, unfolded, in float64."""
        return self.model.at(budget)

    def float32_answers(
        self, budget: ComputeBudget, role: str, outputs: Sequence[str], inputs: Arrays
    ) -> list[dict[str, np.ndarray]]:
        """Run the unfolded model in float32: once as it is, then with perturbed weights.

        If a rounding decides the answer to a row, a single run would depend on chance.
        """
        torch = require("torch", extra="export")
        if self._float32 is None:
            self._float32 = cast(Family, self.checkpoint.build(torch.float32))
        variant = self._float32.at(budget)
        models = [variant, *(perturbed(variant, seed) for seed in range(_PERTURBATIONS))]
        return [
            run_in_batches(torch_runner(model, role, outputs), inputs, _REFERENCE_BATCH)
            for model in models
        ]

    def samples(self, variant: Family, budget: ComputeBudget, role: str) -> Samples:
        """Return the samples that the gate feeds to a component; they are drawn only once."""
        key = budget.label, role
        if key not in self._samples:
            self._samples[key] = samples_of(
                self.checkpoint, component_named(variant, role), self.sizes
            )
        return self._samples[key]


@dataclass(frozen=True)
class Expected:
    """The gate's samples for one component, and the reference's answers to them.

    Shapes: each answer [n ...] float64, in the order of the samples.
    """

    component: Component
    samples: Samples
    answers: dict[str, np.ndarray]
    float32_answers: Callable[[], list[dict[str, np.ndarray]]]  # several runs, computed on demand


def expected_of(
    reference: Reference,
    variant: Family,
    budget: ComputeBudget,
    role: str,
    outputs: Sequence[str],
    advance: Advance = silent,
) -> Expected:
    """Run the unfolded float64 model on the gate's samples; this is one step of progress."""
    samples = reference.samples(variant, budget, role)
    run = torch_runner(variant, role, outputs)
    done = part_of(advance, 1, len(samples), "reference in float64")
    answers = run_in_batches(run, samples.inputs, _REFERENCE_BATCH, done=done)
    in_float32 = partial(reference.float32_answers, budget, role, outputs, samples.inputs)
    return Expected(component_named(variant, role), samples, answers, in_float32)


def measure(
    runs: Sequence[Runner],
    expected: Expected,
    precision: str,
    overrides: Mapping[str, float],
    floor: float | None = None,
    advance: Advance = silent,
) -> Parity:
    """Compare an artefact with the reference, by the table's thresholds and the overrides.

    The floor of relative errors comes from the table, unless `floor` (from an older manifest) is
    given.

    Row isolation compares the answers at batch 64 with those at every other batch size and with
    shuffled samples, where the position and the other samples of a batch differ. A second runner
    (the same file with another implementation of custom ops) runs at batch 64 only. If a file
    exceeds a threshold, it is measured again without the rows on which the model itself has such
    an error in that precision. All of it is one step of progress.
    """
    thresholds = thresholds_of(precision, overrides)
    inputs = expected.samples.inputs
    shuffled = np.random.default_rng(1).permutation(len(expected.samples))
    sizes = expected.samples.sizes
    largest = max(sizes.batches)
    run, *others = runs
    smaller = [batch for batch in sizes.batches if batch != largest]
    passes = 1 + len(smaller) + 2 + len(others)
    done = part_of(advance, 1, passes * len(expected.samples), "the exported file")
    grouped = [run_in_batches(run, inputs, largest, done=done)]
    _check_outputs(grouped[0], expected.answers)
    grouped += [run_in_batches(run, inputs, batch, done=done) for batch in smaller]
    grouped += [run_in_batches(run, inputs, batch, shuffled, done) for batch in (7, largest)]
    answers = [grouped, *([run_in_batches(other, inputs, largest, done=done)] for other in others)]
    labelled = expected.samples.labelled
    floor = FLOORS[precision] if floor is None else floor
    asked = (inputs, labelled, expected.component, floor)
    figures = figures_of(expected.answers, answers, *asked)
    too_far = {"relative_error", "one_minus_cosine", "row_isolation"} & {
        *exceeded(figures, thresholds)
    }
    if too_far and "sensitive_rows" in thresholds:
        advance(0, "the model's own rounding in float32")
        own = row_errors(expected.float32_answers(), expected.answers, floor)
        rows = ill_conditioned_rows(answers, expected.answers, own, thresholds, precision, floor)
        figures = figures_of(expected.answers, answers, *asked, rows)
        figures["float32_error"] = float(max(errors.max() for errors in own.values()))
    return Parity(
        passed=not exceeded(figures, thresholds),
        figures=figures,
        thresholds=thresholds,
        overridden=tuple(sorted(overrides)),
        real_inputs=sizes.real_inputs,
        random_inputs=sizes.random_inputs,
        batches=sizes.batches,
        floor=floor,
    )


def _check_outputs(answers: Arrays, expected: Arrays) -> None:
    if missing := sorted(set(expected) - set(answers)):
        raise SaccadeError(f"outputs {', '.join(missing)} are missing, found {', '.join(answers)}.")


def candidates_of(
    model: Path | bytes,
    custom_ops: Sequence[str],
    folded: Callable[[], Any],
    entry: VariantEntry,
    outputs: Sequence[str],
) -> list[Runner]:
    """Return what the gate compares: the file with function bodies, and with kernels if built.

    ONNX Runtime's CPU kernels compute half precision in float32. For half precision, the folded
    torch model with rounded products (from `folded`, as by `folded_float32`) therefore comes first,
    and the file only has to agree with that model.
    """
    if entry.precision not in ("fp16", "bf16"):
        return runners_of(model, custom_ops)
    from saccade.exporter.graph.half_graph import widened_bytes

    rounded = half_runner(folded(), entry.role, outputs, entry.precision)
    return [rounded, *runners_of(widened_bytes(model), custom_ops)]


def folded_float32(variant: Family) -> Any:
    """Fold in float64, the same way on every CPU, then round once: the model that is exported."""
    from saccade.models.fixed_order import FixedOrder

    with FixedOrder():
        folded: Any = deepcopy(variant).fold()
    return folded.float()


def runners_of(model: Path | bytes, custom_ops: Sequence[str]) -> list[Runner]:
    """Return runners of the file: with function bodies, and with kernels if available."""
    sessions = [onnx_session(model)]
    if custom_ops and (library := available_library()):
        # The first runner runs most often, and kernels are much faster than bodies.
        sessions.insert(0, onnx_session(model, kernels=library))
    return [onnx_runner(session) for session in sessions]


def verify(
    folder: ArtefactFolder | Path | str,
    gate: GateSizes | None = None,
    *,
    progress: Report | None = bar,
) -> GateReport:
    """Run the gate again on every file in an artefact folder, with its own checkpoint.

    A file that has changed or belongs to another model does not pass; the others are still
    measured. Thresholds come from the table and the overrides that a manifest records. The floor
    of relative errors comes from the manifest.

    Raises: SaccadeError if the folder does not exist, a manifest is wrong, or the checkpoint is
        missing or not the one that the manifests name.
    """
    folder = ArtefactFolder.open(folder)
    manifests = folder.manifests
    require("torch", extra="export")
    require("onnx", extra="export")
    runtime_named(DEFAULT).require()
    reference = Reference(folder.parent, gate)
    wrong = tried(folder, manifests)
    rows = []
    with reporting(progress), progress_of("verify", _STEPS * len(manifests)) as advance:
        for number, manifest in enumerate(manifests):
            name = manifest.variant.name
            own = Counted(advance, f"{name} ({number + 1} of {len(manifests)})")
            rows.append(_verify_variant(folder, manifest, reference, wrong, own))
            own.up_to(_STEPS)
    certificates = check_certificates(folder.path, folder.variants)
    return GateReport(folder.path, tuple(rows), tuple(certificates), folder.images_text(), folder)


def _verify_variant(
    folder: ArtefactFolder,
    manifest: Manifest,
    reference: Reference,
    wrong: Mapping[str, str],
    advance: Advance,
) -> VariantReport:
    from saccade.exporter.gate.manifest_checks import contradictions

    name = manifest.variant.name
    try:
        path, entry = folder.file(manifest), manifest.variant
        if path.name in wrong:
            return VariantReport(name, None, (wrong[path.name],))
        budget = reference.budget(entry)
        variant = reference.variant(budget)
        problems = contradictions(path, manifest, reference.checkpoint, variant, budget)
        if problems:
            return VariantReport(name, None, problems)
        outputs = [spec.name for spec in manifest.outputs]
        folded = partial(folded_float32, variant)
        candidates = candidates_of(path, manifest.custom_ops, folded, entry, outputs)
        parity = measure(
            [*candidates, *peers_of(folder, manifest).values()],
            expected_of(reference, variant, budget, entry.role, outputs, advance),
            entry.precision,
            manifest.parity.overrides,
            manifest.parity.floor,
            advance,
        )
    except SaccadeError as error:
        return VariantReport(name, None, (str(error),))
    return VariantReport.of(name, parity)
