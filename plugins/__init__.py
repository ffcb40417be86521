# SPDX-License-Identifier: Apache-2.0
"""Custom operations and their implementations; this package does not depend on models."""

from pathlib import Path


def onnxruntime_library() -> Path:
    """Return the path of the library with all ops for ONNX Runtime; on first use, build it.

    Pass it to `SessionOptions.register_custom_ops_library`. The library is built once per user.

    Raises: SaccadeError if it cannot be built, with the compiler's message.
    """
    from saccade.plugins.native import library

    return library.onnxruntime_library()
