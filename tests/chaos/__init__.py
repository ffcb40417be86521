# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose, one row each: what happens to `saccade serve`, and who notices."""
