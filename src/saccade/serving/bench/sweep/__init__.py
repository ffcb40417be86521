# SPDX-License-Identifier: Apache-2.0
"""Budgets and precisions of a checkpoint: exported, measured, and the frontier among them."""
