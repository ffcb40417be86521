# SPDX-License-Identifier: Apache-2.0
"""Preflight: find the causes of late failures before a server is started."""
