# SPDX-License-Identifier: Apache-2.0
"""Scores of answers against the truth: pure functions on arrays."""
