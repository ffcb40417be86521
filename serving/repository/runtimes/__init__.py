# SPDX-License-Identifier: Apache-2.0
"""The server's side of each runtime: its options, files, configuration and checks."""
