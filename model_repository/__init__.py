# SPDX-License-Identifier: Apache-2.0
"""What runs inside the server: imports numpy, Pillow and onnxruntime, nothing of saccade."""
