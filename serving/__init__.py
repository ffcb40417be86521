# SPDX-License-Identifier: Apache-2.0
"""Artefacts to a running server, clients and measurements; the command line."""
