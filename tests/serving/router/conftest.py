# SPDX-License-Identifier: Apache-2.0
"""A clock for the router's code, which a test moves, and tickets of lanes."""

import time
from types import SimpleNamespace

import pytest
from support.serving.routers import src


@pytest.fixture
def clock(pb, monkeypatch):
    """Time of the load-adaptive choice and of lanes: `clock.now += 2` lets two seconds pass."""
    made = SimpleNamespace(now=100.0)
    made.monotonic = lambda: made.now
    for module in (src.adaptive, src.lane, src.pace, src.backlog):
        monkeypatch.setattr(module, "time", made)
    return made


class Caller:
    """A caller's end of a request: what it was told."""

    def __init__(self):
        self.error, self.gone, self.reasons, self.waits_s = None, False, [], []

    def send(self, response, flags):
        self.error = response.error

    def is_cancelled(self):
        return self.gone

    def ended(self, outcome):
        self.reasons.append(outcome)

    def waited(self, seconds):
        self.waits_s.append(seconds)


@pytest.fixture
def ticket(pb):
    """Make a ticket; its sender remembers what the caller heard."""

    def make(rows=1, left_s=None, caller="", **more):
        now = time.monotonic()
        deadline = None if left_s is None else now + left_s
        more = {"work": float(rows), **more}
        return src.backlog.Ticket("", {}, rows, {}, (), Caller(), deadline, now, caller, **more)

    return make
