# SPDX-License-Identifier: Apache-2.0
"""Policies: chains of variants that stop early, with a certified bound on their risk."""
