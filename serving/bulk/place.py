# SPDX-License-Identifier: Apache-2.0
"""A folder or bucket, by path or address, in which files are written atomically."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import isabs, join, normpath
from tempfile import NamedTemporaryFile
from typing import Any, Literal, TypeVar

from saccade.core import limits
from saccade.core.errors import SaccadeError, require
from saccade.core.files import FileRefused, check_regular, read_regular, write_atomically
from saccade.models.data.samples.source import RowUnreadable
from saccade.models.data.samples.tables import LEADS_OUT, Root

PATIENCE_S = 120.0  # for a store that has stopped answering
PATIENCE_AT_FIRST_S = 15.0  # for a store that has not answered yet: its address may be wrong
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0
EXTRA = "bulk"
_FINAL = ("NO_SUCH_BUCKET", "ACCESS_DENIED", "INVALID_ACCESS_KEY", "SIGNATURE", "HTTP status 403")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """A folder on this machine, or at an address of `pyarrow.fs`: s3://, gs://, hdfs://.

    If a store stops answering, requests are repeated for two minutes.
    """

    root: str
    name: str = ""  # a file or folder in it

    @property
    def is_local(self) -> bool:
        """True for a path or a file:// address."""
        return "://" not in self.root or self.root.startswith("file://")

    def reach(self, flag: str) -> None:
        """Check that the store answers; `flag` is the option that named it.

        Raises: SaccadeError if it does not.
        """
        try:
            self._patiently(lambda fs, path: fs.get_file_info(path), PATIENCE_AT_FIRST_S)
        except OSError as error:
            raise SaccadeError(
                f"{self}: cannot be reached ({_first_line(error)}). Check the address in {flag}, "
                "and set the credentials that its store needs."
            ) from error

    def join(self, name: str) -> "Place":
        """Return a file or folder in this place."""
        return Place(self.root, f"{self.name}/{name}" if self.name else name)

    @property
    def parent(self) -> "Place":
        """The folder of the file that the path or address names."""
        if self.is_local:
            return Place(str(self.path.parent))
        head, mark, query = self.root.partition("?")
        return Place(f"{head.rpartition('/')[0]}{mark}{query}")

    def read_named(self, path: str, folder: str, limit: int) -> bytes:
        """Return the bytes of the file in this place that a row of a table names.

        The row may name it from `folder` in this place, or by its whole path or address. It has no
        influence on the store and its options.

        Raises: RowUnreadable if it leads out of this place; otherwise as `read`.
        """
        if self.is_local:
            return Root(self.path).read(join(folder, path.removeprefix("file://")), limit)
        inside = path.removeprefix(f"{self}/")
        name = normpath(inside if inside != path else join(folder, path))
        if "://" in inside or isabs(name) or name.split("/")[0] == "..":
            raise RowUnreadable(LEADS_OUT.format(self))
        return self.join(name).read(limit)

    @property
    def last(self) -> str:
        """The last part of the path or address."""
        return PurePosixPath(self.root).name

    @contextmanager
    def on_this_machine(self) -> Iterator[Path]:
        """Yield the path of the file, or of a copy of it on this machine."""
        if self.is_local:
            yield self.path
            return
        with NamedTemporaryFile(prefix="saccade-bulk-") as copy:
            copy.write(self.read())
            copy.flush()
            yield Path(copy.name)

    def __str__(self) -> str:
        # The query of an address may contain secrets.
        return f"{self.root.partition('?')[0].rstrip('/')}/{self.name}".removesuffix("/")

    def read(self, limit: int = limits.WEIGHTS_BYTES) -> bytes:
        """Return the bytes of the file.

        Raises: FileNotFoundError if there is none; FileRefused if it is a pipe or device, or has
            more than `limit` bytes; another OSError if it cannot be read.
        """
        if self.is_local:
            return read_regular(self.path, limit)
        return self._patiently(lambda fs, path: _read(fs, path, limit))

    def open(self, mode: Literal["rb"] = "rb") -> Any:
        """Open the file for random access, as a path does.

        Raises: as `read`.
        """
        if self.is_local:
            check_regular(self.path, sys.maxsize)
        return self._patiently(lambda fs, path: fs.open_input_file(path))

    def write(self, data: bytes) -> None:
        """Write the file atomically, replacing an existing one.

        Raises: SaccadeError if it cannot be written.
        """
        if self.is_local:
            write_atomically(self.path, data)
            return
        try:
            self._patiently(lambda fs, path: _put(fs, path, data))
        except OSError as error:
            raise SaccadeError(
                f"{self}: cannot be written ({_first_line(error)}). Choose an --out that can be "
                "written, and set the credentials that its store needs."
            ) from error

    def remove(self) -> None:
        """Remove the file if it exists."""
        if self.is_local:
            self.path.unlink(missing_ok=True)
        elif self.exists():
            self._patiently(lambda fs, path: fs.delete_file(path))

    def exists(self) -> bool:
        """Return whether there is a file or folder."""
        from pyarrow.fs import FileType

        return bool(
            self._patiently(lambda fs, path: fs.get_file_info(path)).type != FileType.NotFound
        )

    def is_file(self) -> bool:
        """Return whether it is a file, or a pipe or device, which `read` refuses."""
        from pyarrow.fs import FileType

        kind = self._patiently(lambda fs, path: fs.get_file_info(path)).type
        return kind not in (FileType.NotFound, FileType.Directory)

    def is_linked_folder(self) -> bool:
        """Return whether it is a link to a folder on this machine."""
        return self.is_local and self.path.is_symlink() and self.path.is_dir()

    def files(self, *, recursive: bool = False) -> Iterator[tuple[str, int]]:
        """Return the names of the files in it, with `/` between folders, and their sizes.

        On this machine also of pipes, devices, links that lead nowhere and links to folders, which
        are not followed: reading one says what it is.

        Units: bytes.
        Raises: OSError.
        """
        if self.is_local:
            return iter(sorted(_on_disk(str(self.path), recursive)))

        from pyarrow.fs import FileSelector

        def found(fs: Any, path: str) -> list[tuple[str, int]]:
            infos = fs.get_file_info(FileSelector(path, allow_not_found=True, recursive=recursive))
            start = len(path.rstrip("/")) + 1
            return [(info.path[start:], info.size) for info in infos if info.is_file]

        return iter(sorted(self._patiently(found)))

    @property
    def path(self) -> Path:
        """Path of a local place."""
        return Path(self.root.removeprefix("file://")).absolute() / self.name

    def _patiently(self, ask: Callable[[Any, str], _T], patience_s: float | None = None) -> _T:
        end = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                fs, path = self._file_system()
                return ask(fs, path)
            except FileNotFoundError:
                raise
            except OSError as error:
                if self.is_local or _is_final(error) or time.monotonic() > end:
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _file_system(self) -> tuple[Any, str]:
        fs, path = _connected(self.root)
        return fs, f"{path.rstrip('/')}/{self.name}".removesuffix("/")


@cache
def _connected(root: str) -> tuple[Any, str]:
    fs = require("pyarrow.fs", extra=EXTRA)
    place = Place(root)
    if place.is_local:
        return fs.LocalFileSystem(), str(place.path)
    try:
        connected: tuple[Any, str] = fs.FileSystem.from_uri(root)
    except (ValueError, NotImplementedError) as error:
        raise SaccadeError(
            f"{place}: is not a supported address ({_first_line(error)}), expected a path or an "
            "address such as s3://bucket/prefix or gs://bucket/prefix."
        ) from error
    return connected


def _on_disk(folder: str, recursive: bool) -> Iterator[tuple[str, int]]:
    for entry in os.scandir(folder) if os.path.lexists(folder) else ():
        if not entry.is_dir(follow_symlinks=False):
            yield entry.name, entry.stat().st_size if entry.is_file() else 0
        elif recursive:
            inside = _on_disk(entry.path, recursive)
            yield from ((f"{entry.name}/{name}", size) for name, size in inside)


def _read(fs: Any, path: str, limit: int) -> bytes:
    with fs.open_input_file(path) as file:
        if (size := file.size()) > limit:
            raise FileRefused(f"found {size} bytes, expected at most {limit}")
        data: bytes = file.read()
    return data


def _put(fs: Any, path: str, data: bytes) -> None:
    # An object appears only when its stream is closed.
    with fs.open_output_stream(path) as stream:
        stream.write(data)


def _is_final(error: OSError) -> bool:
    """Return whether a retry is pointless: no such bucket, access denied, too large a file."""
    final = isinstance(error, PermissionError | FileRefused)
    return final or any(word in str(error) for word in _FINAL)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
