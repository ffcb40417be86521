# SPDX-License-Identifier: Apache-2.0
"""The temporary files of one run, the copy of the models that it serves, and the leftovers of runs.

The hashes of the models are checked while they are copied. Checking those of the repository itself
would not protect a later restart from changed files. Hard links would not either, because writing
to one name changes the other.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from saccade.core.errors import Damaged, SaccadeError
from saccade.core.files import copy_opened
from saccade.core.machine import cores
from saccade.serving.repository.description import (
    WRITER,
    Deployment,
    read_description,
    regular_files,
)
from saccade.serving.repository.model_config import config_text, parse_config
from saccade.serving.repository.runtimes.registry import served_runtime
from saccade.serving.repository.threads import chosen_again
from saccade.serving.server import beside
from saccade.serving.server.beside import (
    ORDERLY,
    SHARED_MEMORY,
    kill_processes,
    reap,
    remove_regions,
)

__all__ = ["SHARED_MEMORY", "RunFolder", "close_regions", "remove_regions"]

_PREFIX = "saccade-serve-"
_LOCK = "lock"

COPY = "copy-"  # prefix of the folders that contain a run's copies


class RunFolder:
    """A temporary folder, removed after the block together with the shared memory named after it.

    If this process is killed, a small process, the reaper, removes both and kills the run's
    processes. While the run is alive, it holds a lock in its folder. If the reaper is killed too,
    a later run removes folders whose lock is free, with their shared memory and processes.
    """

    def __enter__(self) -> "RunFolder":
        _remove_leftovers()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Lock the folder before it gets its name, so that no other run sees it unlocked.
        self._lock = (self.path / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.path / ".lock").rename(self.path / _LOCK)
        # This lock tells systemd-tmpfiles to leave the folder alone, however old it is.
        self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._reaper = _start_reaper(self.path)
        return self

    def keep_reaper(self) -> None:
        """Start the reaper again if it has died."""
        if self._reaper.poll() is not None:
            self._release()
            self._reaper = _start_reaper(self.path)

    def __exit__(self, *_: object) -> None:
        kill_processes(self.path)
        remove_regions(self.path.name)
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()
        os.close(self._held)
        self._lock.close()

    def _release(self) -> None:
        # A reaper that was killed no longer reads.
        assert self._reaper.stdin is not None
        with suppress(OSError):
            self._reaper.stdin.write(ORDERLY)
        self._reaper.stdin.close()
        self._reaper.wait()


def _start_reaper(folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-IS", beside.__file__, "reaper", folder, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # a Ctrl-C in the terminal is for the run, not for the reaper
    )


def close_regions(prefix: str) -> None:
    """Restrict shared memory whose name starts with `prefix` to its user."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with suppress(OSError):
            region.chmod(0o600)


def _remove_leftovers() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                reap(folder)


def link_models(repository: Path, copy: Path, models: Path) -> None:
    """Create links to a copy of the models, so that Python's caches stay away from hashed files.

    The copy is made once. A server restarted from it serves the same bytes, even if the repository
    has changed. To read the repository again, make another copy.

    Raises: as `copy_repository`.
    """
    copy_repository(repository, copy)
    shutil.rmtree(models, ignore_errors=True)
    for path in regular_files(copy).values():
        link = models / path.relative_to(copy)
        link.parent.mkdir(parents=True, exist_ok=True)
        # Relative links, because the folder of both may get another name.
        link.symlink_to(os.path.relpath(path, link.parent))
    _use_cores(read_description(repository)[0], models)


def _use_cores(deployment: Deployment, models: Path) -> None:
    """Write the threads of each model again if the repository was written for other cores."""
    chosen = chosen_again(deployment.threads, deployment.cores, cores())
    field = served_runtime(deployment.runtime).option_fields.get("threads", "")
    parameter = field.removeprefix("parameters.")
    for model in models.iterdir():
        path = model / "config.pbtxt"
        if model.name not in chosen or not path.is_file():
            continue
        config = parse_config(path.read_text("utf-8"))
        if parameter in config.parameters:
            config.parameters[parameter].string_value = str(chosen[model.name])
            path.unlink()  # a link to the copy, which stays as the repository is
            path.write_text(config_text(config), "utf-8")


def copy_repository(repository: Path, folder: Path) -> None:
    """Copy the models' files to a folder, unless it exists already.

    Raises: SaccadeError for a file that differs from its description, and for a link; OSError if
        the folder cannot be written or has too little space.
    """
    if folder.exists():
        return
    source = repository.resolve()
    files, present = read_description(source)[1], regular_files(source)
    # Only folders are models; the files next to them describe the repository.
    wanted = {name: digest for name, digest in files.items() if "/" in name}
    if missing := sorted(set(wanted) - set(present)):
        raise Damaged(source / missing[0], "is missing", WRITER)
    # Use a temporary name, so that nothing mistakes half a copy for a complete one.
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        left = sum(present[name].lstat().st_size for name in wanted)
        for name, digest in wanted.items():
            left -= _copy(present[name], partial / name, digest, left)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_other_copies(copy: Path) -> None:
    """Remove the other copies, which are no longer served."""
    for other in copy.parent.glob(f"{COPY}*"):
        if other != copy:
            shutil.rmtree(other, ignore_errors=True)


def _copy(source: Path, target: Path, digest: str, left: int) -> int:
    """Copy one file, compare it with its hash, and return its size."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _opened(source) as reader, target.open("x+b") as writer:
        size = os.fstat(reader.fileno()).st_size
        copy_opened(reader, writer, left)
        writer.seek(0)
        if hashlib.file_digest(writer, "sha256").hexdigest() != digest:
            raise Damaged(source, "was changed after it was written", WRITER)
        os.fchmod(writer.fileno(), 0o400)
    return size


def _opened(source: Path) -> BinaryIO:
    """Open a regular file; what was one a moment ago may now be a link or a pipe."""
    try:
        handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SaccadeError(f"{source}: cannot be read ({error.strerror}).") from error
    reader = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        reader.close()
        raise SaccadeError(f"{source}: is not a file. Remove it.")
    return reader
