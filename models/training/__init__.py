# SPDX-License-Identifier: Apache-2.0
"""The training loop that all families share, and the interface of their tasks."""
