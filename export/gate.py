# SPDX-License-Identifier: Apache-2.0
"""The parity gate: the float64 unfolded model against the file that will be served."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from saccade.export.compare import exceeded, figures_of, thresholds_of
from saccade.export.manifest import Manifest, Parity, check_file, read_manifests
from saccade.export.runners import Runner, onnx_runner, onnx_session, run_in_batches, torch_runner
from saccade.export.verdict import GateReport, VariantReport
from saccade.models.checkpoint import Checkpoint, load
from saccade.plugins.errors import SaccadeError, require
from saccade.plugins.files import sha256_of
from saccade.plugins.progress import progress

if TYPE_CHECKING:
    from saccade.models.nac import NAC

REAL_INPUTS, RANDOM_INPUTS, BATCHES = 256, 64, (1, 2, 7, 64)
_REFERENCE_BATCH = 8  # the unfolded read-in holds b x modules x tokens x dim numbers at a time


@dataclass(frozen=True)
class Samples:
    """What the gate asks: real images with labels first, then random ones.

    Shapes: image [n h w c] uint8, labels [m] int64 of the first m.
    """

    image: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Samples":
        """The same samples each time: spread over the calibration images, and a fixed seed.

        Raises: SaccadeError if the checkpoint has too few calibration images.
        """
        images, labels = checkpoint.calibration_images, checkpoint.calibration_labels
        if len(images) < REAL_INPUTS:
            raise SaccadeError(
                f"{checkpoint.path}: has {len(images)} calibration images, the gate needs "
                f"{REAL_INPUTS}. Save the checkpoint with at least that many."
            )
        chosen = np.linspace(0, len(images) - 1, REAL_INPUTS).astype(np.int64)
        noise = np.random.default_rng(0).integers(
            0, 256, (RANDOM_INPUTS, *images.shape[1:]), dtype=np.uint8
        )
        return cls(np.concatenate([images[chosen], noise]), labels[chosen])


@dataclass(frozen=True)
class Reference:
    """What the artefacts of a checkpoint are held against."""

    checkpoint: Checkpoint
    model: "NAC"  # float64, unfolded, all modules
    samples: Samples

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Reference":
        """The checkpoint's model in float64, with what the gate asks it.

        Raises: SaccadeError if the model takes anything but the image that the checkpoint holds
            calibration samples of.
        """
        torch = require("torch", extra="export")
        model = cast("NAC", checkpoint.build(torch.float64))
        config = model.config
        if config.input != "image" or (config.conditional and config.condition_dim):
            found = "tokens" if config.input != "image" else "an image and a condition"
            raise SaccadeError(
                f"{checkpoint.path}: this model takes {found}, but a file is proved on the "
                "calibration images, the only input that a checkpoint holds. "
                "Export a model whose only input is the image."
            )
        return cls(checkpoint, model, Samples.of(checkpoint))

    def outputs(self, budget: float) -> dict[str, np.ndarray]:
        """The answers of the unfolded float64 model at that budget.

        Shapes: logits [n k], probabilities [n k], embedding [n d] float64.
        """
        run = torch_runner(self.model.prune(budget))
        return run_in_batches(run, self.samples.image, _REFERENCE_BATCH)


def measure(
    run: Runner,
    reference: Mapping[str, np.ndarray],
    samples: Samples,
    precision: str,
    overrides: Mapping[str, float],
) -> Parity:
    """The artefact's figures against the reference, under the table with its overrides.

    Row isolation compares the answers at batch 64 with those at every other batch size, and
    with shuffled samples, where batch mates and positions differ.
    """
    thresholds = thresholds_of(precision, overrides)
    shuffled = np.random.default_rng(1).permutation(len(samples.image))
    largest = max(BATCHES)
    runs = [run_in_batches(run, samples.image, largest)]
    runs += [run_in_batches(run, samples.image, batch) for batch in BATCHES if batch != largest]
    runs += [run_in_batches(run, samples.image, batch, shuffled) for batch in (7, largest)]
    missing = sorted(set(reference) - set(runs[0]))
    if missing:
        raise SaccadeError(f"outputs {', '.join(missing)} are missing, found {', '.join(runs[0])}.")
    figures = figures_of(reference, runs, samples.labels)
    return Parity(
        passed=not exceeded(figures, thresholds),
        figures=figures,
        thresholds=thresholds,
        overridden=tuple(sorted(overrides)),
        real_inputs=len(samples.labels),
        random_inputs=len(samples.image) - len(samples.labels),
        batches=BATCHES,
    )


def verify(folder: Path | str) -> GateReport:
    """Run the gate again on everything in an artefact folder, from its own checkpoint.

    A file that was changed, or that is another model's, is a row that did not pass; the others
    are still measured. Thresholds are the table's, or the overrides that a manifest records.

    Raises: SaccadeError if there is no such folder, a manifest is wrong, or the checkpoint is
        missing or not the one that the manifests name.
    """
    folder = Path(folder)
    manifests = read_manifests(folder)
    require("torch", extra="export")
    require("onnx", extra="export")
    require("onnxruntime", extra="cpu")
    reference = Reference.of(load(_parent_path(folder, manifests)))
    rows = []
    with progress("verify", len(manifests)) as advance:
        for manifest in manifests:
            advance(0, note=manifest.variant.name)
            rows.append(_verify_variant(folder, manifest, reference))
            advance()
    return GateReport(folder, tuple(rows))


def _verify_variant(folder: Path, manifest: Manifest, reference: Reference) -> VariantReport:
    from saccade.export.claims import contradictions

    name = manifest.variant.name
    try:
        check_file(folder, manifest)
        if problems := contradictions(folder / manifest.file.name, manifest, reference.checkpoint):
            return VariantReport(name, None, problems)
        parity = measure(
            onnx_runner(onnx_session(folder / manifest.file.name)),
            reference.outputs(manifest.variant.budget),
            reference.samples,
            manifest.variant.precision,
            {each: manifest.parity.thresholds[each] for each in manifest.parity.overridden},
        )
    except SaccadeError as error:
        return VariantReport(name, None, (str(error),))
    return VariantReport.of(name, parity)


def _parent_path(folder: Path, manifests: list[Manifest]) -> Path:
    parent = manifests[0].parent
    path = folder / parent.name
    if not path.is_file():
        raise SaccadeError(
            f"{path}: missing, but the reference is computed from it. Copy the checkpoint with "
            f"SHA-256 {parent.sha256[:12]}... there, or export again."
        )
    if (found := sha256_of(path)) != parent.sha256:
        raise SaccadeError(
            f"{path}: SHA-256 is {found[:12]}..., the manifests name {parent.sha256[:12]}... as "
            "their parent. Put that checkpoint back, or export this one."
        )
    return path
