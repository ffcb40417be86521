# SPDX-License-Identifier: Apache-2.0
"""Which source a path or pattern is: by its suffix, or by what is in the folder."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.core.errors import SaccadeError
from saccade.models.data.samples.arrays import ArrayFile
from saccade.models.data.samples.folders import ClassFolders, visible
from saccade.models.data.samples.manifests import PathTable, told_by
from saccade.models.data.samples.shards import MaskShards, TarShards, has_text
from saccade.models.data.samples.source import DataDescription, SampleSource, split_in, split_named

if TYPE_CHECKING:
    from saccade.models.data.samples.columnar import ColumnarTable

EXPECTED = (
    "a folder of class folders, an .npz, .csv, .jsonl, .parquet or .tar file, or a folder that "
    "save_to_disk of Hugging Face wrote"
)
_FILES = (".npz", ".csv", ".jsonl", ".ndjson", ".parquet", ".tar")
_PACKED = (".parquet", ".tar")  # of which a folder or a pattern may name several
_PATTERN = re.compile(r"[*?\[]|\{.*\}")
_RANGE = re.compile(r"\{([^{}]*)\}")
_MOST_FILES = 100_000


def is_data(name: str) -> bool:
    """Return whether this is a path or a pattern of samples."""
    path = Path(name)
    if path.is_dir():
        return True
    return path.suffix.lower() in _FILES and (path.exists() or bool(_PATTERN.search(name)))


def open_source(name: str, given: DataDescription) -> SampleSource:
    """List the samples of a file, a folder, or a pattern such as `data/train-{000..009}.tar`.

    Raises: SaccadeError if there is none, or they cannot be used.
    """
    path = Path(name)
    if path.is_dir():
        return _folder(path, given)
    if not path.exists():
        return _packed(path, matching(name), given)
    _check_files([path])
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return ArrayFile(path, given)
    if suffix in _PACKED:
        return _packed(path, [path], given)
    return PathTable(path, given)


def is_packed(name: str) -> bool:
    """Return whether these are Parquet files, shards, or a folder that Hugging Face saved."""
    from saccade.models.data.samples import columnar

    path = Path(name)
    if path.is_dir():
        return columnar.is_saved(path) or bool(_packed_in(path))
    return path.suffix.lower() in _PACKED


def has_texts(name: str) -> bool:
    """Return whether these are tables or shards with sentences, from the first of them.

    Raises: SaccadeError if it cannot be read.
    """
    from saccade.models.data.samples import columnar

    path = Path(name)
    if path.is_dir() and columnar.is_saved(path):
        return told_by(columnar.saved_tables(path)[0].schema().names)
    files = _packed_in(path) if path.is_dir() else [path] if path.exists() else matching(name)
    first = next((file for file in files if file.is_file()), path)
    if first.suffix.lower() == ".parquet":
        return told_by(columnar.ParquetFile(first, -1).schema().names)
    return first.suffix.lower() == ".tar" and has_text(first)


def _folder(path: Path, given: DataDescription) -> SampleSource:
    from saccade.models.data.samples import columnar

    if columnar.is_saved(path):
        return columnar.tables_as_source(path, columnar.saved_tables(path), given)
    packed = _packed_in(path)
    return _packed(path, packed, given) if packed else ClassFolders(path, given)


def _packed_in(path: Path) -> list[Path]:
    return [file for file in _files(path) if file.suffix.lower() in _PACKED]


def tables_of(name: str) -> list["ColumnarTable"]:
    """Return the tables of Parquet files, or of a folder of Hugging Face.

    Empty if the path is none of these.
    Raises: SaccadeError if a pattern names no file, or the files are of several kinds.
    """
    from saccade.models.data.samples import columnar

    path = Path(name)
    if path.is_dir():
        if columnar.is_saved(path):
            return columnar.saved_tables(path)
        files = [file for file in _files(path) if file.suffix.lower() == ".parquet"]
    elif path.suffix.lower() != ".parquet":
        return []
    else:
        files = [path] if path.exists() else matching(name)
    _check_files(files)
    splits = splits_of(path, files)
    return [columnar.ParquetFile(file, split) for file, split in zip(files, splits, strict=True)]


def _files(path: Path) -> list[Path]:
    """Return the files in a folder and in its sub-folders, two levels deep at most."""
    found = []
    for entry in visible(path):
        if not entry.is_dir():
            found.append(path / entry.name)
    if any(file.suffix.lower() in _PACKED for file in found):
        return found
    for entry in visible(path):
        if entry.is_dir():
            inside = [path / entry.name / one.name for one in visible(path / entry.name)]
            found += [file for file in inside if file.suffix.lower() in _PACKED]
    return found


def _packed(path: Path, files: Sequence[Path], given: DataDescription) -> SampleSource:
    kinds = {file.suffix.lower() for file in files}
    if len(kinds) != 1:
        raise SaccadeError(
            f"{path}: found {' and '.join(sorted(kinds))} files, expected one kind. Name one of "
            "them, or a pattern such as 'data/*.tar'."
        )
    _check_files(files)
    splits = splits_of(path, files)
    if kinds == {".tar"}:
        return (MaskShards if given.beside == "mask" else TarShards)(path, files, splits, given)
    from saccade.models.data.samples import columnar

    tables = [columnar.ParquetFile(file, split) for file, split in zip(files, splits, strict=True)]
    return columnar.tables_as_source(path, tables, given)


def _check_files(files: Sequence[Path]) -> None:
    for file in files:
        if not file.is_file():
            raise SaccadeError(
                f"{file}: found a pipe or device, expected a file. Write the data into a file."
            )


def splits_of(path: Path, files: Sequence[Path]) -> list[int]:
    """Return the split that each file's name contains, or -1 for all if none contains one."""
    named = []
    for file in files:
        inside = file.relative_to(path).as_posix() if path.is_dir() else file.name
        split = split_in(inside)
        if split < 0 and len(files) > 1 and (folder := split_named(file.parent.name)) is not None:
            split = folder
        named.append(split)
    if any(split < 0 for split in named) and any(split >= 0 for split in named):
        odd = files[named.index(-1)]
        raise SaccadeError(
            f"{path}: {odd.name} has no split in its name, but others have, such as "
            f"{next(f.name for f, s in zip(files, named, strict=True) if s >= 0)}. Rename it, or "
            "name the files of one split with a pattern."
        )
    return named


def matching(pattern: str) -> list[Path]:
    """Return the files that a pattern with *, ?, {a,b} or {000..009} names, each list sorted.

    Raises: SaccadeError if a part of it names no file.
    """
    files: list[Path] = []
    for one in _expanded(pattern):
        found = sorted(glob.glob(one))  # noqa: PTH207  Path.glob takes no absolute patterns
        if not found:
            raise SaccadeError(
                f"data '{pattern}': found no file {one}. Correct the pattern; relative paths begin "
                f"in {Path.cwd()}."
            )
        files += [Path(file) for file in found]
    return files


def _expanded(pattern: str) -> list[str]:
    """Return the pattern with every {...} replaced, as a shell does."""
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, dots, last = match[1].partition("..")
    if dots and first.isdigit() and last.isdigit():
        count = int(last) - int(first) + 1
        if not 0 < count <= _MOST_FILES:
            raise SaccadeError(
                f"data '{pattern}': {match[0]} names {count} files, expected 1 to {_MOST_FILES}."
            )
        values = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    else:
        values = match[1].split(",")
    before, after = pattern[: match.start()], pattern[match.end() :]
    rests = _expanded(after)
    return [f"{before}{value}{rest}" for value in values for rest in rests]
