# SPDX-License-Identifier: Apache-2.0
"""Drawing of where each slot of a SPARO code reads."""

from saccade.models.attention_maps import MapRow, Panel, ShowRequest


def slots_of_code(request: ShowRequest) -> MapRow:
    """Return one map per kept slot."""
    answer, maps = request.attention()
    kept = request.view.runtime_metadata(answer["by"])["slots"]
    panels = [Panel(f"slot {slot}", weights) for slot, weights in zip(kept, maps, strict=True)]
    return MapRow(f"{answer['by']}: where each slot reads", tuple(panels), {"slots": len(panels)})
