# SPDX-License-Identifier: Apache-2.0
"""Calibration of embeddings: variants in the full model's space, and the neighbors they find."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.classification import labelled_inputs
from saccade.exporter.evaluation.decisions import Decider, Run
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, origin
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.policy.answers import Answers, VariantAnswers, answers_of, check_finite
from saccade.exporter.policy.maps import ROUTER, SpaceMap, best_map, nearest
from saccade.exporter.policy.options import CalibrateOptions
from saccade.exporter.policy.vector_index import VectorIndex
from saccade.models.data.datasets import is_unlabelled, unlabelled_images
from saccade.models.data.samples.images import pixels_sha256
from saccade.models.entry import EvaluationTask

TASK = "embedding"
_ROLES = "", "image"  # of the components whose embeddings are mapped
_ANCHORS = 1024  # vectors of the index by whose similarity a policy decides
FIT_SHARE = 0.5  # of the samples fit maps, and are the index without --against-index
_LEAST_FIT, _MOST_FIT = 100, 20_000


def embedding_task(folder: ArtefactFolder, options: CalibrateOptions) -> EvaluationTask:
    """Return the task of embedding, whose `logits` are embeddings.

    Raises: SaccadeError if a variant does not embed, or an option is not one of embeddings.
    """
    for variant in folder.variants:
        own = [part for role, part in variant.components.items() if role in _ROLES]
        if TASK not in {spec.name for part in own for spec in part.outputs}:
            raise SaccadeError(
                f"--embedding: {variant.name} has no output {TASK}, so it cannot search an index. "
                "Drop --embedding, or calibrate a model that embeds."
            )
    given = {
        "--against labels": options.against == "labels",
        "--labels": options.labels, "--templates": options.templates, "--min-ari": options.min_ari,
    }  # fmt: skip
    if odd := [flag for flag, value in given.items() if value]:
        raise SaccadeError(
            f"{odd[0]}: is about classes or segmentations, but with --embedding an answer is lost "
            "if its nearest neighbor is not the full model's. Drop one of the two."
        )
    return EvaluationTask(score="", inputs="", decide=f"{__name__}:embed")


def embed(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Decider:
    """Return a model as a function from inputs to embeddings, with the samples of one split.

    Raises: SaccadeError if the data does not fit the model.
    """
    if options.data is not None and is_unlabelled(path := Path(options.data)):
        images = unlabelled_images(path, model.images())
        digest = cache(partial(pixels_sha256, images))
        return Decider(_run(model), _run, {"image": images}, None, name=path.name, digest=digest)
    data = labelled_inputs(model, options, split)
    return Decider(_run(model), _run, data.inputs, None, **origin(data))


def _run(model: EvaluatedModel) -> Run:
    component = model.component(*_ROLES)
    return lambda inputs: component.answer(inputs)[TASK]


@dataclass(frozen=True)
class Neighborhood:
    """The maps between spaces, and the index in which policies find neighbors."""

    maps: tuple[SpaceMap, ...]
    index: str
    index_sha256: str
    vectors: int


def neighbor_answers(
    variants: Sequence[VariantAnswers],
    source: tuple[str, str],
    options: CalibrateOptions,
    *,
    full: str,
    apart: int,
) -> tuple[Answers, Neighborhood]:
    """Return which neighbors the variants find after mapping; their `logits` are embeddings.

    Half of the samples (of other data that chooses, half of that) fit the maps, and the others are
    queries. `source` are the name and hash of the data that is the index without --against-index.

    Raises: SaccadeError for too few samples, an index that does not fit, or if no map finds enough
        neighbors.
    """
    total = len(variants[0].logits)
    order = np.random.default_rng(options.seed).permutation(apart or total)
    fit, asked = np.split(order, [min(round(FIT_SHARE * len(order)), _MOST_FIT)])
    if len(fit) < _LEAST_FIT:
        raise SaccadeError(
            f"{source[0]}: leaves {len(fit)} samples to fit maps with, expected at least "
            f"{_LEAST_FIT}. Pass more data."
        )
    for one in variants:
        check_finite(one.name, one.logits)
    (own,) = (one for one in variants if one.name == full)
    maps, arrays = _maps(variants, own, fit, options.min_recall)
    used = [one for one in variants if one is own or ROUTER.map_name(one.name, full) in arrays]
    if len(used) == 1:
        raise SaccadeError(_not_mapped(maps, full, options.min_recall))
    asked = np.concatenate([asked, np.arange(apart, total if apart else 0)])
    queries = np.stack([_placed(one, own, asked, arrays) for one in used])
    anchors = _Anchors(options.seed)
    if (path := options.against_index) is None:
        parts = iter([ROUTER.unit(own.logits[fit])])
    else:
        parts = VectorIndex(path, own.logits.shape[1], own.sha256).parts()
        source = path.name, sha256_of(path) if path.is_file() else ""
    classes, _ = nearest(queries, used.index(own), anchors.drawn(parts))
    arrays[ROUTER.ANCHORS] = anchors.vectors
    compared = [
        replace(one, logits=ROUTER.similarities(query, anchors.vectors), classes=found)
        for one, query, found in zip(used, queries, classes, strict=True)
    ]
    answers = answers_of(
        compared, None, full=full, seed=options.seed, apart=max(0, apart - len(fit))
    )
    neighborhood = Neighborhood(tuple(maps), *source, anchors.count)
    return replace(answers, spaces=arrays), neighborhood


def _maps(
    variants: Sequence[VariantAnswers], own: VariantAnswers, fit: np.ndarray, min_recall: float
) -> tuple[list[SpaceMap], dict[str, np.ndarray]]:
    """Return the maps to and from the full model's space, and the arrays of those to use."""
    maps, arrays = [], {}
    for one in variants:
        for source, target in ((one, own), (own, one)) if one is not own else ():
            embeddings = source.logits[fit], target.logits[fit]
            made, array = best_map((source.name, target.name), *embeddings, min_recall)
            maps.append(made)
            arrays |= {made.name: array} if made.used else {}
    return maps, arrays


def _placed(
    one: VariantAnswers, own: VariantAnswers, rows: np.ndarray, arrays: dict[str, np.ndarray]
) -> np.ndarray:
    embedding = one.logits[rows]
    if one is not own:
        embedding = ROUTER.mapped(embedding, arrays[ROUTER.map_name(one.name, own.name)])
    return np.asarray(ROUTER.unit(embedding))


class _Anchors:
    """Vectors of an index that are drawn at random while it is read."""

    def __init__(self, seed: int) -> None:
        self._rng, self._keys = np.random.default_rng(seed), np.empty(0)
        self.vectors, self.count = np.empty(0, np.float32), 0

    def drawn(self, parts: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the parts unchanged."""
        for part in parts:
            keys = np.concatenate([self._keys, self._rng.random(len(part))])
            kept = np.argsort(keys)[:_ANCHORS]
            both = np.concatenate([self.vectors.reshape(-1, part.shape[1]), part])
            self.vectors, self._keys, self.count = both[kept], keys[kept], self.count + len(part)
            yield part


def _not_mapped(maps: Sequence[SpaceMap], full: str, min_recall: float) -> str:
    reached = "; ".join(
        f"{one.source} {100 * one.reached.recall:.1f} % (map: {one.kind})"
        for one in maps
        if one.target == full
    )
    return (
        f"--embedding: no variant finds enough of the nearest neighbors that {full} finds: "
        f"{reached}, expected at least {100 * min_recall:g} % (--min-recall). Pass more images, of "
        "which half fit the maps, or export variants that are more alike."
    )
