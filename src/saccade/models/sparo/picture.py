# SPDX-License-Identifier: Apache-2.0
"""Picture of what each slot of a SPARO code reads."""

from saccade.models.attention_maps import MapRow, Panel, ShowRequest


def slots_of_code(request: ShowRequest) -> MapRow:
    """A map a slot that is kept."""
    answer = request.ask(("attention",))
    grid = request.grid(answer["attention"].shape[-1])
    maps = answer["attention"][0][:, -grid[0] * grid[1] :].reshape(-1, *grid)
    kept = request.view.runtime_metadata(answer["by"])["slots"]
    panels = [Panel(f"slot {slot}", weights) for slot, weights in zip(kept, maps, strict=True)]
    return MapRow(f"{answer['by']}: where each slot reads", tuple(panels), {"slots": len(panels)})
