# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the authors' own codes, one source a file, read into ours."""
