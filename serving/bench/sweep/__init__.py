# SPDX-License-Identifier: Apache-2.0
"""Sweeps: export and measure many budgets and precisions of a checkpoint, and find the frontier."""
