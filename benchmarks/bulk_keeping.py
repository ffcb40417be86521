# SPDX-License-Identifier: Apache-2.0
"""A bulk worker that leaks KEPT_BYTES per image, to check that growth would be noticed."""

from saccade.serving.bulk import shard

KEPT_BYTES = 4096
_kept: list[bytes] = []


def main(request: shard.ShardRequest) -> shard.FinishedShard:
    """Run one shard and keep some memory for each image."""
    done = shard.main(request)
    _kept.extend(bytes(range(256)) * (KEPT_BYTES // 256) for _ in range(done.answers))
    return done
