# SPDX-License-Identifier: Apache-2.0
"""Files made by these tests are not tried in another process, which takes most of a second each."""

import pytest

from saccade.exporter.graph import trial


@pytest.fixture(autouse=True)
def known_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "tried", lambda *_: {})
