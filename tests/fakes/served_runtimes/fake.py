# SPDX-License-Identifier: Apache-2.0
"""The server's side of the fake runtime."""

from fake_runtime import SERVED

__all__ = ["SERVED"]
