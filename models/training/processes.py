# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: how they start, meet and end, with one message if one of them fails.

`--processes N` starts the others as workers, which die with this process. Under torchrun, or any
launcher that sets RANK and WORLD_SIZE, they exist already. Only the first one writes and prints.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from saccade.core import interruption
from saccade.core.errors import SaccadeError, require
from saccade.core.leftovers import temporary_folder
from saccade.core.worker import Worker, WorkerEnded

_POLL_S = 0.02
_LAST_WORDS_S = 20.0  # to wait for the error of a worker that has left the group
_LOST_AFTER = timedelta(hours=2)  # without a sign of another process
_OUR_BUG = 70


class ProcessLost(Exception):
    """Another process of the run has ended."""


@dataclass(frozen=True)
class Group:
    """The processes of a run; this one has number `rank` of `size`, from 0.

    Those of `--processes` meet in the file `meeting`; the first one does not know it yet. Those of
    a launcher meet through the address in its environment.
    """

    rank: int = 0
    size: int = 1
    launched: bool = False
    meeting: str = ""


ALONE = Group()


def group_of(processes: int) -> Group:
    """Return the group that `--processes` or a launcher's environment names.

    Raises: SaccadeError if both do.
    """
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdecimal() and size.isdecimal() and int(size) > 1):
        return Group(size=processes)
    if processes > 1:
        raise SaccadeError(
            f"--processes {processes}: found {size} processes of a launcher such as torchrun "
            "(WORLD_SIZE), expected none. Leave --processes out, or start saccade without it."
        )
    return Group(int(rank), int(size), launched=True)


@contextmanager
def joined(
    group: Group, device: str, *, start: Callable[[Group], Worker] | None = None
) -> Iterator[Group]:
    """Meet the other processes, `start` them first if needed, and leave them after the block.

    Raises: SaccadeError if a process fails: its error, or how it ended. Of a launcher's processes,
        only the first that fails raises; the others exit.
    """
    if group.size == 1:
        yield group
        return
    dist: Any = require("torch.distributed", extra="export")
    with ExitStack() as stack:
        workers: list[Worker] = []
        if group.launched:
            store, _, _ = next(dist.rendezvous("env://", timeout=_LOST_AFTER))
        else:
            if not group.rank:
                folder = stack.enter_context(temporary_folder("train"))
                group = Group(0, group.size, meeting=str(folder / "meeting"))
                assert start is not None, "the first process starts the others"
                for rank in range(1, group.size):
                    workers.append(stack.enter_context(start(replace(group, rank=rank))))
            store = dist.FileStore(group.meeting, group.size)
        try:
            _connect(group, store, device, workers)
            yield group
        except BaseException as error:
            # Before the others notice that the connection is closed.
            other = _reported(error, group, store, workers)
            if other is not error:
                raise other from error
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _cause(workers: Sequence[Worker]) -> SaccadeError:
    """Return the error of the worker that failed, or how it ended."""
    ended: list[str] = []
    for rank, worker in enumerate(workers, 1):
        try:
            worker.answer(bool, timeout_s=_LAST_WORDS_S)
        except SaccadeError as error:
            return error
        except WorkerEnded as error:
            ended.append(f"process {rank + 1} of {len(workers) + 1} ({error}). {error.last_words}")
    what = ended[0] if ended else "the connection to another process."
    return SaccadeError(
        f"The run lost {what.strip()} Try again; if memory ran out, lower --processes or --batch, "
        "or raise --accumulate."
    )


def _connect(group: Group, store: Any, device: str, workers: Sequence[Worker]) -> None:
    """Create torch's default process group when all processes have arrived."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(_local_rank(group))
    store.set(f"here {group.rank}", "")
    arrived = [f"here {rank}" for rank in range(group.size)]
    while not store.check(arrived):  # waiting in torch would not let a signal through
        if any(worker.has_answered for worker in workers):
            raise ProcessLost
        time.sleep(_POLL_S)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    place: Any = {"store": dist.PrefixStore("group", store), "rank": group.rank}
    with _loopback(not group.launched):
        try:
            dist.init_process_group(backend, world_size=group.size, timeout=_LOST_AFTER, **place)
        except RuntimeError as error:
            raise ProcessLost from error


@contextmanager
def _loopback(wanted: bool) -> Iterator[None]:
    """Listen to this machine only, unless the environment names an interface."""
    name = "GLOO_SOCKET_IFNAME"
    if not wanted or name in os.environ:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]


def _local_rank(group: Group) -> int:
    """Return the number of this process's GPU.

    Raises: SaccadeError if this machine has fewer.
    """
    import torch

    local = int(os.environ.get("LOCAL_RANK", group.rank)) if group.launched else group.rank
    found = torch.cuda.device_count()
    if local >= found:
        raise SaccadeError(
            f"found {found} GPUs, expected one for each process of this machine, at least "
            f"{local + 1}. Lower --processes (torchrun: --nproc-per-node), or use --device cpu."
        )
    return local


def _reported(
    error: BaseException, group: Group, store: Any, workers: Sequence[Worker]
) -> BaseException:
    """Return the error that this process reports; SystemExit if another one reports it."""
    lost = isinstance(error, ProcessLost)
    if not group.launched:
        return _cause(workers) if lost and workers else error
    if isinstance(error, KeyboardInterrupt):
        code = 128 + (interruption.received() or signal.SIGINT)
        return SystemExit(code) if group.rank else error
    if not isinstance(error, Exception):
        return error
    first = False
    with suppress(RuntimeError):  # the launcher is gone
        first = store.add("failed", 1) == 1
    if not first:
        ours = lost or isinstance(error, SaccadeError)
        return SystemExit(getattr(error, "exit_code", SaccadeError.exit_code) if ours else _OUR_BUG)
    if lost:
        return SaccadeError(
            "The run lost a process that reported nothing; the system may have killed it for its "
            "memory. Try again; if it happens again, lower --batch or raise --accumulate."
        )
    return error


def from_the_first(group: Group, work: Callable[[], Any]) -> Any:
    """Return what this work returns in the first process, a value of JSON; the others do not do it.

    Raises: ProcessLost; in the first process also what the work raises.
    """
    if group.size == 1:
        return work()
    import torch
    import torch.distributed as dist

    text = b"" if group.rank else json.dumps(work()).encode()
    size = torch.tensor(len(text))
    try:
        dist.broadcast(size, 0)
        data = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
        dist.broadcast(data, 0)
    except RuntimeError as error:
        raise ProcessLost from error
    return json.loads(data.numpy().tobytes())
