# SPDX-License-Identifier: Apache-2.0
"""Drawing of where each slot of a SPARO code reads."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from saccade.models.attention_maps import MapRow, Panel, ShowRequest, mean_map


def slots_of_code(request: ShowRequest) -> MapRow:
    """Return one map per kept slot."""
    answer = request.ask(("attention",))
    grid = request.grid(answer["attention"].shape[-1])
    maps = answer["attention"][0][:, -grid[0] * grid[1] :].reshape(-1, *grid)
    kept = request.view.runtime_metadata(answer["by"])["slots"]
    panels = [Panel(f"slot {slot}", weights) for slot, weights in zip(kept, maps, strict=True)]
    return MapRow(f"{answer['by']}: where each slot reads", tuple(panels), {"slots": len(panels)})


def focus(
    metadata: Mapping[str, Any], outputs: Mapping[str, np.ndarray], size: tuple[int, int]
) -> np.ndarray | None:
    """Return the mean map of where the kept slots read.

    Shapes: -> [n h w], or None without the output `attention`.
    """
    return mean_map(outputs, size)
