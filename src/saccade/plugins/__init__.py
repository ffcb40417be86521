# SPDX-License-Identifier: Apache-2.0
"""The floor: operations, errors and files; knows nothing of models."""

from pathlib import Path


def onnxruntime_library() -> Path:
    """Path of the library that gives ONNX Runtime all ops; built on first use, once a user.

    Give it to `SessionOptions.register_custom_ops_library`.

    Raises: SaccadeError if it has to be built and cannot be, with the compiler's own message.
    """
    from saccade.plugins.native import library

    return library.onnxruntime_library()
