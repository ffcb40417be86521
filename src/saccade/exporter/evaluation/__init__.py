# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a model, as a checkpoint and as the files made of it: one task a file."""
