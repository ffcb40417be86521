# SPDX-License-Identifier: Apache-2.0
"""Drawing of what the class token of a second-order transformer reads."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from saccade.models.attention_maps import MapRow, Panel, ShowRequest, mean_map


def class_token(request: ShowRequest) -> MapRow:
    """Return one map per head of the last block, and the label."""
    answer = request.ask(("attention",))
    maps = answer["attention"][0]
    grid = request.grid(maps.shape[-1])
    rows = maps.reshape(-1, maps.shape[-1])[:, -grid[0] * grid[1] :].reshape(-1, *grid)
    panels = [Panel(f"head {head}", row) for head, row in enumerate(rows)]
    (best,) = request.client.classify([request.image], request.options.budget, top=1)
    title = f"{answer['by']}: {best.labels[0][0]}, where the class token reads"
    return MapRow(title, tuple(panels), best.to_dict())


def focus(
    metadata: Mapping[str, Any], outputs: Mapping[str, np.ndarray], size: tuple[int, int]
) -> np.ndarray | None:
    """Return the mean map over all heads of where the class token reads.

    Shapes: -> [n h w], or None without the output `attention`.
    """
    return mean_map(outputs, size)
