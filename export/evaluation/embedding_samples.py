# SPDX-License-Identifier: Apache-2.0
"""Calibration of embeddings: variants in the full model's space, and the neighbors they find."""

from collections.abc import Sequence
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
from saccade.exporter.policy.vector_index import stored_vectors
from saccade.models.data.datasets import is_unlabelled, unlabelled_images
from saccade.models.data.samples.images import pixels_sha256
from saccade.models.entry import EvaluationTask

TASK = "embedding"
FIT_SHARE = 0.5  # of the samples fit maps, and are the index without --against-index
_ROLES = "", "image"  # of the components whose embeddings are mapped
_ANCHORS = 1024  # vectors of the index by whose similarity a policy decides
_LEAST_FIT, _MOST_FIT = 100, 20_000


def embedding_task(folder: ArtefactFolder) -> EvaluationTask:
    """Return the task of embedding, whose `logits` are embeddings.

    Raises: SaccadeError if a variant does not embed.
    """
    for variant in folder.variants:
        own = [part.outputs for role, part in variant.components.items() if role in _ROLES]
        if TASK not in {spec.name for specs in own for spec in specs}:
            raise SaccadeError(
                f"--embedding: {variant.name} has no output {TASK}, so it cannot search an index. "
                "Drop --embedding, or calibrate a model that embeds."
            )
    return EvaluationTask(score="", inputs="", decide=f"{__name__}:embed")


def embed(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Decider:
    """Return a model as a function from inputs to embeddings, with the samples of one split.

    Raises: SaccadeError if the data does not fit the model.
    """
    given = _run(model), _run
    if options.data is not None and is_unlabelled(path := Path(options.data)):
        images = unlabelled_images(path, model.images())
        digest = cache(partial(pixels_sha256, images))
        return Decider(*given, {"image": images}, None, name=path.name, digest=digest)
    data = labelled_inputs(model, options, split)
    return Decider(*given, data.inputs, None, **origin(data))


def _run(model: EvaluatedModel) -> Run:
    return lambda inputs: model.component(*_ROLES).answer(inputs)[TASK]


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
    asked = np.concatenate([asked, np.arange(apart, total if apart else 0)])
    if len(fit) < _LEAST_FIT:
        raise SaccadeError(
            f"{source[0]}: leaves {len(fit)} samples to fit maps with, expected at least "
            f"{_LEAST_FIT}. Pass more data."
        )
    (own,) = (one for one in variants if one.name == full)
    maps, arrays = [], {}
    for one in variants:
        check_finite(one.name, one.logits)
        for pair in ((one, own), (own, one)) if one is not own else ():
            source_of, target_of = (each.logits[fit] for each in pair)
            names = pair[0].name, pair[1].name
            made, array = best_map(names, source_of, target_of, options.min_recall)
            maps.append(made)
            arrays |= {made.name: array} if made.used else {}
    used = [one for one in variants if one is own or ROUTER.map_name(one.name, full) in arrays]
    if len(used) == 1:
        raise SaccadeError(
            f"--embedding: no variant finds {100 * options.min_recall:g} % (--min-recall) of the "
            f"nearest neighbors that {full} finds. Pass more images, of which half fit the maps, "
            "or export variants that are more alike. Found: " + "; ".join(map(str, maps))
        )
    queries = [
        one.logits[asked]
        if one is own
        else ROUTER.mapped(one.logits[asked], arrays[ROUTER.map_name(one.name, full)])
        for one in used
    ]
    stacked = np.stack([ROUTER.unit(query) for query in queries])
    index = iter([ROUTER.unit(own.logits[fit])])
    if (path := options.against_index) is not None:
        index = stored_vectors(path, own.logits.shape[1], own.sha256)
        source = path.name, sha256_of(path) if path.is_file() else ""
    classes, anchors, size = nearest(stacked, used.index(own), index, _ANCHORS, options.seed)
    compared = [
        replace(one, logits=ROUTER.similarities(query, anchors), classes=found)
        for one, query, found in zip(used, stacked, classes, strict=True)
    ]
    rest = max(0, apart - len(fit))
    answers = answers_of(compared, None, full=full, seed=options.seed, apart=rest)
    spaces = {**arrays, ROUTER.ANCHORS: anchors}
    return replace(answers, spaces=spaces), Neighborhood(tuple(maps), *source, size)
