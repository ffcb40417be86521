# SPDX-License-Identifier: Apache-2.0
"""What each slot paints."""

from saccade.models.attention_maps import MapRow, Panel, ShowRequest
from saccade.models.slot_attention.edit import painted


def slots_of_scene(request: ShowRequest) -> MapRow:
    """A mask a slot, behind the whole scene where the model draws it."""
    options = request.options
    (found,) = request.client.segment([request.image], options.budget, options.seed)
    panels = [Panel(f"slot {slot}", mask, most=1.0) for slot, mask in enumerate(found.masks)]
    if found.reconstruction is not None:
        panels.insert(0, Panel("drawn by the model", pixels=painted(found.reconstruction)))
    return MapRow(f"{found.variant}: what each slot paints", tuple(panels), found.to_dict())
