# SPDX-License-Identifier: Apache-2.0
"""A clock for the router's code, which a test moves."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def clock(pb, monkeypatch):
    """Time of the load-adaptive choice and of lanes: `clock.now += 2` lets two seconds pass."""
    import adaptive
    import backlog
    import lane

    made = SimpleNamespace(now=100.0)
    made.monotonic = lambda: made.now
    for module in (adaptive, lane, backlog):
        monkeypatch.setattr(module, "time", made)
    return made
