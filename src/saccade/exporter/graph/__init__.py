# SPDX-License-Identifier: Apache-2.0
"""From a torch model to an ONNX graph of one precision, and what a graph holds and costs."""
