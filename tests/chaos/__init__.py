# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults, one per row: what happens to `saccade serve`, and who notices."""
