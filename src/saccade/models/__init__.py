# SPDX-License-Identifier: Apache-2.0
"""Architectures, their weights and the data they are trained on."""
