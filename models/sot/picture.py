# SPDX-License-Identifier: Apache-2.0
"""Drawing of what the class token of a second-order transformer reads."""

from saccade.models.attention_maps import MapRow, Panel, ShowRequest


def class_token(request: ShowRequest) -> MapRow:
    """Return one map per head of the last block, and the label."""
    answer, maps = request.attention()
    panels = [Panel(f"head {head}", weights) for head, weights in enumerate(maps)]
    (best,) = request.client.classify([request.image], request.options.budget, top=1)
    title = f"{answer['by']}: {best.labels[0][0]}, where the class token reads"
    return MapRow(title, tuple(panels), best.to_dict())
