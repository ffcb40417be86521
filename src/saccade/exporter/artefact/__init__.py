# SPDX-License-Identifier: Apache-2.0
"""An artefact folder's files: manifests, variants, measurements; no torch, no onnx."""
