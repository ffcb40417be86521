# SPDX-License-Identifier: Apache-2.0
"""Runtimes, which run an exported file as a function of named arrays."""
