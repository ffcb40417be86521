# SPDX-License-Identifier: Apache-2.0
"""OpenVINO: runs exported files on CPUs, which it knows better than ONNX Runtime does."""
