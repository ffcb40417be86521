# SPDX-License-Identifier: Apache-2.0
"""How much each pixel weighs."""

from saccade.models.attention_maps import MapRow, Panel, ShowRequest


def weighed(request: ShowRequest) -> MapRow:
    """One map."""
    found = request.ask(("weights",))
    panel = Panel("pixels", found["weights"][0])
    return MapRow(f"{found['by']}: stripes", (panel,), {"side": len(panel.weights)})
