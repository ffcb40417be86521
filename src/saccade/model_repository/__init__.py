# SPDX-License-Identifier: Apache-2.0
"""Code that runs inside the server: imports numpy, Pillow and onnxruntime, nothing of saccade."""
