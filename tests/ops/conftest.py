# SPDX-License-Identifier: Apache-2.0
"""The native library, and the two ways in which the torch operators compute on the CPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def native_library() -> Path:
    """The library, built once if it must be; without a compiler a skip, but a failure under CI."""
    from saccade.plugins.errors import SaccadeError
    from saccade.plugins.native.library import onnxruntime_library

    try:
        return onnxruntime_library()
    except SaccadeError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


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
