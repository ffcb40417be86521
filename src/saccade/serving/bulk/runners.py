# SPDX-License-Identifier: Apache-2.0
"""Who runs the shards of a job: processes of this machine, or the actors of Ray Data.

Shards may be run twice and by anyone, so that a runner has nothing to remember.
"""

import io
import logging
import os
import sys
import tarfile
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from saccade.errors import SaccadeError, require
from saccade.exporter.runtimes.gpu import VISIBLE, Gpu, gpus, visible_alone
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.machine import cores
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import EXTRA, Place
from saccade.serving.bulk.plan import REPOSITORY
from saccade.serving.bulk.shard import Done, Job, Request, main
from saccade.worker import Worker, WorkerEnded, WorkerNotStarted

TRIES = 3  # of a shard whose process ends: what it holds may end each
ON_CPUS = f"--runtime {DEFAULT} --instances cpu"
_LOOPBACK = "127.0.0.1"


class Runner(Protocol):
    """Workers of a job; what they need is there."""

    @property
    def gpus(self) -> Sequence[Gpu]:
        """The GPUs of this machine that they use."""

    def run(self, job: Job, shards: Sequence[int]) -> Generator[Done]:
        """Each shard once it is done, in any order.

        Raises: SaccadeError if one cannot be done.
        """


@contextmanager
def runner_of(options: BulkOptions) -> Iterator[Runner]:
    """The processes or actors that the options ask for.

    Raises: SaccadeError if there is no such cluster, or no GPU where workers need one;
        MissingPackage.
    """
    if options.runner == "local":
        yield _local(options)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it reports to its maker otherwise
    core = require("ray", extra=EXTRA)
    data = require("ray.data", extra=EXTRA)
    began = not core.is_initialized()
    if began:
        _join(core, options)
    try:
        _be_quiet(data)
        yield _ray(core, data, options)
    finally:
        if began:
            core.shutdown()


def threads_of(options: BulkOptions) -> int:
    """Threads of ONNX Runtime in each worker, and its cores where Ray counts them."""
    workers = options.worker_range()[1]
    if options.threads is not None or options.on_gpu or not workers or options.runner == "ray":
        return options.threads or 1
    return max(1, cores() // workers)


@dataclass(frozen=True)
class Local:
    """Processes of this machine, a thread for each; they take the environments in turn."""

    workers: int
    environments: tuple[Mapping[str, str], ...] = ({},)
    gpus: tuple[Gpu, ...] = ()

    def run(self, job: Job, shards: Sequence[int]) -> Generator[Done]:
        pool = _Processes(job, shards)
        count = min(self.workers, len(shards))
        with ThreadPoolExecutor(count) as threads:
            try:
                for _, environment in zip(range(count), cycle(self.environments), strict=False):
                    threads.submit(pool.work, environment)
                for _ in shards:
                    outcome = pool.outcomes.get()
                    if isinstance(outcome, BaseException):
                        raise outcome
                    yield outcome
            finally:
                pool.stop()


def _local(options: BulkOptions) -> Local:
    workers = options.worker_range()[0]
    if not options.on_gpu:
        return Local(workers or cores())
    alone = visible_alone()
    if not alone:
        raise SaccadeError(
            "This machine has no GPU that can be used: there is no driver (libcuda.so.1), or "
            f"{VISIBLE} hides every device. Run the job where there is one, on a Ray cluster with "
            f"--runner ray --address ADDRESS, or on CPUs with: {ON_CPUS}"
        )
    count = workers or len(alone)
    return Local(count, tuple({VISIBLE: name} for name in alone), gpus()[:count])


class _Processes:
    """Processes that take shards from one list; a thread waits for each."""

    def __init__(self, job: Job, shards: Sequence[int]) -> None:
        self.outcomes: SimpleQueue[Done | BaseException] = SimpleQueue()
        self._job, self._waiting = job, SimpleQueue[int]()
        for shard in shards:
            self._waiting.put(shard)
        self._stopped = threading.Event()
        self._running: list[Worker] = []

    def work(self, environment: Mapping[str, str]) -> None:
        """Run shards in one process until there are none."""
        with Worker(main.__module__, environment=environment) as worker:
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


@dataclass(frozen=True)
class Ray:
    """Actors of Ray Data on the cluster that this process has joined."""

    core: Any
    data: Any
    least: int
    most: int
    resources: Mapping[str, int]  # of each actor
    gpus: tuple[Gpu, ...] = ()  # those of its nodes are seen by the actors alone

    def run(self, job: Job, shards: Sequence[int]) -> Generator[Done]:
        Place(job.out).join(REPOSITORY).write(_packed(Path(job.repository)))
        rows = self.data.from_items(
            [{"shard": shard} for shard in shards], override_num_blocks=len(shards)
        ).map_batches(
            _Actor,
            fn_constructor_args=(job.out,),
            batch_size=1,
            compute=self.data.ActorPoolStrategy(min_size=self.least, max_size=self.most),
            **self.resources,
        )
        try:
            for row in rows.iter_rows():
                yield Done(int(row["shard"]), int(row["answers"]), int(row["errors"]))
        except self.core.exceptions.RayError as error:
            raise _refusal(error) from error


def _ray(core: Any, data: Any, options: BulkOptions) -> Ray:
    least, most = options.worker_range()
    each = threads_of(options)
    present = core.cluster_resources()
    resources, room = {"num_cpus": each}, int(present.get("CPU", 1)) // each
    if options.on_gpu:
        resources, room = {**resources, "num_gpus": 1}, int(present.get("GPU", 0))
        _check_gpus_of_cluster(room, options)
    return Ray(core, data, least or 1, most or max(1, room), resources)


def _check_gpus_of_cluster(present: int, options: BulkOptions) -> None:
    """A cluster that grows may have its first GPU later, if a number of workers is given."""
    if present:
        return
    if options.address is None or options.workers is None:
        raise SaccadeError(
            "The Ray cluster has no GPU, and each worker needs one. Name a cluster that has some "
            "with --address; if its autoscaler is to add them, give --workers MIN:MAX; or run on "
            f"CPUs with: {ON_CPUS}"
        )
    print("The Ray cluster has no GPU yet: waiting for its autoscaler.", file=sys.stderr)


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
