# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: speed and score of every variant, in process and through a server."""
