# SPDX-License-Identifier: Apache-2.0
"""The parity gate: the float64 unfolded model against the file that will be served."""

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
_STEPS = 2  # of progress for each file: the reference's answers, the file's
_REFERENCE_BATCH = 8  # an unfolded read-in holds b x modules x tokens x dim numbers at a time


class Reference:
    """Reference of a checkpoint's artefacts: its model, unfolded, in float64."""

    def __init__(self, checkpoint: Checkpoint, sizes: GateSizes | None = None) -> None:
        torch = require("torch", extra="export")
        self.checkpoint, self.sizes = checkpoint, sizes or GATE_SIZES
        self.model = cast(Family, checkpoint.build(torch.float64))
        self._float32: Family | None = None
        self._samples: dict[tuple[str, str], Samples] = {}

    def budget(self, entry: VariantEntry) -> ComputeBudget:
        """The budget of a manifest, as the model itself counts it.

        Raises: SaccadeError if the model has no such budget.
        """
        budget = self.model.budget(budget_option(entry.setting, entry.budget))
        # Releases that counted in floats kept 31 of 45 at 0.7, where half a module is rounded up.
        if entry.kept == math.floor(float(entry.budget) * entry.total + 0.5):
            return replace(budget, kept=entry.kept)
        return budget

    def variant(self, budget: ComputeBudget) -> Family:
        """The model at a budget, unfolded, in float64."""
        return self.model.at(budget)

    def float32_answers(
        self, budget: ComputeBudget, role: str, outputs: Sequence[str], inputs: Arrays
    ) -> list[dict[str, np.ndarray]]:
        """Float32 answers of the unfolded model: as it is, then with its weights perturbed.

        One run is a matter of luck on a row that a rounding decides.
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
        """Samples that the gate feeds this component; drawn once."""
        key = budget.label, role
        if key not in self._samples:
            self._samples[key] = samples_of(
                self.checkpoint, component_named(variant, role), self.sizes
            )
        return self._samples[key]


@dataclass(frozen=True)
class Expected:
    """One component's reference answers, and what it was asked.

    Shapes: each answer [n ...] float64, in the order of the samples.
    """

    component: Component
    samples: Samples
    answers: dict[str, np.ndarray]
    float32_answers: Callable[[], list[dict[str, np.ndarray]]]  # several runs, when asked for


def expected_of(
    reference: Reference,
    variant: Family,
    budget: ComputeBudget,
    role: str,
    outputs: Sequence[str],
    advance: Advance = silent,
) -> Expected:
    """The answers of the unfolded float64 model to the gate's samples; one step of progress."""
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
    """The artefact's figures against the reference, under the table with its overrides.

    The errors' floor is the table's too, unless one is given: that of an older proof.

    Row isolation compares the answers at batch 64 with those at every other batch size, and
    with shuffled samples, where batch mates and positions differ. A second runner, the same file
    with its ops computed otherwise, is asked at batch 64 only. A file that is too far off is
    measured again without the rows on which the model itself is as far off in that type.
    All of it is one step of progress.
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
    """Candidates for the gate: the file, as it runs anywhere and with its kernels.

    `folded` gives the component's model as `folded_float32` does; only half precision asks for it.
    ONNX Runtime's CPU kernels compute half precision in float32, so that there the folded
    torch model with rounded products comes first, and the file shows only that it is that model.
    """
    if entry.precision not in ("fp16", "bf16"):
        return runners_of(model, custom_ops)
    from saccade.exporter.graph.half_graph import widened_bytes

    rounded = half_runner(folded(), entry.role, outputs, entry.precision)
    return [rounded, *runners_of(widened_bytes(model), custom_ops)]


def folded_float32(variant: Family) -> Any:
    """The model that a file is made of: folded in float64, the same on every CPU, rounded once."""
    from saccade.models.fixed_order import FixedOrder

    with FixedOrder():
        folded: Any = deepcopy(variant).fold()
    return folded.float()


def runners_of(model: Path | bytes, custom_ops: Sequence[str]) -> list[Runner]:
    """The file as it runs anywhere, by the ops' bodies, and with their kernels where they stand."""
    sessions = [onnx_session(model)]
    if custom_ops and (library := available_library()):
        # The kernels are far faster than the bodies: they take the many runs.
        sessions.insert(0, onnx_session(model, kernels=library))
    return [onnx_runner(session) for session in sessions]


def verify(
    folder: ArtefactFolder | Path | str,
    gate: GateSizes | None = None,
    *,
    progress: Report | None = bar,
) -> GateReport:
    """Run the gate again on everything in an artefact folder, from its own checkpoint.

    A file that was changed, or that is another model's, is a row that did not pass; the others
    are still measured. Thresholds are the table's, or the overrides that a manifest records; the
    floor of the errors is the manifest's.

    Raises: SaccadeError if there is no such folder, a manifest is wrong, or the checkpoint is
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
