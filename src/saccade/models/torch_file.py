# SPDX-License-Identifier: Apache-2.0
"""Reader of torch.save's files, which runs nothing in them and does not trust their sizes."""

import pickle
import pickletools
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from saccade import limits
from saccade.archives import ArchiveRefused, check_archive
from saccade.files import FileRefused

_OLD_PICKLES = 5  # magic, version, machine, the object, the names of its storages
# Opcodes that put what is on the stack into what stands below it.
_FILLING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_KEEPING = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_RECALLING = {"GET", "BINGET", "LONG_BINGET"}


class TorchFileRefused(ValueError):
    """Damaged, or larger or deeper than any state dict; the message says which."""


class NeedsCode(TorchFileRefused):
    """Holds objects that only code from the file could make."""


def load_torch(path: Path, allowed: AbstractContextManager[Any] | None = None) -> Any:
    """The tensors and plain values of a file.

    `allowed` is torch's context of further types that are plain data.

    Raises: NeedsCode, TorchFileRefused, OSError if the file cannot be read.
    """
    import torch

    _check(path)
    try:
        with allowed or nullcontext():
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise NeedsCode(str(error)) from error
    except OSError:
        raise
    except Exception as error:  # an unpickler that is fed at random ends in any way
        raise TorchFileRefused(f"{str(error) or type(error).__name__}") from error


def _check(path: Path) -> None:
    """The names and shapes as far as they can be known without making anything of them."""
    if not path.is_file():
        raise FileRefused("found a folder, pipe or device, expected a file")
    if path.stat().st_size > limits.WEIGHTS_BYTES:
        raise TorchFileRefused(
            f"{path.stat().st_size} bytes, at most {limits.WEIGHTS_BYTES} are read"
        )
    with path.open("rb") as file:
        # As torch decides: zipfile would look at the end, where another file's end may stand.
        if file.peek(4)[:4] != b"PK\x03\x04":
            left = limits.PICKLE_OPCODES
            for _ in range(_OLD_PICKLES):
                left -= _check_pickle(file, left)
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
                    _check_member(archive, entry)
    except (TorchFileRefused, OSError):
        raise
    except Exception as error:  # zipfile and zlib have a dozen kinds for damage
        raise TorchFileRefused(f"is damaged ({error!s:.100})") from error


def _check_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    if entry.file_size > limits.PICKLE_BYTES:
        raise TorchFileRefused(
            f"{entry.filename!r:.80} has {entry.file_size} bytes of names and shapes, at most "
            f"{limits.PICKLE_BYTES} are read"
        )
    with archive.open(entry) as stream:
        _check_pickle(stream, limits.PICKLE_OPCODES)


def _check_pickle(file: IO[bytes], most: int) -> int:
    """The number of opcodes of one pickle; how deep its values nest is followed on the way.

    A tuple of tuples of tuples ends the process when it is hashed, a list of lists when it is
    looked through.
    """
    count = 0
    depths = _Depths()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file), 1):
            if count > most:
                raise TorchFileRefused(f"more than {most} steps to read its names and shapes")
            if depths.after(opcode, argument) > limits.PICKLE_DEPTH:
                raise TorchFileRefused(f"nested more than {limits.PICKLE_DEPTH} deep")
    except TorchFileRefused:
        raise
    except Exception as error:
        raise TorchFileRefused(f"its names and shapes are damaged ({error!s:.100})") from error
    return count


class _Depths:
    """The stack of an unpickler with nothing on it but how deep each value nests."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, int] = {}

    def after(self, opcode: pickletools.OpcodeInfo, argument: Any) -> int:
        """The depth of what the opcode leaves on top."""
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
            taken[-1] -= 1  # the container itself does not become deeper by what it gets
        return taken
