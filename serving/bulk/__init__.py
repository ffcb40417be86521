# SPDX-License-Identifier: Apache-2.0
"""Bulk inference: any worker may run a shard, and the result contains each one exactly once."""
