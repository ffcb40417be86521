# SPDX-License-Identifier: Apache-2.0
"""Images that tables and JSON files list, with texts about them: one row per image."""

import re
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Self

from saccade.core.checks import did_you_mean
from saccade.core.errors import SaccadeError
from saccade.core.json_text import stream_json
from saccade.models.data.samples.formats import PATTERN, matching, splits_of
from saccade.models.data.samples.source import (
    PATH,
    SPLIT,
    Cell,
    DataDescription,
    SampleSource,
    given_splits,
    numbered,
    reading,
    refusal,
    visible,
)
from saccade.models.data.samples.tables import TEXT_TABLES, USUAL, Columns, Root, columns_in, lines
from saccade.models.data.splits import SPLITS

_COCO_NAME = re.compile(r"COCO_([a-z]+\d{4})_")
_TRIED = 50  # images that say whether a folder is the right one


class ListedImages(SampleSource):
    """Images of one or more folders; an image that is listed again is the same row.

    Raises: SaccadeError if an image is in two splits.
    """

    usual: re.Pattern[str]  # names of the JSON files in a folder
    expected: str  # what the data should be, for messages
    wanted: ClassVar[
        Mapping[str, Cell]
    ]  # what tables have beside images, by its name in `tables.USUAL`

    def __init__(self, path: Path, given: DataDescription) -> None:
        self.path, self._given = path, given
        self._roots: list[Root] = []
        self._root_of = array("i")
        self._files: list[str] = []
        self._listed: list[str] = []  # where each image is listed first, as the user counts
        self._row_of: dict[tuple[int, str], int] = {}
        self._splits = array("b")

    @classmethod
    def opened(cls, name: str, given: DataDescription) -> Self:
        """List the images of a file, a folder, or a pattern of files.

        Raises: SaccadeError if there is none, or they cannot be used.
        """
        source = cls(Path(name), given)
        source.add_files(listed_files(name, cls.usual, cls.expected))
        source.finish()
        return source

    def add_files(self, files: Sequence[tuple[Path, int]]) -> None:
        """Add the images and texts of files, each with its split or -1.

        Raises: SaccadeError if a row or a field cannot be used.
        """
        for file, split in files:
            if file.suffix.lower() == ".json":
                self.add_json(file, split)
            else:
                rows = ((numbered(row), values) for row, values in enumerate(lines(file)))
                self.add_rows(file, self.add_root(self._given.root or file.parent), split, rows)

    @abstractmethod
    def add_json(self, file: Path, split: int) -> None:
        """Add the images and texts of one JSON file.

        Raises: SaccadeError if an entry cannot be used.
        """

    @abstractmethod
    def add(self, row: int, texts: Sequence[Any], values: Mapping[str, Any], file: Path) -> None:
        """Add what is `wanted` about the image of a row, and the other values beside it."""

    def add_rows(
        self, file: Path, root: int, split: int, rows: Iterable[tuple[str, Mapping[str, Any]]]
    ) -> None:
        """Add rows of one file, each with what the user calls it.

        Raises: SaccadeError if a column is missing, or a row has another kind of value.
        """
        columns: Columns = {}
        for where, values in rows:
            columns = columns or columns_in(
                file, list(values), ("images", *self.wanted), ("splits",), USUAL
            )
            refused = refusal(f"{file}: {where}")
            own = columns.get("splits", ("",))[0]
            part = SPLIT(values[own], refused, own) if own in values else split
            (image,) = columns["images"]
            row = self.image(root, PATH(values.get(image), refused, image).strip(), part, where)
            names = {what: columns[what][0] for what in self.wanted}
            texts = [
                self.wanted[what](values.get(name), refused, name) for what, name in names.items()
            ]
            self.add(row, texts, values, file)

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the file's bytes."""
        return self._roots[self._root_of[row]].read(self._files[row], most_bytes)

    def row_name(self, row: int) -> str:
        """Return where the image is listed, and its path."""
        return f"{self._listed[row]}: {self._files[row]}"

    def add_root(self, folder: Path) -> int:
        """Add a folder of images and return its number; files may share one."""
        places = [place for place, root in enumerate(self._roots) if root.path == folder]
        if not places:
            self._roots.append(Root(folder))
        return places[0] if places else len(self._roots) - 1

    def image(self, root: int, file: str, split: int, listed: str) -> int:
        """Return the row of an image, which may be new; `split` is an index into SPLITS, or -1.

        Raises: SaccadeError if the same image was in another split before.
        """
        file = str(PurePosixPath(file))
        row = self._row_of.setdefault((root, file), len(self._files))
        if row == len(self._files):
            self._files.append(file)
            self._root_of.append(root)
            self._listed.append(listed)
            self._splits.append(split)
        elif self._splits[row] != split:
            before, now = (SPLITS[index] for index in (self._splits[row], split))
            raise SaccadeError(
                f"{self.path}: {listed}: {file}: found the split {now}, but {self._listed[row]} "
                f"has the same image in {before}. Put an image into one split only."
            )
        return row

    def finish(self) -> None:
        """Set labels and splits after all images are added."""
        self.without_classes(len(self._files))
        self.split_of = given_splits(self._splits)


def json_fields(path: Path, wanted: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of the object in a file, as `stream_json` does.

    Raises: SaccadeError if the file cannot be read; `wanted` is what it should be.
    """
    with reading(path, wanted):
        yield from stream_json(path)


def image_folder(
    path: Path, namings: Sequence[Sequence[str]], given: DataDescription, what: str
) -> tuple[Path, int]:
    """Return the folder of a JSON file's images, and which of the namings its files have.

    The folder is beside the file or in --data-root. It may be called as the file's subset, such as
    train2014, and be in a folder `images`.

    Raises: SaccadeError if no such folder has one of the first images.
    """
    subsets = ["", path.stem.rpartition("_")[2]]
    if match := _COCO_NAME.match(namings[0][0]):
        subsets.append(match[1])
    beside = [path.parent, path.parent.parent]
    folders = dict.fromkeys(
        base / prefix / subset
        for base in ([given.root] if given.root else beside)
        for prefix in ("", "images")
        for subset in subsets
    )
    for folder in folders:
        root = Root(folder)
        for naming, names in enumerate(namings):
            if any(root.has(name) for name in names[:_TRIED]):
                return folder, naming
    first = " or ".join(repr(names[0])[:120] for names in namings)
    raise SaccadeError(
        f"{path}: found {what}, but no images: {first} and the next ones are in none of "
        f"{', '.join(map(str, folders))}. Put the folder of images beside the file, or name it "
        "with --data-root."
    )


def listed_files(name: str, usual: re.Pattern[str], expected: str) -> list[tuple[Path, int]]:
    """Return the files that --data names, with the split in the name of each or -1.

    In a folder, these are the JSON files with a usual name, there or in its folder `annotations`;
    without one, the tables in it.

    Raises: SaccadeError if there is none.
    """
    path = Path(name)
    if path.is_dir():
        inside = [path, *filter(Path.is_dir, (path / "annotations",))]
        found = [folder / entry.name for folder in inside for entry in visible(folder)]
        files = [file for file in found if usual.search(file.name)]
        files = files or [file for file in found if file.suffix.lower() in TEXT_TABLES]
    elif path.exists() or PATTERN.search(name):
        files = matching(name)
    else:
        raise SaccadeError(
            f"--data {name}: found no such file or folder.{did_you_mean(name, ('shapes',))} Pass "
            f"shapes, or {expected}."
        )
    kinds = {file.suffix.lower() for file in files}
    if not files or not kinds <= {".json", *TEXT_TABLES} or (".json" in kinds and len(kinds) > 1):
        shown = ", ".join(sorted(file.name for file in files)[:3]) or "no such file"
        raise SaccadeError(f"{name}: found {shown}, expected {expected}.")
    return list(zip(files, splits_of(path, files), strict=True))
