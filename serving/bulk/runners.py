# SPDX-License-Identifier: Apache-2.0
"""Runners of a job's shards: processes on this machine, or the actors of Ray Data.

A shard may be run twice and by any worker, so a runner needs no state.
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

from saccade.core.errors import SaccadeError, require
from saccade.core.machine import cores
from saccade.core.worker import Worker, WorkerEnded, WorkerNotStarted
from saccade.exporter.runtimes.gpu import VISIBLE, Gpu, gpus, visible_alone
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import EXTRA, Place
from saccade.serving.bulk.plan import REPOSITORY
from saccade.serving.bulk.shard import Begun, BulkJob, FinishedShard, ShardRequest, main

TRIES = 3  # attempts at a shard whose process dies: its content may kill every process
ON_CPUS = f"--runtime {DEFAULT} --instances cpu"
_LOOPBACK = "127.0.0.1"


class Runner(Protocol):
    """The workers of a job; everything that they need is available."""

    @property
    def gpus(self) -> Sequence[Gpu]:
        """The GPUs of this machine that the workers use."""

    def run(self, job: BulkJob, shards: Sequence[int]) -> Generator[FinishedShard | Begun]:
        """Yield each shard when it is finished, in any order, and before how far it is, if known.

        Raises: SaccadeError if a shard fails.
        """


@contextmanager
def runner_of(options: BulkOptions) -> Iterator[Runner]:
    """Provide the runner that the options select.

    Raises: SaccadeError if there is no such cluster, or no GPU for workers that need one;
        MissingPackage.
    """
    if options.runner == "local":
        yield _local(options)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage reports
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
    """Return the threads of ONNX Runtime per worker, and with Ray its number of cores."""
    workers = options.worker_range()[1]
    if options.threads is not None or options.on_gpu or not workers or options.runner == "ray":
        return options.threads or 1
    return max(1, cores() // workers)


@dataclass(frozen=True)
class Local:
    """Processes on this machine, one thread for each; they use the environments in turn."""

    workers: int
    environments: tuple[Mapping[str, str], ...] = ({},)
    gpus: tuple[Gpu, ...] = ()

    def run(self, job: BulkJob, shards: Sequence[int]) -> Generator[FinishedShard | Begun]:
        pool = _Processes(job, shards)
        count = min(self.workers, len(shards))
        with ThreadPoolExecutor(count) as threads:
            try:
                for _, environment in zip(range(count), cycle(self.environments), strict=False):
                    threads.submit(pool.work, environment)
                left = len(shards)
                while left:
                    outcome = pool.outcomes.get()
                    if isinstance(outcome, BaseException):
                        raise outcome
                    left -= isinstance(outcome, FinishedShard)
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
            f"{VISIBLE} hides every device. Run the job on a machine with a GPU, on a Ray cluster "
            f"with --runner ray --address ADDRESS, or on CPUs with: {ON_CPUS}"
        )
    count = workers or len(alone)
    return Local(count, tuple({VISIBLE: name} for name in alone), gpus()[:count])


class _Processes:
    """Processes that take shards from a shared queue; one thread waits for each process."""

    def __init__(self, job: BulkJob, shards: Sequence[int]) -> None:
        self.outcomes: SimpleQueue[FinishedShard | Begun | BaseException] = SimpleQueue()
        self._job, self._waiting = job, SimpleQueue[int]()
        for shard in shards:
            self._waiting.put(shard)
        self._stopped = threading.Event()
        self._running: list[Worker] = []

    def work(self, environment: Mapping[str, str]) -> None:
        """Run shards in one process until none is left."""
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
        """Stop the processes, even if they are busy."""
        self._stopped.set()
        for worker in self._running:
            worker.close()

    def _done(self, worker: Worker, shard: int) -> FinishedShard:
        def said(inputs: Any) -> None:
            self.outcomes.put(Begun(shard, int(inputs)))

        for left in reversed(range(TRIES)):
            try:
                return worker.ask(ShardRequest(self._job, shard), FinishedShard, said=said)
            except (WorkerEnded, WorkerNotStarted) as ended:
                if left == 0 or self._stopped.is_set():
                    last_words = getattr(ended, "last_words", "")
                    raise SaccadeError(
                        f"Shard {shard} stopped the process that ran it {TRIES} times ({ended}). "
                        f"{last_words} Finished shards are kept. Run the same command again with "
                        "fewer --workers, or start a new job with a smaller --batch."
                    ) from ended
        raise AssertionError


@dataclass(frozen=True)
class Ray:
    """Actors of Ray Data on the cluster that this process has joined."""

    core: Any
    data: Any
    least: int
    most: int
    resources: Mapping[str, int]  # resources of each actor
    gpus: tuple[Gpu, ...] = ()  # empty: only the actors see the GPUs of their nodes

    def run(self, job: BulkJob, shards: Sequence[int]) -> Generator[FinishedShard | Begun]:
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
                yield FinishedShard(int(row["shard"]), int(row["answers"]), int(row["errors"]))
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
    """Refuse a cluster without GPUs, unless its autoscaler may add some.

    Raises: SaccadeError if there is no address or no number of workers, which that requires.
    """
    if present:
        return
    if options.address is None or options.workers is None:
        raise SaccadeError(
            "The Ray cluster has no GPU, and each worker needs one. Choose a cluster with GPUs "
            "with --address. If its autoscaler has to add them first, pass --workers MIN:MAX. To "
            f"run on CPUs, pass: {ON_CPUS}"
        )
    print("The Ray cluster has no GPU yet: waiting for its autoscaler.", file=sys.stderr)


class _Actor:
    """A worker of Ray Data: runs shards of a job in a separate process."""

    def __init__(self, out: str) -> None:
        # Not through Ray's object store: an object may be lost with a node when an actor restarts.
        packed = Place(out).join(REPOSITORY).read()
        self._folder = tempfile.TemporaryDirectory(prefix="saccade-bulk-")
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(self._folder.name, filter="data")
        self._job = BulkJob(out, self._folder.name)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        done = [main(ShardRequest(self._job, int(shard))) for shard in batch["shard"]]
        names = ("shard", "answers", "errors")
        return {name: [getattr(one, name) for one in done] for name in names}


def _join(core: Any, options: BulkOptions) -> None:
    own = {} if options.address else {"_node_ip_address": _LOOPBACK, "include_dashboard": False}
    try:
        core.init(address=options.address, log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SaccadeError(
            f"--address is {options.address}, but no Ray cluster answers there "
            f"({str(error)[:300]}). Start one with `ray start --head`, pass auto or "
            "ray://HOST:PORT, or leave --address out for a new cluster on this machine."
        ) from error


def _be_quiet(data: Any) -> None:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False


def _refusal(error: BaseException) -> SaccadeError:
    """Return the error of a shard, unwrapped from the exceptions of Ray."""
    cause: BaseException | None = error
    while cause is not None:
        for one in (cause, getattr(cause, "cause", None)):  # Ray's own attribute
            if isinstance(one, SaccadeError):
                return SaccadeError(str(one))
        cause = cause.__cause__
    last = str(error).strip().splitlines()
    return SaccadeError(
        f"Ray could not run the job ({last[-1] if last else type(error).__name__}). Finished "
        "shards are kept: run the same command again."
    )


def _packed(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add(folder, arcname=".")
    return data.getvalue()
