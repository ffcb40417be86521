# SPDX-License-Identifier: Apache-2.0
"""What every variant answered on the calibration samples, and how sure it was."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, require
from saccade.core.schema import Positive
from saccade.models.scores.ari import adjusted_rand_index

# What the router runs, so that both compare the same figures.
_ROUTER: Any = import_module("saccade.model_repository.router.confidence")
MEASURES: tuple[str, ...] = tuple(_ROUTER.MEASURES)
DECIDES: tuple[str, ...] = tuple(_ROUTER.DECIDES)  # outputs from which a policy can decide
mask_confidence, stops = _ROUTER.mask_confidence, _ROUTER.stops
LEARN_SHARE = 0.4  # of the samples choose; the rest certify
SPACES = "spaces."  # prefix of the names of arrays of the router's spaces
_TEMPERATURES = (0.05, 20.0)


@dataclass(frozen=True)
class CalibratedVariant:
    """A variant that took part in the calibration."""

    variant: str
    sha256: str
    seconds: Positive  # per sample, as `saccade bench` measured it
    temperature: Positive


@dataclass(frozen=True)
class VariantAnswers:
    """One variant on all samples.

    Shapes: logits [n classes]; classes int32 [n], the answers; None: of the largest logits.
    Units:  seconds per sample, measured by `saccade bench`.
    """

    name: str
    sha256: str
    seconds: float
    logits: np.ndarray
    classes: np.ndarray | None = None


@dataclass(frozen=True)
class VariantSegments:
    """One variant that segments, on all samples.

    Shapes: owners [n h w], the slot of each position; confidence [measures n].
    Units:  seconds per sample, measured by `saccade bench`.
    """

    name: str
    sha256: str
    seconds: float
    owners: np.ndarray
    confidence: np.ndarray


@dataclass(frozen=True)
class Answers:
    """Answers and confidences of all variants, the cheapest first; the full model is `full`.

    The first `learn` samples choose chains and thresholds, the others certify them. If all are from
    the same data, they are in a random order, which does not depend on what is in them.
    Of segmentations, `agreement` is the adjusted Rand index with the full model's, and `classes`
    are 0 if that is enough to count as the same answer, else 1. Of embeddings, `classes` are the
    places of the nearest neighbors in an index, and `spaces` the arrays of the router's spaces.
    Shapes: classes [v n] int32, confidence [measures v n] float64, labels [n] int32 or None,
            agreement [v n] float64 or None.
    """

    variants: tuple[CalibratedVariant, ...]
    full: int
    learn: int
    classes: np.ndarray
    confidence: np.ndarray
    labels: np.ndarray | None
    agreement: np.ndarray | None = None
    apart: bool = False  # whether those that choose are other data, maybe not like the traffic
    spaces: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Number of samples."""
        return int(self.classes.shape[1])

    @cached_property
    def differs(self) -> np.ndarray:
        """Whether each answer is another one than the full model's.

        Shapes: -> float64 [v n] of 0 and 1.
        """
        return (self.classes != self.classes[self.full]).astype(np.float64)

    @cached_property
    def lost(self) -> np.ndarray:
        """What each answer loses against the full model's: 1 if only it is wrong, -1 if only the
        full model is.

        Shapes: -> float64 [v n] of -1, 0 and 1.
        Raises: SaccadeError without labels.
        """
        if self.labels is None:
            raise SaccadeError(
                "--against labels: the data has no labels. Pass data with labels, or --against "
                "full, which compares with the answers of the full model."
            )
        errors = (self.classes != self.labels).astype(np.float64)
        return errors - errors[self.full]

    def part(self, rows: slice) -> "Answers":
        """The same for some of the samples."""
        labels = None if self.labels is None else self.labels[rows]
        agreement = None if self.agreement is None else self.agreement[:, rows]
        return replace(
            self,
            classes=self.classes[:, rows],
            confidence=self.confidence[:, :, rows],
            labels=labels,
            agreement=agreement,
        )

    @property
    def learning(self) -> "Answers":
        """The samples that choose."""
        return self.part(slice(None, self.learn))

    @property
    def testing(self) -> "Answers":
        """The samples that certify."""
        return self.part(slice(self.learn, None))

    @property
    def like_traffic(self) -> "Answers":
        """The samples from which costs follow."""
        return self.testing if self.apart else self

    def to_npz(self, facts: bytes) -> bytes:
        """The arrays as an .npz, from which `verify` computes the certificate again.

        `facts` are what else the policies follow from, such as temperatures, as bytes.
        """
        arrays = {"classes": self.classes, "confidence": self.confidence}
        if self.agreement is not None:
            arrays = {"agreement": self.agreement, "confidence": self.confidence}
        if self.labels is not None:
            arrays["labels"] = self.labels
        arrays |= {f"{SPACES}{name}": array for name, array in self.spaces.items()}
        arrays["facts"] = np.frombuffer(facts, np.uint8)
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)
        return file.getvalue()


def answers_of(
    variants: Sequence[VariantAnswers],
    labels: np.ndarray | None,
    *,
    full: str,
    seed: int,
    apart: int = 0,
) -> Answers:
    """Turn logits into answers and calibrated confidences.

    The first `apart` samples are from other data and choose. If there are none, the samples are put
    into a random order, and a part of them chooses.

    Each variant's temperature is the one at which the learning samples' true labels, or without
    labels the full model's answers, are the most probable.

    Shapes: labels [n] or None; -1 is a class that the variants do not have.
    Raises: SaccadeError if a variant answered with what is not a number.
    """
    ordered = sorted(variants, key=lambda variant: variant.seconds)
    order, learn = _order(len(ordered[0].logits), seed, apart)
    at = [variant.name for variant in ordered].index(full)
    logits = [variant.logits[order].astype(np.float64) for variant in ordered]
    for variant, values in zip(ordered, logits, strict=True):
        check_finite(variant.name, values)
    likely = np.stack([values.argmax(-1) for values in logits]).astype(np.int32)
    given = [variant.classes[order] for variant in ordered if variant.classes is not None]
    truths = None if labels is None else labels[order].astype(np.int32)
    # A class that no variant has, -1, tells nothing about their temperatures.
    targets = (likely[at] if truths is None else np.where(truths < 0, likely[at], truths))[:learn]
    temperatures = [_temperature(values[:learn], targets) for values in logits]
    confidence = np.stack(
        [
            np.stack(
                [
                    _ROUTER.confidence(measure, values, temperature)
                    for values, temperature in zip(logits, temperatures, strict=True)
                ]
            )
            for measure in MEASURES
        ]
    )
    return Answers(
        variants=_calibrated(ordered, temperatures),
        full=at,
        learn=learn,
        classes=np.stack(given) if given else likely,
        confidence=confidence,
        labels=truths,
        apart=apart > 0,
    )


def check_finite(name: str, values: np.ndarray) -> None:
    """Check that a variant's answers are numbers.

    Raises: SaccadeError otherwise.
    """
    if not np.isfinite(values).all():
        raise SaccadeError(
            f"{name}: answers some samples with NaN or infinity. Run `saccade verify` on the "
            "folder, and leave the variant out of the export."
        )


def segment_answers_of(
    variants: Sequence[VariantSegments], *, full: str, seed: int, min_ari: float, apart: int = 0
) -> Answers:
    """Compare segmentations with the full model's; order and `apart` as in `answers_of`.

    Slots may be numbered differently: the adjusted Rand index does not depend on their order.
    """
    ordered = sorted(variants, key=lambda variant: variant.seconds)
    order, learn = _order(len(ordered[0].owners), seed, apart)
    at = [variant.name for variant in ordered].index(full)
    agreement = np.stack(
        [adjusted_rand_index(ordered[at].owners, variant.owners)[order] for variant in ordered]
    )
    return Answers(
        variants=_calibrated(ordered, [1.0] * len(ordered)),
        full=at,
        learn=learn,
        classes=agreement_classes(agreement, min_ari),
        confidence=np.stack([variant.confidence[:, order] for variant in ordered], axis=1),
        labels=None,
        agreement=agreement,
        apart=apart > 0,
    )


def _calibrated(
    ordered: Sequence[VariantAnswers | VariantSegments], temperatures: Sequence[float]
) -> tuple[CalibratedVariant, ...]:
    return tuple(
        CalibratedVariant(variant.name, variant.sha256, variant.seconds, temperature)
        for variant, temperature in zip(ordered, temperatures, strict=True)
    )


def _order(n: int, seed: int, apart: int) -> tuple[np.ndarray, int]:
    """Return the order of the samples, and how many of the first ones choose."""
    if apart:
        return np.arange(n), apart
    return np.random.default_rng(seed).permutation(n), round(LEARN_SHARE * n)


def agreement_classes(agreement: np.ndarray, min_ari: float) -> np.ndarray:
    """Return 0 where a segmentation counts as the full model's, else 1.

    Shapes: [v n] -> int32 [v n].
    """
    return (agreement < min_ari).astype(np.int32)


def _temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """The temperature with the smallest cross entropy.

    Source: Guo et al. 2017 (arXiv 1706.04599), section 4.2.
    """
    optimize = require("scipy.optimize", extra="bench")
    rows = np.arange(len(targets))

    def cross_entropy(logarithm: float) -> float:
        scaled = logits / np.exp(logarithm)
        scaled = scaled - scaled.max(-1, keepdims=True)
        return float((np.log(np.exp(scaled).sum(-1)) - scaled[rows, targets]).mean())

    found = optimize.minimize_scalar(cross_entropy, bounds=np.log(_TEMPERATURES), method="bounded")
    return round(float(np.exp(found.x)), 6)
