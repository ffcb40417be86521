# SPDX-License-Identifier: Apache-2.0
"""Quantization to 8-bit integers: recipes, ranges of activations, and the search for a recipe."""
