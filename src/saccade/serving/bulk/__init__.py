# SPDX-License-Identifier: Apache-2.0
"""Bulk inference: a list of shards, each done by whoever takes it, exactly once in the result."""
