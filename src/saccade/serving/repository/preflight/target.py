# SPDX-License-Identifier: Apache-2.0
"""The server that a repository is checked for, and what the machine at hand has."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.exporter.runtimes.gpu import Gpu, gpus
from saccade.machine import memory_bytes
from saccade.serving.repository.installation import BUNDLED_LINE
from saccade.serving.repository.runtimes.registry import served_runtime

# Server versions by the name under which they are known elsewhere.
_SERVER_VERSIONS = {"2.51": "24.10", "2.51.0": "24.10"}
_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class Target:
    """Target that the checks hold the repository against."""

    line: str = BUNDLED_LINE  # of NVIDIA's releases, YY.MM
    bundled: bool = True  # the server of the pip package, with the Python backend of saccade
    tensorrt: str | None = None  # the server's version of it, if it was named
    memory_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()

    @property
    def title(self) -> str:
        """For a reader."""
        return f"the bundled server ({self.line})" if self.bundled else f"the container {self.line}"

    def knows(self, line: str) -> bool:
        """True if this server has what came with a line."""
        return _as_numbers(self.line) >= _as_numbers(line)


def target_of(
    server_version: str | None, tensorrt: str | None, memory_mib: int | None, runtime: str
) -> Target:
    """The target that a user names; without a name the bundled server, for plans a container.

    Raises: SaccadeError for a version that is none, or older than what saccade writes for.
    """
    memory = memory_mib * 2**20 if memory_mib else memory_of_machine()
    bundled = server_version is None and served_runtime(runtime).bundled
    line = _SERVER_VERSIONS.get(server_version or BUNDLED_LINE, server_version or BUNDLED_LINE)
    if not re.fullmatch(r"2[0-9]\.(0[1-9]|1[0-2])", line):
        raise SaccadeError(
            f"--server-version is {server_version!r}, expected the line of a container as its tag "
            f"says it, such as {BUNDLED_LINE} (server 2.51)."
        )
    if _as_numbers(line) < _as_numbers(BUNDLED_LINE):
        raise SaccadeError(
            f"--server-version is {line}: repositories are written for {BUNDLED_LINE} (server "
            "2.51) and newer. Use a newer container."
        )
    return Target(line, bundled, tensorrt, memory, gpus())


def memory_of_machine() -> int:
    """Bytes that this machine or its control group has."""
    sizes = [memory_bytes()]
    for path in _CGROUPS:
        with suppress(OSError, ValueError):  # no such group, or `max`
            sizes.append(int(path.read_text()))
    return min(sizes)


def _as_numbers(line: str) -> tuple[int, ...]:
    return tuple(int(part) for part in line.split("."))
