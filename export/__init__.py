# SPDX-License-Identifier: Apache-2.0
"""Checkpoint to ONNX, and the check that both agree. `saccade.export` is the function."""
