# SPDX-License-Identifier: Apache-2.0
"""Stubs: the processes in which a server's Python models run."""

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import ServerFailed
from saccade.core.machine import process_fields
from saccade.serving.repository.installation import STUB


@dataclass(frozen=True)
class Stub:
    """The process of one Python model; `started` distinguishes it from a later one with its id."""

    pid: int
    started: int
    model: str
    region: str = ""  # of shared memory, between it and the server


def stubs_in(group: int) -> list[Stub]:
    """Return the stubs in a process group."""
    stubs = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, IndexError):
            fields = process_fields(int(entry.name))
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if int(fields[2]) == group and words[0].endswith(STUB.encode()):
                region = words[2].decode(errors="replace") if len(words) > 2 else ""
                stubs.append(Stub(int(entry.name), int(fields[19]), _model_of(words), region))
    return stubs


def _model_of(words: list[bytes]) -> str:
    # One of the stub's arguments is the instance, such as `nac-b0250-fp32_0_0`.
    for word in words[2:]:
        instance = re.fullmatch(r"([a-z0-9-]+)_\d+_\d+", word.decode(errors="replace"))
        if instance:
            return instance[1]
    return ""


def _started(pid: int) -> int | None:
    """Return the start time of process `pid` in clock ticks; None if it is gone or a zombie."""
    fields = process_fields(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def is_alive(stub: Stub) -> bool:
    """Return True if this very process is running, not a later one with the same id."""
    return _started(stub.pid) == stub.started


def wait_gone(stub: Stub) -> None:
    """Wait until a stub that was killed is gone.

    Raises: ServerFailed if it does not exit.
    """
    end = time.monotonic() + 3
    while is_alive(stub):
        if time.monotonic() > end:
            raise ServerFailed(f"Process {stub.pid} of model {stub.model} does not exit.")
        time.sleep(0.01)
