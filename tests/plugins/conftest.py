# SPDX-License-Identifier: Apache-2.0
"""The native library, and the two ways in which the torch operators compute on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ops_implementations import built_library


@pytest.fixture(scope="session")
def native_library() -> Path:
    """The library, built once if it must be; without a compiler a skip, but a failure under CI."""
    return Path(built_library())


@pytest.fixture(params=["torch form", "kernels"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test without the native kernels, then with them."""
    from saccade.plugins.native import bindings

    if request.param == "kernels":
        request.getfixturevalue("native_library")
        assert bindings.kernels() is not None
        yield request.param
    else:
        with bindings.without_kernels():
            yield request.param
