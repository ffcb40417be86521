# SPDX-License-Identifier: Apache-2.0
"""Evaluate a model, as a checkpoint or as exported files; one module per task."""
