# SPDX-License-Identifier: Apache-2.0
"""Small data sets, generated or from a library."""
