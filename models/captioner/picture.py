# SPDX-License-Identifier: Apache-2.0
"""What a captioner looked at, word by word."""

import numpy as np

from saccade.models.attention_maps import MapRow, Panel, ShowRequest, zero_share


def captioned(request: ShowRequest) -> MapRow:
    """A map a word."""
    (found,) = request.client.caption([request.image], request.options.budget)
    words = zip(found.text.split(), found.attention, strict=True)
    panels = tuple(Panel(f"{word}\n{zero_share(weights)}", weights) for word, weights in words)
    zeros = float(np.mean(found.attention == 0)) if panels else 0.0
    facts = {**found.to_dict(), "zero_share": zeros}
    return MapRow(f"{found.variant}: {found.text}", panels, facts)
