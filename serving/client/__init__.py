# SPDX-License-Identifier: Apache-2.0
"""Clients of a running server: blocking and asyncio."""
