# SPDX-License-Identifier: Apache-2.0
"""Runtimes: what runs an exported file, as functions of named arrays."""
