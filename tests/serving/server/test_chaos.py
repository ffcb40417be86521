# SPDX-License-Identifier: Apache-2.0
"""The short form of the table of faults: a few rows on one service, judged without seconds."""

import pytest
from chaos.driver import LATEST_S, copied, strike
from chaos.judge import judge
from chaos.scene import models_of
from chaos.service import Service
from chaos.table import rows

pytestmark = pytest.mark.journey


@pytest.fixture(scope="module")
def service(needs_server, tiny_repository):
    # The disk of the log is full all the time: that costs the log alone.
    with copied(tiny_repository) as own, Service(own, "--server-log", "/dev/full") as running:
        yield running


@pytest.mark.parametrize("row", rows(short=True), ids=lambda row: row.name)
def test_only_those_notice_who_may(row, service):
    seen = strike(row, service, models_of(service.repository), seed=0, hurry=True)
    wrong = [check for check in judge(row, seen, strict=False) if not check.passed]
    assert not wrong, f"{wrong}\n{seen.words}\n{service.last_words()}"


def test_nothing_is_left(service):
    assert service.watch.regions, "no shared memory was ever seen: this test looks at nothing"
    assert service.stop(LATEST_S) == 0, service.last_words()
    assert not service.leftovers_after(LATEST_S)
