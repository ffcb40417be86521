# SPDX-License-Identifier: Apache-2.0
"""What the variants of a calibration answer: on the data that certifies, and on what chooses."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from saccade.core.errors import MissingPackage, SaccadeError
from saccade.core.progress import progress_of
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.decisions import Decide, Deciders, Decisions, Segment, Segments
from saccade.exporter.evaluation.embedding_samples import (
    FIT_SHARE,
    Neighborhood,
    neighbor_answers,
)
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.policy.answers import (
    Answers,
    VariantAnswers,
    VariantSegments,
    answers_of,
    segment_answers_of,
)
from saccade.exporter.policy.bounds import MOST_SAMPLES
from saccade.exporter.policy.certify import least_samples
from saccade.exporter.policy.options import MIN_ARI, CalibrateOptions
from saccade.models.checkpoint import Checkpoint
from saccade.models.checkpoint_folder import checkpoint_name
from saccade.models.data.calibration import has_training_samples
from saccade.models.data.datasets import is_unlabelled
from saccade.models.data.splits import SPLITS
from saccade.models.entry import EvaluationTask, imported

_DIGITS = 5  # decimal places in which answers to the same image agree, whatever their batch
_BY_CHANCE = 0.01  # share of samples


@dataclass(frozen=True)
class AnsweredSamples:
    """What all variants answer, and what one does: on the data, and on other data that chose."""

    answers: Answers
    data: Decisions | Segments
    chose: Decisions | Segments | None
    neighborhood: Neighborhood | None = None  # of embeddings


@dataclass(frozen=True)
class Variants:
    """The variants to calibrate, with their measured speeds."""

    folder: ArtefactFolder
    models: tuple[EvaluatedModel, ...]
    measured: Mapping[str, FrontierEntry]
    full: str

    @property
    def full_at(self) -> int:
        """The place of the full model among the models."""
        return [model.name for model in self.models].index(self.full)

    def files(self, model: EvaluatedModel) -> VariantFiles:
        """Return the files of one of the models."""
        (files,) = (variant for variant in self.folder.variants if variant.name == model.name)
        return files

    def source(self, model: EvaluatedModel) -> tuple[str, str, float]:
        """Return a variant's name, hash, and seconds per sample."""
        return model.name, self.files(model).sha256, self.measured[model.name].seconds


def answered(
    variants: Variants, task: EvaluationTask, options: CalibrateOptions
) -> AnsweredSamples:
    """Run all variants on the data.

    Raises: SaccadeError if the data cannot certify anything, or shares samples with what chooses.
    """
    return (_segmented if task.segments else _classified)(variants, task, options)


def _classified(
    variants: Variants, task: EvaluationTask, options: CalibrateOptions
) -> AnsweredSamples:
    """What variants that choose one of several classes answer, and the data."""
    decide: Decide = imported(task.decide)
    trained = _trained(variants)
    _check_split(variants, trained, decide, options)
    sources = [Deciders(decide, _asked(options, data), split) for data, split in _parts(options)]
    first = [source.of(variants.models[0]) for source in sources]
    if options.labels and all(one.labels is one.labelling is None for one in first):
        raise SaccadeError(
            f"--labels {options.labels}: names the classes of labeled data, but "
            f"{first[-1].name} has no labels. Drop it, or sort the images into one folder per "
            "class."
        )
    found = [
        [_first(source.of(model).decisions(), options.limit) for source in sources]
        for model in _each(variants)
    ]
    data = found[0][-1]
    for one in found[0]:
        _check_labels(one, data, options)
    _check_samples(data.data, len(data.logits), options)
    for at, checkpoint in trained:
        decider = sources[-1].of(variants.models[at])
        if decider.inputs.keys() <= checkpoint.calibration.keys():
            known = {name: checkpoint.calibration[name] for name in decider.inputs}
            seen = _rounded(replace(decider, inputs=known).logits())
            _check_unseen(seen, _rounded(found[at][-1].logits), checkpoint, data.data, options)
    apart = _apart(found[0], [_rounded(one.logits) for one in found[variants.full_at]])
    joined = [Decisions.joined(parts) for parts in found]
    compared = [
        VariantAnswers(*variants.source(model), decided.logits)
        for model, decided in zip(variants.models, joined, strict=True)
    ]
    chose = found[0][0] if apart else None
    if options.embedding:
        fitted = chose or data
        source = fitted.data, fitted.data_sha256
        answers, neighborhood = neighbor_answers(
            compared, source, options, full=variants.full, apart=apart
        )
        return AnsweredSamples(answers, data, chose, neighborhood)
    answers = answers_of(
        compared, joined[0].labels, full=variants.full, seed=options.seed, apart=apart
    )
    return AnsweredSamples(answers, data, chose)


def _segmented(
    variants: Variants, task: EvaluationTask, options: CalibrateOptions
) -> AnsweredSamples:
    """What variants that segment images answer, and the data."""
    segment: Segment = imported(task.segments)
    parts = _parts(options)
    # What chooses starts from other slots than what certifies, in every split.
    seeds = [options.seed + at * len(SPLITS) for at in reversed(range(len(parts)))]
    loaded = [
        [
            segment(variants.models[0], replace(_asked(options, data), seed=seed), one)
            for one in _splits(data, split)
        ]
        for seed, (data, split) in zip(seeds, parts, strict=True)
    ]
    found = [
        [
            Segments.joined([one.segments(model) for one in splits], options.limit)
            for splits in loaded
        ]
        for model in _each(variants)
    ]
    data = found[0][-1]
    _check_samples(data.data, len(data.owners), options)
    for _, checkpoint in _trained(variants):
        images = [sha256(image.tobytes()).digest() for image in checkpoint.calibration["image"]]
        _check_unseen(images, data.samples, checkpoint, data.data, options)
    apart = _apart(found[0], [one.samples for one in found[0]])
    joined = [Segments.joined(parts, None) for parts in found]
    compared = [
        VariantSegments(*variants.source(model), one.owners, one.confidence)
        for model, one in zip(variants.models, joined, strict=True)
    ]
    answers = segment_answers_of(
        compared,
        full=variants.full,
        seed=options.seed,
        min_ari=options.min_ari or MIN_ARI,
        apart=apart,
    )
    return AnsweredSamples(answers, data, found[0][0] if apart else None)


def _trained(variants: Variants) -> list[tuple[int, Checkpoint]]:
    """The checkpoints that contain training samples, each with the place of a variant.

    The variant takes images of the checkpoint's size.
    """
    trained = dict[str, tuple[int, Checkpoint]]()
    for at, model in enumerate(variants.models):
        try:
            checkpoint = variants.folder.checkpoint_of(variants.files(model).main)
        except MissingPackage:
            note("torch is not installed, so the data is not compared with the training images")
            return []
        if (
            checkpoint is not None
            and has_training_samples(checkpoint)
            and checkpoint.preprocessing == model.preprocessing
        ):
            trained.setdefault(checkpoint.sha256, (at, checkpoint))
    return list(trained.values())


def _check_split(
    variants: Variants,
    trained: Sequence[tuple[int, Checkpoint]],
    decide: Decide,
    options: CalibrateOptions,
) -> None:
    """Check, before any variant runs, that the samples of `--split` did not train the model.

    Raises: SaccadeError if they did.
    """
    name = Path(options.data or "").name
    for at, checkpoint in trained:
        if options.split in ("train", "all") and name == checkpoint.card.get("data"):
            split = decide(variants.models[at], _asked(options, options.data), "train")
            if split.sha256 == checkpoint.card["data_sha256"]["train"]:
                found = f"--split {options.split} has the samples"
                raise _trained_on(found, checkpoint, name, options)


def _check_unseen(
    known: Sequence[bytes],
    samples: Sequence[bytes],
    checkpoint: Checkpoint,
    data: str,
    options: CalibrateOptions,
) -> None:
    """Check that hardly any training sample in a checkpoint is among those that certify.

    Raises: SaccadeError if more are.
    """
    there = set(samples)
    seen = sum(sample in there for sample in known)
    if seen > _BY_CHANCE * len(known):
        found = f"found {seen} of {len(known)} samples"
        raise _trained_on(found, checkpoint, data, options)


def _trained_on(
    found: str, checkpoint: Checkpoint, data: str, options: CalibrateOptions
) -> SaccadeError:
    advice = "--split test (if it has too few samples, also --choose-split validation)"
    if options.split in ("test", "validation"):
        advice = "the files of the training, if some were added or removed (this changes splits)"
    return SaccadeError(
        f"{data}: {found} that trained {checkpoint_name(checkpoint.path)}, expected none: variants "
        "agree more often on these than on other samples, so they cannot certify. Pass "
        f"{advice}, or --data that the model was not trained on."
    )


def _parts(options: CalibrateOptions) -> list[tuple[str | None, str]]:
    """The data and the splits to load: what chooses, if it is other data, and what certifies."""
    own = (options.data, options.split)
    if options.choose_data is None and options.choose_split is None:
        return [own]
    return [(options.choose_data or options.data, options.choose_split or "all"), own]


def _asked(options: CalibrateOptions, data: str | None) -> EvaluateOptions:
    return EvaluateOptions(
        data=data,
        limit=options.limit,
        labels=options.labels,
        data_root=options.data_root,
        skip_bad=options.skip_bad,
        templates=options.templates,
        seed=options.seed,
        runtime=options.runtime,
        op_library=options.op_library,
    )


def _each(variants: Variants) -> Iterator[EvaluatedModel]:
    """The models one after the other, with a progress bar."""
    with progress_of("calibrate", len(variants.models)) as advance:
        for model in variants.models:
            advance(0, note=model.name)
            yield model
            advance()


def _splits(data: str | None, split: str) -> tuple[str, ...]:
    """The splits to use; of images without splits, any one is all of them."""
    if split != "all":
        return (split,)
    alone = data is not None and is_unlabelled(Path(data))
    return ("test",) if alone else SPLITS


def _first(decisions: Decisions, limit: int | None) -> Decisions:
    """The logits and labels of at most `limit` samples."""
    labels = None if decisions.labels is None else decisions.labels[:limit]
    return replace(decisions, logits=decisions.logits[:limit], labels=labels)


def _check_labels(found: Decisions, data: Decisions, options: CalibrateOptions) -> None:
    """Check that the answers to some samples can be compared, also with those to the data.

    Raises: SaccadeError for missing labels, and for zero-shot labels other than the data's.
    """
    if options.against == "labels" and found.labels is None:
        raise SaccadeError(
            f"--against labels: {found.data} has no labels. Sort the images into one folder per "
            "class, or pass --against full, which needs no labels."
        )
    if found.labelling != data.labelling:
        raise SaccadeError(
            f"--choose-data {found.data}: has other labels than --data {data.data}, so a model "
            "that answers with the most similar label answers otherwise. Pass data with the same "
            "labels, or name them with --labels."
        )


def _rounded(logits: np.ndarray) -> list[bytes]:
    """Return the full model's answers in a form in which those to equal samples are equal.

    Files of equal samples may have other names or formats.
    Shapes: [n classes] -> [n].
    """
    return [row.tobytes() for row in np.round(logits, _DIGITS).astype(np.float32) + 0.0]


def _apart(parts: Sequence[Decisions | Segments], samples: Sequence[Sequence[bytes]]) -> int:
    """Return how many samples choose and do not certify; 0 if no other data chooses.

    Hardly any of them may be among those that certify. A few are equal by chance.

    Raises: SaccadeError for samples that are in both.
    """
    if len(parts) == 1:
        return 0
    first, second = samples
    known = set(first)
    twice = sum(sample in known for sample in second)
    if twice > _BY_CHANCE * len(second):
        raise SaccadeError(
            f"{parts[1].data}: found {twice:,} of {len(second):,} samples that are also in what "
            f"chooses the chains, {parts[0].data}; expected none, because a sample that chose "
            "cannot certify. Leave them out of one of the two."
        )
    return len(first)


def _check_samples(data: str, found: int, options: CalibrateOptions) -> None:
    """Stop where no outcome could be certified.

    Raises: SaccadeError for too few samples.
    """
    apart = len(_parts(options)) > 1
    smallest = min((risk for risk in options.risk if risk > 0), default=0.0)
    least = 1 if apart else 2  # one that chooses, and one that certifies
    needed: int | None = least
    if smallest > 0:
        needed = least_samples(smallest, options.confidence, options.against, apart=apart)
    if needed is None:
        raise SaccadeError(
            f"--risk {smallest:g}: more than {MOST_SAMPLES:,} samples would be needed to certify "
            "it. Pass a larger risk, or 0 for the full model."
        )
    needed = max(needed, least)
    if options.embedding and not apart:
        needed = math.ceil(needed / (1 - FIT_SHARE))
    if found < needed:
        other = "" if apart else ", let other data choose the chains (--choose-data)"
        limited = found == options.limit
        part = "" if options.split == "all" else f"its {options.split} part "
        if part and not limited:
            other = f", --split all if the model was not trained on it{other}"
        raise SaccadeError(
            f"{data}: {'--limit leaves' if limited else part + 'has'} {found:,} samples, expected "
            f"at least {needed:,}: fewer cannot certify a risk of {smallest:g} at a confidence of "
            f"{options.confidence:g}, even if not one answer is lost. Pass "
            f"{'a larger --limit' if limited else 'more data'}{other}, or a larger --risk."
        )
