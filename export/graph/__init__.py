# SPDX-License-Identifier: Apache-2.0
"""Turn a torch model into an ONNX graph of one precision; limits and costs of graphs."""
