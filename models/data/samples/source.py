# SPDX-License-Identifier: Apache-2.0
"""A source of labeled samples, whatever the format of its files."""

import os
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from saccade.core.checks import did_you_mean
from saccade.core.errors import Damaged, SaccadeError
from saccade.core.files import check_labels, read_lines, read_regular
from saccade.models.data.splits import SPLITS
from saccade.models.image_decoding import ImageInput

# What folders, files and columns call the splits.
SPLIT_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_SPLIT_IN_NAME = re.compile(rf"(?:^|[-_./])({'|'.join(SPLIT_NAMES)})(?=[-_./\d]|$)")
_NAMED = 3  # files in a note
SKIP_HINT = " Training, scoring and benchmarks leave out and list such rows with --skip-bad N."
Beside = Literal["label", "sentence", "mask"]  # what is wanted of each image


class RowUnreadable(Exception):
    """Raised for a row that cannot be read; the message says what was found and what to do."""


@dataclass(frozen=True)
class DataDescription:
    """What the user says about the data besides where it is."""

    labels: tuple[str, ...] | None = None  # names of the classes, in order
    labels_path: Path | None = None  # the file that they are from
    root: Path | None = None  # folder in which the paths of a manifest begin
    beside: Beside = "label"

    @classmethod
    def of(cls, labels: Path | None, root: Path | None) -> "DataDescription":
        """Read the file of labels.

        Raises: SaccadeError if it cannot be read or has a name twice.
        """
        if labels is None:
            return cls(root=root)
        names = read_lines(labels, "label")
        if len(set(names)) < len(names):
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            raise SaccadeError(
                f"--labels {labels}: {twice!r} occurs twice, expected every label once. "
                "Remove one of the lines."
            )
        return cls(names, labels, root)


class Texts:
    """The sentences of each row, one or more, stored as bytes: millions of them stay small."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends, self._rows = array("q"), array("q")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def append(self, texts: Sequence[str]) -> None:
        """Add the sentences of the next row."""
        for text in texts:
            self._text += text.encode()
            self._ends.append(len(self._text))
        self._rows.append(len(self._ends))

    def __getitem__(self, row: int) -> tuple[str, ...]:
        """Return the sentences of a row."""
        first = self._rows[row - 1] if row else 0
        ends = [self._ends[first - 1] if first else 0, *self._ends[first : self._rows[row]]]
        return tuple(self._text[a:b].decode() for a, b in pairwise(ends))


class SampleSource(ABC):
    """Labeled samples in the order of their files; a row is read when it is asked for.

    If sentences or masks are wanted instead of labels, all rows are of one class without a name.
    Rows have masks if `masked` is true.

    Shapes: labels [n] int64, indices into class_names; split_of [n] int8, indices into SPLITS, or
            None if the data does not say which split a row is in.
    """

    path: Path
    labels: np.ndarray
    class_names: tuple[str, ...]
    sentences: Sequence[tuple[str, ...]] | Texts | None = None  # of each row
    split_of: np.ndarray | None = None
    notes: tuple[str, ...] = ()  # what was left out while listing
    masked = False

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    @abstractmethod
    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the encoded image of a row; of a larger file, the first bytes beyond the limit.

        Threads may call it at the same time.
        Raises: RowUnreadable, OSError.
        """

    @abstractmethod
    def row_name(self, row: int) -> str:
        """Return what the user calls this row, such as `row 12,345: photos/a.jpg`."""

    def refused(self, row: int, reason: str) -> SaccadeError:
        """Return the error about a row."""
        return SaccadeError(f"{self.path}: {self.row_name(row)}: {reason}")

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return the index of the object of each pixel, as written, if the source has masks.

        Shapes: -> [h w] of an integer type or bool.
        Raises: RowUnreadable, OSError.
        """
        raise AssertionError("the source has no masks")

    def without_classes(self, count: int) -> None:
        """Put all rows into one class without a name."""
        self.labels, self.class_names = np.zeros(count, dtype=np.int64), ("",)


class FolderFiles(SampleSource):
    """Files in a folder, by their paths in it."""

    _files: Sequence[str]

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the file's bytes."""
        return read_regular(self.path / self._files[row], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the file's path in the folder."""
        return self._files[row]


@dataclass(frozen=True)
class Cell:
    """A kind of value in a row: `read` returns it, or None for a value of another kind."""

    words: str
    read: Callable[[Any], Any]

    def __call__(self, value: Any, refused: Callable[[str], SaccadeError], name: str) -> Any:
        """Return the value in the column or field with this name.

        Raises: what `refused` returns, if it is of another kind.
        """
        found = self.read(value)
        if found is None:
            raise refused(
                f"found {value!r:.80} in column {name!r}, expected {self.words}. Correct the row, "
                "or remove it."
            )
        return found


@contextmanager
def reading(place: object, what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of the system, ValueErrors and further kinds into one that names the place.

    `place` is a path, or returns its name; `what` is what the file should be.

    Raises: Damaged.
    """
    damage: tuple[type[Exception], ...] = (OSError, ValueError, *kinds)
    try:
        yield
    except damage as error:
        where = place() if callable(place) else place
        why = str(error) or type(error).__name__
        raise Damaged(where, f"cannot be read as {what} ({why:.300})") from error


def refusal(where: str) -> Callable[[str], SaccadeError]:
    """Return the function that makes the error about a row or an entry of a file."""
    return lambda reason: SaccadeError(f"{where}: {reason}")


def _filled(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _stripped(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _path(value: Any) -> str | None:
    return None if "\0" in (_filled(value) or "\0") else value


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _label(value: Any) -> str | int | None:
    return _stripped(value) if isinstance(value, str) else _number(value)


def _texts(value: Any) -> tuple[str, ...] | None:
    texts = [_stripped(text) for text in (value if isinstance(value, list) else [value])]
    return tuple(map(str, texts)) if all(texts) and texts else None


def split_named(name: Any) -> int | None:
    """Return the index of the split with this name in SPLITS, or None."""
    found = SPLIT_NAMES.get(name.strip().lower()) if isinstance(name, str) else None
    return None if found is None else SPLITS.index(found)


def field_values(
    value: Any, refused: Callable[[str], SaccadeError], expected: str, **cells: Cell
) -> list[Any]:
    """Return these fields of a JSON object.

    Raises: what `refused` returns if one is missing (`expected` says what the object should be),
        or has another kind of value.
    """
    entry = value if isinstance(value, dict) else {}
    found = [cell.read(entry.get(name)) for name, cell in cells.items()]
    if None in found:
        name = list(cells)[found.index(None)]
        if entry.get(name) is not None:
            raise refused(f"found {entry[name]!r:.80} as {name}, expected {cells[name].words}.")
        shown = f"the fields {', '.join(sorted(entry)[:8])}" if entry else f"{value!r:.80}"
        raise refused(f"found {shown}, expected {expected}. Correct the entry.")
    return found


PATH = Cell("a path", _path)
TEXT = Cell("a text", _filled)
SENTENCE = Cell("a sentence", _stripped)
SENTENCES = Cell("a sentence or a list of them", _texts)
LABEL = Cell("a label, as text or number", _label)
ID = Cell("a whole number or text", lambda value: value if _filled(value) else _number(value))
SPLIT = Cell(f"one of {', '.join(SPLIT_NAMES)}", split_named)


def given_splits(splits: Sequence[int] | array) -> np.ndarray | None:
    """Return these splits of rows, or None if a row is in none (-1).

    Shapes: -> int8 [n].
    """
    return None if -1 in splits or not len(splits) else np.array(splits, dtype=np.int8)


def numbered(row: int, name: str = "") -> str:
    """Return the name of a row of a table; people count rows from 1."""
    return f"row {row + 1:,}" + (f": {name}" if name else "")


def split_in(name: str) -> int:
    """Return the index in SPLITS of the split that a file's name contains last, or -1."""
    found = _SPLIT_IN_NAME.findall(name.lower())
    return SPLITS.index(SPLIT_NAMES[found[-1]]) if found else -1


def left_out(path: Path, names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the note about files that are not samples; nothing if there are none."""
    if not names:
        return ()
    shown = ", ".join(sorted(names)[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    count = f"{len(names):,} file{'s' * (len(names) > 1)}"
    return (f"{path}: left out {count} {where}: {shown}",)


def is_hidden(name: str) -> bool:
    """Return whether a file is of no interest: hidden, or what macOS puts into archives."""
    return name.startswith(".") or name == "__MACOSX"


Refused = Callable[[int, str], SaccadeError]  # called with a row and the reason


class LabelColumn:
    """The labels of a source's rows: text or whole numbers, stored once per distinct label."""

    def __init__(self, labels: Iterable[str | int] = ()) -> None:
        self._codes: dict[str | int, int] = {}
        self._first: list[int] = []  # row in which each label occurs first
        self._of_row = array("q")
        for label in labels:
            self.add(label)

    def add(self, label: str | int) -> None:
        """Add the label of the next row."""
        code = self._codes.setdefault(label, len(self._codes))
        if code == len(self._first):
            self._first.append(len(self._of_row))
        self._of_row.append(code)

    def classes(
        self, given: DataDescription, refused: Refused, known: Sequence[str] | None = None
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the class of each row, and the names of the classes.

        With names (`--labels`, or `known` from the file itself) a label is one of them, or its
        number. Without, whole numbers count from 0, and names are sorted.

        Shapes: -> int64 [n].
        Raises: SaccadeError for a label that is none of them, with its row.
        """
        names = given.labels or (tuple(known) if known else None)
        if names is not None:
            where = f"--labels {given.labels_path}" if given.labels else "the file's own names"
            index_of = {name: index for index, name in enumerate(names)}
            found = [
                _named(label, index_of, names, where, self._first[code], refused)
                for label, code in self._codes.items()
            ]
        elif self._codes and all(_label_number(label) is not None for label in self._codes):
            found = [_label_number(label) or 0 for label in self._codes]
            self._check_numbers(found, refused)
            names = tuple(str(index) for index in range(max(found) + 1))
        else:
            names = tuple(sorted(str(label) for label in self._codes))
            index_of = {name: index for index, name in enumerate(names)}
            found = [index_of[str(label)] for label in self._codes]
        check_labels(names, "labels", "class name")
        of_row = np.frombuffer(self._of_row, dtype=np.int64) if self._of_row else np.empty(0, int)
        return np.array(found, dtype=np.int64)[of_row], names

    def _check_numbers(self, found: Sequence[int], refused: Refused) -> None:
        for index, number in enumerate(found):
            if not 0 <= number < len(self._of_row):
                raise refused(
                    self._first[index],
                    f"found the label {number}, expected 0 to classes - 1, with at most "
                    f"{len(self._of_row):,} classes for as many rows. Number the classes from 0, "
                    "or name them with --labels FILE.",
                )


def _named(
    label: str | int,
    index_of: dict[str, int],
    names: Sequence[str],
    where: str,
    row: int,
    refused: Refused,
) -> int:
    if (index := index_of.get(str(label))) is not None and isinstance(label, str):
        return index
    number = _label_number(label)
    if number is not None and 0 <= number < len(names):
        return number
    raise refused(
        row,
        f"found the label {str(label)!r:.80}, expected one of the {len(names):,} names in {where} "
        f"or a number from 0 to {len(names) - 1}.{did_you_mean(str(label), names)} Correct the "
        "label, or add it to the names.",
    )


def _label_number(label: str | int) -> int | None:
    if isinstance(label, int):
        return label
    digits = label.removeprefix("-")
    return int(label) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None


SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def visible(path: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not hidden, in the order of their names."""
    with os.scandir(path) as entries:
        kept = [entry for entry in entries if not is_hidden(entry.name)]
    return sorted(kept, key=lambda entry: entry.name)


def is_image(name: str) -> bool:
    """Return whether this is the name of an image file."""
    return name.lower().endswith(SUFFIXES)


def files_in(folder: Path, prefix: str = "") -> list[str]:
    """Return the paths of all files in a folder and its sub-folders, in the order of names."""
    found = []
    for entry in visible(folder / prefix):
        name = f"{prefix}{entry.name}"
        found += files_in(folder, f"{name}/") if entry.is_dir() else [name]
    return found


class ClassFolders(FolderFiles):
    """Files in folders that are called as classes, at any depth.

    A folder that is called as a split gives the split. For images, only folders at the top are
    splits, and only if all are. Files of other `suffixes` may also be in a split of their class
    (chair/train/1.off, as in ModelNet).

    Raises: SaccadeError if there is no such file, or one is in no folder of a split.
    """

    def __init__(
        self, path: Path, given: DataDescription, suffixes: Collection[str] = SUFFIXES
    ) -> None:
        self.path = path
        images = suffixes is SUFFIXES
        at_top = images and _are_splits(path)
        self._files, splits = [], array("b")
        strays, classes = list[str](), list[str]()
        for name in files_in(path):
            folders = name.split("/")[:-1]
            if images:
                named, own = folders[: int(at_top)], folders[int(at_top) :]
            else:
                named = [folder for folder in folders if split_named(folder) is not None]
                own = [folder for folder in folders if split_named(folder) is None]
            if not own or not name.lower().endswith(tuple(suffixes)):
                strays.append(name)
                continue
            split = split_named(named[0]) if named else None
            self._files.append(name)
            classes.append(own[0])
            splits.append(-1 if split is None else split)
        if not self._files:
            raise SaccadeError(
                f"{path}: found no {' '.join(sorted(suffixes))} files in class folders, expected "
                "one sub-folder per class."
            )
        names = {*classes, *(_class_folders(path, at_top) if images else ())}
        self.class_names, index_of = classes_of(path, tuple(sorted(names)), given)
        self.labels = np.array([index_of[name] for name in classes], dtype=np.int64)
        self.split_of = given_splits(splits)
        if self.split_of is None and max(splits) >= 0:
            raise SaccadeError(
                f"{path}: {self._files[splits.index(-1)]} is in no folder of a split, but others "
                "are. Move it into train, val or test."
            )
        self.notes = left_out(path, strays, "of another kind, or in no class folder")


def _folders(path: Path) -> list[str]:
    return [entry.name for entry in visible(path) if entry.is_dir()]


def _class_folders(path: Path, at_top: bool) -> list[str]:
    """Return the names of all class folders, also of empty ones."""
    folders = _folders(path)
    return [own for split in folders for own in _folders(path / split)] if at_top else folders


def _are_splits(path: Path) -> bool:
    """Return whether the folders at the top are splits.

    A class may be called `train`: a split has folders in it, a class has images.
    """
    folders = _folders(path)
    return bool(folders) and all(
        split_named(name) is not None
        and _folders(path / name)
        and not any(is_image(entry.name) for entry in visible(path / name))
        for name in folders
    )


def classes_of(
    path: Path, found: tuple[str, ...], given: DataDescription
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the names of the classes, and the class of each folder.

    Folders are called as the labels, or, if none is, they are the labels in the order of their
    names, as in ImageNet, whose folders have numbers.
    """
    check_labels(found, str(path), "class folder")
    if given.labels is None:
        return found, {name: index for index, name in enumerate(found)}
    index_of = {name: index for index, name in enumerate(given.labels)}
    foreign = [name for name in found if name not in index_of]
    if len(foreign) == len(found) == len(given.labels):
        return given.labels, {name: index for index, name in enumerate(found)}
    if foreign:
        raise SaccadeError(
            f"{path}: {len(foreign)} of the {len(found)} class folders (first: {foreign[0]!r}) are "
            f"not in --labels {given.labels_path}, which has {len(given.labels)} labels."
            f"{did_you_mean(foreign[0], given.labels)} Add them, or pass as many labels as there "
            "are folders, in the order of the folders' names."
        )
    return given.labels, index_of
