# SPDX-License-Identifier: Apache-2.0
"""Small data sets, generated or shipped in a library."""
