# SPDX-License-Identifier: Apache-2.0
"""What most tests of repositories begin with: a folder of two variants, and a place to write to."""

import pytest


@pytest.fixture
def folder(tmp_path):
    """A folder of two small variants without their checkpoint, to be changed."""
    import tiny_artefacts

    return tiny_artefacts.artefacts(tmp_path / "artefacts", checkpoint=False)


@pytest.fixture
def out(tmp_path):
    """Where the repository of a test is written to."""
    return tmp_path / "repository"
