# SPDX-License-Identifier: Apache-2.0
"""Drawing of a question-answering network's attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.attention_maps import MapRow, Panel, ShowRequest, zero_share
from saccade.models.vqa.questions import question_tokens


def answered(request: ShowRequest) -> MapRow:
    """Return the attention map of the answer.

    Raises: SaccadeError if there is no question, or the model looks at boxes.
    """
    client, view, options = request.client, request.view, request.options
    if not options.question.strip():
        raise SaccadeError(f"{view.model} answers questions. Pass one with --question.")
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
        raise SaccadeError(f"{view.model} looks at boxes, not at a grid: there is no map to draw.")
    return int(grid[0]), int(grid[1])


def focus(
    metadata: Mapping[str, Any], outputs: Mapping[str, np.ndarray], size: tuple[int, int]
) -> np.ndarray | None:
    """Return where the model looked for the answer.

    Shapes: -> [n h w], or None if the model looks at boxes.
    """
    weights, grid = outputs.get("attention"), metadata.get("grid")
    if weights is None or grid is None:
        return None
    return weights.reshape(len(weights), *grid)
