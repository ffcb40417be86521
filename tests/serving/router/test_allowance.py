# SPDX-License-Identifier: Apache-2.0
"""A caller whose images all go on: it waits behind others in later lanes, and nowhere else."""

from types import SimpleNamespace

import pytest
from support.serving.routers import src

SHARES = (0.8, 0.15, 0.05)  # of the calibration's samples end at each step


@pytest.fixture
def allowance(pb):
    return src.allowance.Allowance()


def sends(allowance, caller, share, rows=400):
    """Whether the caller is held back at last, if this share of its rows goes on; usual is 0.2."""
    held, left = False, 0.0
    for _ in range(rows):
        allowance.starts(caller, 1)
        left += share
        if left >= 1:
            left -= 1
            held = allowance.is_exceeded(caller, 1 / 0.2)
    return held


def test_only_far_more_than_usual_is_held_back(allowance):
    for caller in ("one", "two", "three"):
        assert not sends(allowance, caller, 0.2)
    assert not sends(allowance, "harder", 0.35)
    assert sends(allowance, "hard", 1.0) and sends(allowance, "half", 0.5)
    assert not sends(allowance, "hard", 0.2, rows=2_000), "once it is like the others again"


def test_a_few_hard_images_are_no_attack(allowance):
    for caller in ("one", "two", "new"):
        allowance.starts(caller, 8)
    assert not allowance.is_exceeded("new", 8 / 0.2)
    allowance.starts("new", 24)
    assert allowance.is_exceeded("new", 24 / 0.2)


def test_what_is_harder_for_all_holds_nobody_back(allowance):
    for caller in ("one", "two", "three"):
        sends(allowance, caller, 0.7)
    assert not any(sends(allowance, caller, 0.7) for caller in ("one", "two", "three"))
    assert not sends(allowance, "one", 1.0), "1.4 times what is usual now"


def test_a_caller_that_is_easier_than_usual_lowers_nobodys_allowance(allowance):
    for caller in ("one", "two", "three"):
        sends(allowance, caller, 0.02)
    assert not sends(allowance, "usual", 0.2), "the calibration's own share"


def test_callers_are_forgotten(allowance):
    for at in range(10_000):
        allowance.starts(f"caller {at}", 1)
    assert len(allowance._callers) == src.allowance.MOST_CALLERS


def test_the_load_is_that_of_all_later_steps(pb):
    routes = [SimpleNamespace(quickness=1 / cost) for cost in (1.0, 4.0, 20.0)]

    def steps(*shares):
        return SimpleNamespace(steps=[SimpleNamespace(end_share=share) for share in shares])

    # A usual row puts 0.2 rows on the second step, which costs 4, and 0.05 on the third.
    loads = src.allowance.loads_of(steps(*SHARES), routes)
    assert loads == pytest.approx([1 / 1.8, 4 / 1.8, 20 / 1.8])
    assert src.allowance.loads_of(steps(0.8, None, 0.05), routes) == [0.0] * 3
    assert src.allowance.loads_of(steps(1.0, 0.0, 0.0), routes)[2] == 100, "not without end"
