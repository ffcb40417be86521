# SPDX-License-Identifier: Apache-2.0
"""Layers that several families share."""
