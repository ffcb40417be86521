# SPDX-License-Identifier: Apache-2.0
"""The command line: each command a verb of the Python API."""
