# SPDX-License-Identifier: Apache-2.0
"""Preflight: causes of a late failure found before a server is started."""
