# SPDX-License-Identifier: Apache-2.0
"""Replay an arrival log against a server: when requests arrive, and how each ended."""
