# SPDX-License-Identifier: Apache-2.0
"""A variant as a function on the samples of one split, whose answers a policy compares."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation.evaluated_model import DataSplit, EvaluatedModel
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.policy.answers import MEASURES, mask_confidence
from saccade.exporter.runtimes.runners import run_in_batches
from saccade.models.data.samples.images import fitted
from saccade.models.interface import Arrays
from saccade.models.preprocessing import Preprocessing

_BATCH = 32
_CHUNK = 256  # masks of all images may need much memory
Run = Callable[[Arrays], np.ndarray]  # any rows of the inputs -> logits [rows classes]


@dataclass(frozen=True)
class Decisions:
    """What a variant would answer on each sample.

    `labelling` are zero-shot labels and their templates, None if the model has its own classes.
    Shapes: logits [n classes]; labels [n], -1 for a class that the model does not have, or None
            where the data has none.
    """

    logits: np.ndarray
    labels: np.ndarray | None
    data: str
    data_sha256: str
    labelling: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    @staticmethod
    def joined(parts: "Sequence[Decisions]") -> "Decisions":
        """Return the decisions on the samples of all parts, which have labels if all parts do."""
        labels = [part.labels for part in parts if part.labels is not None]
        return replace(
            parts[-1],
            logits=np.concatenate([part.logits for part in parts]),
            labels=np.concatenate(labels) if len(labels) == len(parts) else None,
        )


@dataclass(frozen=True)
class Segments:
    """The segmentations of a variant, and its confidence in them by each measure.

    Shapes: owners [n h w], the slot of each position; confidence [measures n]; samples [n], a hash
            of each image.
    """

    owners: np.ndarray
    confidence: np.ndarray
    samples: tuple[bytes, ...]
    data: str
    data_sha256: str

    @staticmethod
    def joined(parts: "Sequence[Segments]", limit: int | None) -> "Segments":
        """Return the first segmentations of several splits, at most `limit`."""
        hashes = "".join(part.data_sha256 for part in parts)
        sha256 = hashlib.sha256(hashes.encode()).hexdigest()
        return Segments(
            np.concatenate([part.owners for part in parts])[:limit],
            np.concatenate([part.confidence for part in parts], axis=1)[:, :limit],
            tuple(sample for part in parts for sample in part.samples)[:limit],
            parts[0].data,
            parts[0].data_sha256 if len(parts) == 1 else sha256,
        )


@dataclass(frozen=True)
class Decider(DataSplit):
    """A variant as a function from inputs to logits, and the samples of one split.

    `of` returns another variant of the model as such a function.

    Shapes: inputs [n ...] by name, labels [n] or None; `independent` are the rows that are
        independent draws, None: all.
    """

    run: Run
    of: Callable[[EvaluatedModel], Run]
    inputs: Arrays
    labels: np.ndarray | None
    independent: np.ndarray | None = None
    labelling: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def logits(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the logits of some samples, or of all.

        Shapes: rows [r] -> [r classes].
        """
        inputs = {name: array[rows] for name, array in self.inputs.items()}
        return run_in_batches(lambda some: {"logits": self.run(some)}, inputs, _BATCH)["logits"]

    def variant(self, model: EvaluatedModel) -> "Decider":
        """Return another variant of the model on the same samples, which are not loaded again.

        The variant takes images of the same size.
        """
        return replace(self, run=self.of(model))

    def decisions(self) -> Decisions:
        """Return the logits of the samples that are independent draws."""
        rows = slice(None) if self.independent is None else self.independent
        labels = None if self.labels is None else self.labels[rows]
        found = self.logits(rows)
        return Decisions(found, labels, self.name, self.sha256, self.labelling)


@dataclass(frozen=True)
class Segmenter:
    """Images with the initial slots of each, which variants segment.

    `within` are the splits of data of this name that contain these images but have other hashes,
    because they have more of them.
    Shapes: images uint8 [n h w c], an array or `samples.images.Images`; states [n k s].
    """

    images: np.ndarray
    states: np.ndarray
    data: str
    data_sha256: str
    within: tuple[str, ...] = ()

    def inputs(self, rows: np.ndarray) -> Arrays:
        """Return some of the images with initial slots as of a request with these images alone.

        Shapes: rows [r] -> each [r ...].
        """
        return {"image": np.asarray(self.images[rows]), "initial_state": self.states[: len(rows)]}

    @staticmethod
    def of(model: EvaluatedModel) -> Run:
        """Return a variant as a function from inputs to masks.

        Shapes: inputs [b ...] -> [b k h w].
        """
        return lambda inputs: model.component("").run(inputs)["masks"]

    def segments(self, model: EvaluatedModel) -> Segments:
        """Return a variant's segmentation of each image.

        Raises: SaccadeError if the masks contain what is not a number.
        """
        owners, sure, samples = [], [], list[bytes]()
        for at in range(0, len(self.images), _CHUNK):
            part = slice(at, at + _CHUNK)
            images = np.asarray(self.images[part])
            samples += [hashlib.sha256(image.tobytes()).digest() for image in images]
            inputs = {"image": images, "initial_state": self.states[part]}
            masks = model.component("")(inputs)["masks"]
            if not np.isfinite(masks).all():
                raise SaccadeError(
                    f"{model.name}: answers some samples with NaN or infinity. Run `saccade "
                    "verify` on the folder, and leave the variant out of the export."
                )
            owners.append(masks.argmax(1).astype(np.uint8))
            sure.append(np.stack([mask_confidence(measure, masks) for measure in MEASURES]))
        confidence = np.concatenate(sure, axis=1)
        return Segments(
            np.concatenate(owners), confidence, tuple(samples), self.data, self.data_sha256
        )


Decide = Callable[[EvaluatedModel, EvaluateOptions, str], Decider]


class Deciders:
    """The variants of a folder on one split, whose samples are loaded once per preprocessing."""

    def __init__(self, decide: Decide, options: EvaluateOptions, split: str) -> None:
        self._decide, self._asked = decide, (options, split)
        self._loaded: dict[Preprocessing | None, Decider] = {}
        self._drawn: dict[Preprocessing | None, Arrays] = {}

    def of(self, model: EvaluatedModel) -> Decider:
        """Return a variant on samples as it takes them."""
        taken = model.preprocessing
        if taken not in self._loaded:
            self._loaded[taken] = self._decide(model, *self._asked)
        return self._loaded[taken].variant(model)

    def on_rows(self, model: EvaluatedModel, rows: np.ndarray) -> Run:
        """Return a variant as a function of `row`, places among these rows, always the same ones.

        The rows are in memory in its form, whatever the size of its images.
        """
        decider, taken = self.of(model), model.preprocessing
        if taken not in self._drawn:
            self._drawn[taken] = {name: array[rows] for name, array in decider.inputs.items()}
        own = self._drawn[taken]
        return lambda some: decider.run({name: array[some["row"]] for name, array in own.items()})

    def on_files(self, model: EvaluatedModel) -> Run:
        """Return a variant as a function of what a caller sends: its router decodes the images."""
        run, taken = self.of(model).run, model.preprocessing
        if taken is None:
            return run
        return lambda sent: run({**sent, "image": fitted(sent["image"], taken)})


Segment = Callable[[EvaluatedModel, EvaluateOptions, str], Segmenter]  # the images of one split
SegmentScored = Callable[[EvaluatedModel, EvaluateOptions], Segmenter]  # the images of a score
