# SPDX-License-Identifier: Apache-2.0
"""Picture of the attention of a network that answered a question."""

from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.attention_maps import MapRow, Panel, ShowRequest, zero_share
from saccade.models.vqa.questions import question_tokens


def answered(request: ShowRequest) -> MapRow:
    """The map behind the answer.

    Raises: SaccadeError if there is no question, or the model looks at boxes.
    """
    client, view, options = request.client, request.view, request.options
    if not options.question.strip():
        raise SaccadeError(f"{view.model} answers questions. Ask one with --question.")
    tokens = question_tokens(view.runtime_metadata(view.variants[0]), options.question)
    inputs = {"image": [request.image], "question": tokens[None]}
    answer = request.ask(("attention",), inputs)
    (best,) = client.answer([request.image], [options.question], options.budget, top=1)
    weights = answer["attention"][0].reshape(_cells(view, answer["by"]))
    figures = {**best.to_dict(), "zero_share": float(np.mean(weights == 0))}
    title = f"{answer['by']}: {options.question} {best.labels[0][0]}"
    return MapRow(title, (Panel(zero_share(weights), weights),), figures)


def _cells(view: Any, variant: str) -> tuple[int, int]:
    grid = view.runtime_metadata(variant)["grid"]
    if grid is None:
        raise SaccadeError(f"{view.model} looks at boxes, not at a grid: nothing to draw.")
    return int(grid[0]), int(grid[1])
