# SPDX-License-Identifier: Apache-2.0
"""Drawing of a captioner's attention, word by word."""

import numpy as np

from saccade.models.attention_maps import MapRow, Panel, ShowRequest, zero_share


def captioned(request: ShowRequest) -> MapRow:
    """Return one map per word."""
    (caption,) = request.client.caption([request.image], request.options.budget)
    words = zip(caption.text.split(), caption.attention, strict=True)
    panels = tuple(Panel(f"{word}\n{zero_share(weights)}", weights) for word, weights in words)
    zeros = float(np.mean(caption.attention == 0)) if panels else 0.0
    figures = {**caption.to_dict(), "zero_share": zeros}
    return MapRow(f"{caption.variant}: {caption.text}", panels, figures)
