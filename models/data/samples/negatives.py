# SPDX-License-Identifier: Apache-2.0
"""Images with a true and a false sentence each, by kind: SugarCrepe's JSON, CSV and JSON lines."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from saccade.core.errors import SaccadeError
from saccade.models.data.samples.listed_images import (
    ListedImages,
    image_folder,
    json_fields,
    table_columns,
    table_split,
    table_texts,
)
from saccade.models.data.samples.manifests import SENTENCES, table_rows
from saccade.models.data.samples.source import DataDescription, numbered

NEGATIVES = ("negative_caption", "negative", "negatives", "negative_captions", "false_caption")
_KINDS = ("kind", "type", "category")
_USUAL = re.compile(r"\.json$")
_JSON = "SugarCrepe's objects with filename, caption and negative_caption"
EXPECTED = (
    "sentences with false ones: SugarCrepe's .json, a .csv or .jsonl with columns of images, "
    "captions and negative_caption, or a folder with these"
)


class Negative(NamedTuple):
    """A true and a false sentence about the image in a row; the kind says what is false."""

    row: int
    caption: str
    negative: str
    kind: str


class HardNegatives(ListedImages):
    """Images, and true and false sentences about them; a file's name is the kind of its rows."""

    usual, expected = _USUAL, EXPECTED

    def __init__(self, path: Path, given: DataDescription) -> None:
        super().__init__(path, given)
        self.negatives: list[Negative] = []

    def add_file(self, file: Path, split: int) -> None:
        """Add the images and sentences of one file.

        Raises: SaccadeError if a row or an entry cannot be used.
        """
        rows = self._objects(file) if file.suffix.lower() == ".json" else self._lines(file)
        found = list(rows)
        if not found:
            raise SaccadeError(f"{file}: found no rows, expected {EXPECTED}.")
        wanted = {"captions": SENTENCES, "false sentences": NEGATIVES}
        columns = table_columns(file, list(found[0][1]), wanted)
        if file.suffix.lower() == ".json":
            names = [values.get(columns["images"]) for _, values in found]
            named = [name for name in names if isinstance(name, str) and name]
            folder, _ = image_folder(file, [named or [""]], self._given, "sentences")
            root = self.add_root(folder)
        else:
            root = self.add_root(self._given.root or file.parent)
        for where, values in found:
            self._add(file, root, split, where, values, columns)

    def _add(
        self,
        file: Path,
        root: int,
        split: int,
        where: str,
        values: dict[str, Any],
        columns: dict[str, str],
    ) -> None:
        place = f"{file}: {where}"
        image, caption, false = (
            table_texts(place, values.get(columns[what]), columns[what], one)
            for what, one in (
                ("images", "a path"),
                ("captions", "a caption"),
                ("false sentences", "a false sentence"),
            )
        )
        row = self.image(root, image[0], table_split(place, values, split), where)
        kind = next((str(values[name]) for name in _KINDS if values.get(name)), file.stem)
        self.negatives += [Negative(row, caption[0], text, kind) for text in false]

    def _objects(self, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, value in json_fields(file, _JSON):
            if not isinstance(value, dict):
                raise SaccadeError(
                    f"{file}: {name!r:.60}: found {value!r:.80}, expected {_JSON}. Correct it."
                )
            yield f"{name!r:.60}", value

    def _lines(self, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, values in enumerate(table_rows(file)):
            yield numbered(number), dict(values)


def open_negatives(name: str, given: DataDescription) -> HardNegatives:
    """List the images of a file, a folder, or a pattern such as `sugarcrepe/replace_*.json`.

    Raises: SaccadeError if there is none, or they cannot be used.
    """
    return HardNegatives.opened(name, given)
