# SPDX-License-Identifier: Apache-2.0
"""Score variants on as many samples as their differences need and the time allows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from saccade.exporter.evaluation.evaluate import scores_of
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.models.checkpoint import Checkpoint
from saccade.models.scores.results import EvaluationResult
from saccade.serving.bench.stopping import Deadline, first_look, next_look, samples_needed

MOST_GENERATED = 5000  # samples of the largest generated data set
Results = tuple[EvaluationResult, ...]


def scores_within(
    models: Sequence[EvaluatedModel],
    options: EvaluateOptions,
    checkpoint: Callable[[], Checkpoint | None],
    *,
    per_second: float,
    deadline: Deadline,
) -> tuple[Results, EvaluateOptions]:
    """Score all variants on the same samples; return the options with the limit that was used.

    All samples are scored if that takes seconds. Otherwise the first ones of a fixed random order
    are, and more of them until the intervals are narrow or the time is over.

    Units:  per_second is how many samples all variants together answer in a second.
    Raises: SaccadeError if the task or data do not fit the family.
    """
    count = first_look(per_second, deadline.seconds)
    generated = options.data is None or not Path(options.data).exists()
    if generated and count >= MOST_GENERATED:
        return scores_of(models, options, checkpoint), options
    while True:
        limit = count if options.limit is None else min(count, options.limit)
        asked, left = replace(options, limit=limit), deadline.left
        results = scores_of(models, asked, checkpoint)
        scored = len(results[0].samples)
        if limit == options.limit or scored < limit:
            return results, asked
        seconds = max(left - deadline.left, scored / per_second)
        values = {result.variant: result.samples for result in results}
        affordable = int(deadline.left * scored / seconds)
        more = next_look(scored, samples_needed(values), affordable)
        if more is None:
            return results, asked
        count = limit * more // scored  # a task may score several samples of one image
