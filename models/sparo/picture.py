# SPDX-License-Identifier: Apache-2.0
"""What each slot of a SPARO code reads."""

from saccade.models.attention_maps import MapRow, Panel, ShowRequest


def slots_of_code(request: ShowRequest) -> MapRow:
    """A map a slot that is kept."""
    found = request.ask(("attention",))
    grid = request.grid(found["attention"].shape[-1])
    maps = found["attention"][0][:, -grid[0] * grid[1] :].reshape(-1, *grid)
    kept = request.view.facts(found["by"])["slots"]
    panels = [Panel(f"slot {slot}", each) for slot, each in zip(kept, maps, strict=True)]
    return MapRow(f"{found['by']}: where each slot reads", tuple(panels), {"slots": len(panels)})
