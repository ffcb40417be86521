# SPDX-License-Identifier: Apache-2.0
"""The parity gate: compare the unfolded float64 model with the file that will be served."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, require
from saccade.core.machine import cores
from saccade.core.progress import (
    Advance,
    Report,
    StepCounter,
    bar,
    part_of,
    progress_of,
    reporting,
    silent,
)
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import (
    FileEntry,
    Manifest,
    Parity,
    VariantEntry,
    by_parent,
)
from saccade.exporter.gate.further_samples import compare_further
from saccade.exporter.gate.metrics import (
    FLOORS,
    exceeded,
    figures_of,
    ill_conditioned_rows,
    row_errors,
    thresholds_of,
)
from saccade.exporter.gate.reference import ExpectedAnswers, Reference
from saccade.exporter.gate.report import GateReport, VariantReport
from saccade.exporter.graph.samples import GateLevel, GateSizes
from saccade.exporter.graph.trial import tried
from saccade.exporter.policy.policy import check_certificates
from saccade.exporter.runtimes.runners import (
    Runner,
    half_runner,
    onnx_runner,
    onnx_session,
    run_in_batches,
)
from saccade.exporter.runtimes.runtime import DEFAULT, peers_of, runtime_named
from saccade.models.interface import Arrays
from saccade.plugins.native.library import available_library

_STEPS = 2  # of progress per file: answers of the reference, answers of the file

# A way to run a file, opened when it is needed, so that one after another is in memory.
Opener = Callable[[], Runner]


def measure(
    openers: Sequence[Opener],
    expected: ExpectedAnswers,
    precision: str,
    overrides: Mapping[str, float],
    floor: float | None = None,
    advance: Advance = silent,
) -> Parity:
    """Compare an artefact with the reference, by the table's thresholds and the overrides.

    The floor of relative errors comes from the table, unless `floor` (from an older manifest) is
    given.

    Row isolation compares the answers in the largest batches with those in every other batch size
    and in the largest, each time of shuffled samples: size, position and the other samples of a
    batch differ. Further ways to run the file (the same file with another implementation of custom
    ops) run in the largest batches only. A file of a type narrower than float32 is also compared
    with the model in float32, on further samples; of two figures, the worse counts. If a file
    exceeds a threshold, it is measured again without the rows on which the model itself has such an
    error in that precision. All of it is one step of progress.
    """
    began, thresholds = time.monotonic(), thresholds_of(precision, overrides)
    inputs, sizes = expected.samples.inputs, expected.samples.sizes
    largest, first, *others = max(sizes.batches), *openers
    passes = len(sizes.batches) + 1 + len(others)
    done = part_of(advance, 1, passes * len(expected.samples), "the exported file")
    run = first()
    grouped = [run_in_batches(run, inputs, largest, done=done)]
    _check_outputs(grouped[0], expected.answers)
    for number, batch in enumerate(sorted(sizes.batches)):
        shuffled = np.random.default_rng(1 + number).permutation(len(expected.samples))
        grouped.append(run_in_batches(run, inputs, batch, shuffled, done))
    further = None
    if precision != "fp32" and sizes.score_s is not None and expected.scored:
        advance(0, "further samples in float32")
        limit = thresholds["score_points"]
        further = compare_further(run, expected.scored, limit, sizes.score_s, time.monotonic)
    del run
    answers, more = [grouped], [[*further.answers]] if further else []
    for other in others:
        run = other()
        answers.append([run_in_batches(run, inputs, largest, done=done)])
        if further:
            more.append([run_in_batches(run, further.inputs, largest)])
        del run
    floor = FLOORS[precision] if floor is None else floor
    compared = _Comparison(precision, thresholds, floor, expected, advance)
    figures = compared.figures(expected.answers, answers, inputs, expected.samples.labelled)
    score = None
    if further:
        score = further.score
        found = compared.figures(further.expected, more, further.inputs, further.labelled)
        figures |= {name: max(value, figures.get(name, value)) for name, value in found.items()}
    if score is not None:
        figures["score_points"] = abs(score.points)
    return Parity(
        passed=not exceeded(figures, thresholds),
        figures=figures,
        thresholds=thresholds,
        overridden=tuple(sorted(overrides)),
        real_inputs=sizes.real_inputs,
        random_inputs=sizes.random_inputs,
        batches=sizes.batches,
        floor=floor,
        gate=sizes.level,
        seconds=round(time.monotonic() - began, 2),
        score=score,
    )


@dataclass(frozen=True)
class _Comparison:
    """How answers are compared: the figures, and which rows they leave out."""

    precision: str
    thresholds: Mapping[str, float]
    floor: float
    expected: ExpectedAnswers
    advance: Advance

    def figures(
        self,
        reference: Arrays,
        runs: Sequence[Sequence[Arrays]],
        inputs: Arrays,
        labelled: Arrays,
    ) -> dict[str, float]:
        """Return the figures, without rows on which the model itself has such an error."""
        asked = (inputs, labelled, self.expected.component, self.floor)
        figures = figures_of(reference, runs, *asked)
        too_far = {"relative_error", "one_minus_cosine", "row_isolation"} & {
            *exceeded(figures, self.thresholds)
        }
        if too_far and "sensitive_rows" in self.thresholds:
            self.advance(0, "the model's own rounding in float32")
            own = row_errors([*self.expected.float32_answers(inputs)], reference, self.floor)
            limits = self.thresholds, self.precision, self.floor
            rows = ill_conditioned_rows(runs, reference, own, *limits)
            figures = figures_of(reference, runs, *asked, rows)
            figures["float32_error"] = float(max(errors.max() for errors in own.values()))
        return figures


def _check_outputs(answers: Arrays, expected: Arrays) -> None:
    if missing := sorted(set(expected) - set(answers)):
        raise SaccadeError(f"outputs {', '.join(missing)} are missing, found {', '.join(answers)}.")


def candidates_of(
    path: Path,
    file: FileEntry,
    custom_ops: Sequence[str],
    folded: Callable[[], Any],
    entry: VariantEntry,
    outputs: Sequence[str],
    *,
    for_gpu: bool = False,
) -> list[Opener]:
    """Return what the gate compares: the file with function bodies, and with kernels if built.

    An int8 file for a GPU runs node by node, as dequantized numbers: the integer kernels of a CPU
    without VNNI saturate, and those of a GPU do not.

    ONNX Runtime's CPU kernels compute half precision in float32. For half precision, the folded
    torch model with rounded products (from `folded`, as by `folded_float32`) therefore comes first,
    and the file only has to agree with that model.
    """
    if entry.precision not in ("fp16", "bf16"):
        opened = partial(onnx_session, path, optimized=not for_gpu)
        return runners_of(opened, custom_ops)
    from saccade.exporter.graph.half_graph import widened_session

    return [
        lambda: half_runner(folded(), entry.role, outputs, entry.precision),
        *runners_of(partial(widened_session, path, file), custom_ops),
    ]


def runners_of(opened: Callable[..., Any], custom_ops: Sequence[str]) -> list[Opener]:
    """Return runners of the session `opened`: with function bodies, and kernels if available."""
    libraries: list[Path | None] = [None]
    if custom_ops and (library := available_library()):
        # The first runner runs most often, and kernels are much faster than bodies.
        libraries.insert(0, library)
    return [partial(_runner, opened, library) for library in libraries]


def _runner(opened: Callable[..., Any], library: Path | None) -> Runner:
    return onnx_runner(opened(threads=cores(), kernels=library))


def verify(
    folder: ArtefactFolder | Path | str,
    gate: GateLevel | GateSizes = "standard",
    *,
    progress: Report | None = bar,
) -> GateReport:
    """Run the gate again on every file in an artefact folder, with its own checkpoint.

    A file that has changed or belongs to another model does not pass; the others are still
    measured. `gate` is the amount of evidence: quick, standard, thorough, or your own sizes.
    Thresholds come from the table and the overrides that a manifest records. The floor of relative
    errors comes from the manifest.

    Raises: SaccadeError if the folder does not exist, a manifest is wrong, or the checkpoint is
        missing or not the one that the manifests name.
    """
    folder = ArtefactFolder.open(folder)
    manifests = folder.manifests
    require("torch", extra="export")
    require("onnx", extra="export")
    runtime_named(DEFAULT).require()
    wrong = tried(folder, manifests)
    rows, number = dict[str, VariantReport](), 0
    with reporting(progress), progress_of("verify", _STEPS * len(manifests)) as advance:
        for own_manifests in by_parent(manifests):  # one checkpoint in memory at a time
            reference = Reference(folder.parent_of(own_manifests[0]), gate)
            for manifest in own_manifests:
                name, number = manifest.variant.name, number + 1
                own = StepCounter(advance, f"{name} ({number} of {len(manifests)})")
                rows[name] = _verify_variant(folder, manifest, reference, wrong, own)
                own.up_to(_STEPS)
    ordered = tuple(rows[manifest.variant.name] for manifest in manifests)
    certificates = check_certificates(folder.path, folder.variants)
    return GateReport(folder.path, ordered, tuple(certificates), folder.images_text(), folder)


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
        path, entry = folder.file(manifest), manifest.exported
        if path.name in wrong:
            return VariantReport(name, None, (wrong[path.name],))
        budget = reference.budget(entry)
        facts = reference.runtime_metadata(budget)
        problems = contradictions(path, manifest, reference.sized(budget), facts, budget)
        if problems:
            return VariantReport(name, None, problems)
        outputs = [spec.name for spec in manifest.outputs]
        total = manifest.cost.multiply_adds.total
        expected = reference.expected(budget, entry.role, outputs, total, advance)
        reference.release()
        folded = partial(reference.folded, budget)
        candidates = candidates_of(
            path,
            manifest.file,
            manifest.custom_ops,
            folded,
            entry,
            outputs,
            for_gpu=manifest.is_int8_for_gpu,
        )
        peers = [partial(_same, run) for run in peers_of(folder, manifest).values()]
        parity = measure(
            [*candidates, *peers],
            expected,
            entry.precision,
            manifest.parity.overrides,
            manifest.parity.floor,
            advance,
        )
    except SaccadeError as error:
        return VariantReport(name, None, (str(error),))
    return VariantReport.of(name, parity)


def _same(run: Runner) -> Runner:
    return run
