# SPDX-License-Identifier: Apache-2.0
"""Picture of what each slot paints."""

from saccade.models.attention_maps import MapRow, Panel, ShowRequest
from saccade.models.slot_attention.edit import painted


def slots_of_scene(request: ShowRequest) -> MapRow:
    """A mask a slot, behind the whole scene where the model draws it."""
    options = request.options
    (segmentation,) = request.client.segment([request.image], options.budget, options.seed)
    panels = [Panel(f"slot {slot}", mask, most=1.0) for slot, mask in enumerate(segmentation.masks)]
    if segmentation.reconstruction is not None:
        panels.insert(0, Panel("drawn by the model", pixels=painted(segmentation.reconstruction)))
    return MapRow(
        f"{segmentation.variant}: what each slot paints", tuple(panels), segmentation.to_dict()
    )
