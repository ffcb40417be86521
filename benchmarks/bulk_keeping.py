# SPDX-License-Identifier: Apache-2.0
"""A worker of bulk jobs that keeps KEPT_BYTES of every image: what must be seen to grow."""

from saccade.serving.bulk import shard

KEPT_BYTES = 4096
_kept: list[bytes] = []


def main(request: shard.Request) -> shard.Done:
    """Run one shard, and keep something of each image."""
    done = shard.main(request)
    _kept.extend(bytes(range(256)) * (KEPT_BYTES // 256) for _ in range(done.answers))
    return done
