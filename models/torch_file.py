# SPDX-License-Identifier: Apache-2.0
"""Reader of torch.save files that runs nothing in them and does not trust their sizes."""

import pickle
import pickletools
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from saccade.core import limits
from saccade.core.archives import ArchiveRefused, check_archive
from saccade.core.files import FileRefused

_OLD_PICKLES = 5  # magic, version, machine, the object, names of its storages
# Opcodes that move the top of the stack into the value below it.
_FILLING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_KEEPING = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_RECALLING = {"GET", "BINGET", "LONG_BINGET"}


class TorchFileRefused(ValueError):
    """The file is damaged, or larger or deeper than any state dict; the message says which."""


class NeedsCode(TorchFileRefused):
    """The file contains objects that only its own code could create."""


def load_torch(path: Path, allowed: AbstractContextManager[Any] | None = None) -> Any:
    """Read the tensors and plain values of a file.

    `allowed` is torch's context manager that allows further types of plain data.

    Raises: NeedsCode, TorchFileRefused, OSError if the file cannot be read.
    """
    import torch

    _check(path)
    try:
        with allowed or nullcontext():
            # Numbers in an archive are read when they are used; older files cannot be mapped.
            mapped = _is_archive(path)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise NeedsCode(str(error)) from error
    except OSError:
        raise
    except Exception as error:  # random input can make an unpickler raise anything
        raise TorchFileRefused(f"{str(error) or type(error).__name__}") from error


def texts_of(path: Path) -> frozenset[str]:
    """Return every string in a torch.save file, without unpickling: tensor names, and modules.

    Raises: TorchFileRefused, OSError if the file cannot be read.
    """
    texts: set[str] = set()
    _check(path, texts)
    return frozenset(texts)


def _check(path: Path, texts: set[str] | None = None) -> None:
    """Check the names and shapes as far as possible without unpickling them."""
    if not path.is_file():
        raise FileRefused("found a folder, pipe or device, expected a file")
    if path.stat().st_size > limits.WEIGHTS_BYTES:
        raise TorchFileRefused(
            f"{path.stat().st_size} bytes, expected at most {limits.WEIGHTS_BYTES}"
        )
    if not _is_archive(path):
        with path.open("rb") as file:
            left = limits.PICKLE_OPCODES
            for _ in range(_OLD_PICKLES):
                left -= _check_pickle(file, left, texts)
                if not file.peek(1):
                    break
        return
    try:
        entries = check_archive(path, limits.WEIGHTS_BYTES)
    except ArchiveRefused as error:
        raise TorchFileRefused(str(error)) from error
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in entries:
                if entry.filename.endswith(".pkl"):
                    _check_member(archive, entry, texts)
    except (TorchFileRefused, OSError):
        raise
    except Exception as error:  # zipfile and zlib raise a dozen types for damage
        raise TorchFileRefused(f"is damaged ({error!s:.100})") from error


def _is_archive(path: Path) -> bool:
    """Decide as torch does: zipfile would look at the end, which may belong to another file."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _check_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, texts: set[str] | None) -> None:
    if entry.file_size > limits.PICKLE_BYTES:
        raise TorchFileRefused(
            f"{entry.filename!r:.80} has {entry.file_size} bytes of names and shapes, expected at "
            f"most {limits.PICKLE_BYTES}"
        )
    with archive.open(entry) as stream:
        _check_pickle(stream, limits.PICKLE_OPCODES, texts)


def _check_pickle(file: IO[bytes], most: int, texts: set[str] | None = None) -> int:
    """Count the opcodes of one pickle, and check how deep its values nest.

    The strings in it are added to `texts`.

    Nested tuples would crash the process when they are hashed, nested lists when they are
    traversed.
    """
    count = 0
    depths = _Depths()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file), 1):
            if count > most:
                raise TorchFileRefused(f"its names and shapes take more than {most} steps to read")
            if texts is not None and "UNICODE" in opcode.name:
                texts.add(str(argument))
            if texts is not None and opcode.name == "GLOBAL":
                name = str(argument).replace(" ", ".")
                texts |= {name} if name.startswith("torch.nn.") else set()
            if depths.after(opcode, argument) > limits.PICKLE_DEPTH:
                raise TorchFileRefused(f"nested more than {limits.PICKLE_DEPTH} deep")
    except TorchFileRefused:
        raise
    except Exception as error:
        raise TorchFileRefused(f"its names and shapes are damaged ({error!s:.100})") from error
    return count


class _Depths:
    """The stack of an unpickler that records only how deep each value nests."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, int] = {}

    def after(self, opcode: pickletools.OpcodeInfo, argument: Any) -> int:
        """Return the depth of the value that the opcode leaves on top."""
        stack, name = self._stack, opcode.name
        if name in _KEEPING:
            self._memo[len(self._memo) if name == "MEMOIZE" else int(argument)] = stack[-1]
        elif name in _RECALLING:
            stack.append(self._memo[int(argument)])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            taken = self._taken(opcode)
            if opcode.stack_after:
                stack.append(max(taken) + 1 if taken else 0)
        return stack[-1] if stack else 0

    def _taken(self, opcode: pickletools.OpcodeInfo) -> list[int]:
        wanted = [kind.name for kind in opcode.stack_before]
        taken = []
        if "mark" in wanted:
            height = self._marks.pop()
            taken = self._stack[height:]
            del self._stack[height:]
            wanted = wanted[: wanted.index("mark")]
        for _ in wanted:
            taken.append(self._stack.pop())
        if opcode.name in _FILLING and taken:
            taken[-1] -= 1  # the container itself gets no deeper from its content
        return taken
