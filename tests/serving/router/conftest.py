# SPDX-License-Identifier: Apache-2.0
"""A clock for the router's code, which a test moves."""

from types import SimpleNamespace

import pytest
from support.serving.routers import src


@pytest.fixture
def clock(pb, monkeypatch):
    """Time of the load-adaptive choice and of lanes: `clock.now += 2` lets two seconds pass."""
    made = SimpleNamespace(now=100.0)
    made.monotonic = lambda: made.now
    for module in (src.adaptive, src.lane, src.backlog):
        monkeypatch.setattr(module, "time", made)
    return made
