# SPDX-License-Identifier: Apache-2.0
"""Drawing of what each slot paints."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from saccade.models.attention_maps import MapRow, Panel, ShowRequest
from saccade.models.slot_attention.edit import painted


def slots_of_scene(request: ShowRequest) -> MapRow:
    """Return one mask per slot, after the whole scene if the model reconstructs it."""
    options = request.options
    (segmentation,) = request.client.segment([request.image], options.budget, options.seed)
    panels = [Panel(f"slot {slot}", mask, most=1.0) for slot, mask in enumerate(segmentation.masks)]
    if segmentation.reconstruction is not None:
        panels.insert(0, Panel("drawn by the model", pixels=painted(segmentation.reconstruction)))
    return MapRow(
        f"{segmentation.variant}: what each slot paints", tuple(panels), segmentation.to_dict()
    )


def focus(
    metadata: Mapping[str, Any], outputs: Mapping[str, np.ndarray], size: tuple[int, int]
) -> np.ndarray | None:
    """Return the slot that each pixel belongs to.

    Shapes: outputs["masks"] [n k h w] -> [n h w] int64.
    """
    return np.asarray(outputs["masks"].argmax(1)) if "masks" in outputs else None
