# SPDX-License-Identifier: Apache-2.0
"""Bulk jobs without their processes, each of which takes longer to start than its shards do."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from saccade.core import worker
from saccade.core.schema import typed
from saccade.serving.bulk import runners, shard


class Here(worker.Worker):
    """Answers in this process what its own would answer, through the same JSON."""

    def ask(
        self,
        request: Any,
        kind: type[worker.T],
        timeout_s: float | None = None,
        said: Callable[[Any], None] | None = None,
    ) -> worker.T:
        assert not self._environment, "its variables are for a process of its own"
        done = shard.main(typed(shard.ShardRequest, _sent(request), "the request to a worker: "))
        return typed(kind, _sent(done), "the answer of a worker: ")

    def close(self) -> None:
        """Forget the jobs, as a process does that ends."""
        while shard._here:
            shard._here.popitem()[1].close()


def _sent(value: Any) -> Any:
    return json.loads(json.dumps(value, default=worker._fields))


@contextmanager
def in_this_process() -> Iterator[None]:
    """Within, no bulk job starts a process; for tests of other things than processes."""
    with mock.patch.object(runners, "Worker", Here):
        yield
