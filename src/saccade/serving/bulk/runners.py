# SPDX-License-Identifier: Apache-2.0
"""Who runs the shards of a job: processes of this machine, or the actors of Ray Data.

Shards may be run twice and by anyone, so that a runner has nothing to remember.
"""

import io
import logging
import os
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from saccade.errors import SaccadeError, require
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import EXTRA, Place
from saccade.serving.bulk.plan import REPOSITORY
from saccade.serving.bulk.shard import Done, Job, Request, main
from saccade.worker import Worker, WorkerEnded, WorkerNotStarted

TRIES = 3  # of a shard whose process ends: what it holds may end each
_LOOPBACK = "127.0.0.1"


def local(job: Job, shards: Sequence[int], workers: int) -> Iterator[Done]:
    """Run them in as many processes of this machine.

    Raises: SaccadeError if a shard cannot be done, or ended every process that tried.
    """
    pool = _Processes(job, shards)
    count = min(workers, len(shards))
    with ThreadPoolExecutor(count) as threads:
        try:
            for _ in range(count):
                threads.submit(pool.work)
            for _ in shards:
                outcome = pool.outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            pool.stop()


class _Processes:
    """Processes that take shards from one list; a thread waits for each."""

    def __init__(self, job: Job, shards: Sequence[int]) -> None:
        self.outcomes: SimpleQueue[Done | BaseException] = SimpleQueue()
        self._job, self._waiting = job, SimpleQueue[int]()
        for shard in shards:
            self._waiting.put(shard)
        self._stopped = threading.Event()
        self._running: list[Worker] = []

    def work(self) -> None:
        """Run shards in one process until there are none."""
        with Worker(main.__module__) as worker:
            self._running.append(worker)
            try:
                while not self._stopped.is_set():
                    self.outcomes.put(self._done(worker, self._waiting.get_nowait()))
            except Empty:
                return
            except BaseException as error:
                self.outcomes.put(error)

    def stop(self) -> None:
        """End the processes, whatever they are at."""
        self._stopped.set()
        for worker in self._running:
            worker.close()

    def _done(self, worker: Worker, shard: int) -> Done:
        for left in reversed(range(TRIES)):
            try:
                return worker.ask(Request(self._job, shard), Done)
            except (WorkerEnded, WorkerNotStarted) as ended:
                if left == 0 or self._stopped.is_set():
                    last_words = getattr(ended, "last_words", "")
                    raise SaccadeError(
                        f"Shard {shard} ended the process that ran it {TRIES} times ({ended}). "
                        f"{last_words} Give it less with a smaller --batch or fewer --workers; "
                        "what is done is kept."
                    ) from ended
        raise AssertionError


def ray(job: Job, shards: Sequence[int], options: BulkOptions, cores: int) -> Iterator[Done]:
    """Run them by Ray Data's actors, on this machine or on a cluster.

    Raises: SaccadeError if there is no such cluster, or a shard cannot be done; MissingPackage.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it reports to its maker otherwise
    core = require("ray", extra=EXTRA)
    data = require("ray.data", extra=EXTRA)
    began = not core.is_initialized()
    if began:
        _join(core, options)
    try:
        _be_quiet(data)
        least, most = options.worker_range()
        Place(job.out).join(REPOSITORY).write(_packed(Path(job.repository)))
        pool = data.ActorPoolStrategy(
            min_size=least or 1,
            max_size=most or max(1, int(core.cluster_resources().get("CPU", 1)) // cores),
        )
        rows = data.from_items(
            [{"shard": shard} for shard in shards], override_num_blocks=len(shards)
        ).map_batches(
            _Actor,
            fn_constructor_args=(job.out,),
            batch_size=1,
            compute=pool,
            num_cpus=cores,
        )
        for row in rows.iter_rows():
            yield Done(int(row["shard"]), int(row["answers"]), int(row["errors"]))
    except core.exceptions.RayError as error:
        raise _refusal(error) from error
    finally:
        if began:
            core.shutdown()


class _Actor:
    """A worker of Ray Data: a job's shards in a process of its own."""

    def __init__(self, out: str) -> None:
        # Not through Ray's object store: an actor that starts anew may miss what went with a node.
        packed = Place(out).join(REPOSITORY).read()
        self._folder = tempfile.TemporaryDirectory(prefix="saccade-bulk-")
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(self._folder.name, filter="data")
        self._job = Job(out, self._folder.name)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        done = [main(Request(self._job, int(shard))) for shard in batch["shard"]]
        names = ("shard", "answers", "errors")
        return {name: [getattr(one, name) for one in done] for name in names}


def _join(core: Any, options: BulkOptions) -> None:
    own = {} if options.address else {"_node_ip_address": _LOOPBACK, "include_dashboard": False}
    try:
        core.init(address=options.address, log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SaccadeError(
            f"--address {options.address}: no Ray cluster answers there ({str(error)[:300]}). "
            "Start one with `ray start --head`, name it as auto or ray://HOST:PORT, or leave "
            "--address out for one of this machine."
        ) from error


def _be_quiet(data: Any) -> None:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False


def _refusal(error: BaseException) -> SaccadeError:
    """What a shard said, out of what Ray makes of it."""
    cause: BaseException | None = error
    while cause is not None:
        for one in (cause, getattr(cause, "cause", None)):  # Ray's own word for it
            if isinstance(one, SaccadeError):
                return SaccadeError(str(one))
        cause = cause.__cause__
    last = str(error).strip().splitlines()
    return SaccadeError(
        f"Ray could not run the job ({last[-1] if last else type(error).__name__}). What is done "
        "is kept: run the command again."
    )


def _packed(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add(folder, arcname=".")
    return data.getvalue()
