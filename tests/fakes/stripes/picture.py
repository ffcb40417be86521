# SPDX-License-Identifier: Apache-2.0
"""Weight of each pixel."""

from saccade.models.attention_maps import MapRow, Panel, ShowRequest


def weighed(request: ShowRequest) -> MapRow:
    """One map."""
    answer = request.ask(("weights",))
    panel = Panel("pixels", answer["weights"][0])
    return MapRow(f"{answer['by']}: stripes", (panel,), {"side": len(panel.weights)})
