# SPDX-License-Identifier: Apache-2.0
"""The native library, for the tests of the operators that need it."""

import os
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
