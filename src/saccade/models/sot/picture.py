# SPDX-License-Identifier: Apache-2.0
"""Picture of what the class token of a second-order transformer reads."""

from saccade.models.attention_maps import MapRow, Panel, ShowRequest


def class_token(request: ShowRequest) -> MapRow:
    """A map a head of the last block, and the label."""
    answer = request.ask(("attention",))
    maps = answer["attention"][0]
    grid = request.grid(maps.shape[-1])
    rows = maps.reshape(-1, maps.shape[-1])[:, -grid[0] * grid[1] :].reshape(-1, *grid)
    panels = [Panel(f"head {head}", row) for head, row in enumerate(rows)]
    (best,) = request.client.classify([request.image], request.options.budget, top=1)
    title = f"{answer['by']}: {best.labels[0][0]}, where the class token reads"
    return MapRow(title, tuple(panels), best.to_dict())
