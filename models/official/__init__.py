# SPDX-License-Identifier: Apache-2.0
"""Converters that read checkpoints of the authors' code into ours, one file per source."""
