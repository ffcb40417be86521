# SPDX-License-Identifier: Apache-2.0
"""Files of an artefact folder (manifests, variants, measurements), without torch or onnx."""
