# SPDX-License-Identifier: Apache-2.0
"""Build engines from an artefact folder, each in a separate process, after verifying types."""
