# SPDX-License-Identifier: Apache-2.0
"""The router and its variants in this process, without a server."""
