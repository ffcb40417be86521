# SPDX-License-Identifier: Apache-2.0
"""Images with a true and a false sentence each, by kind: SugarCrepe's JSON, CSV and JSON lines."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from saccade.core.errors import SaccadeError
from saccade.models.data.samples.listed_images import ListedImages, image_folder, json_fields
from saccade.models.data.samples.source import SENTENCES, DataDescription
from saccade.models.data.samples.tables import USUAL, columns_in

_KINDS = ("kind", "type", "category")
_JSON = "SugarCrepe's objects with filename, caption and negative_caption"


class Negative(NamedTuple):
    """A true and a false sentence about the image in a row; the kind says what is false."""

    row: int
    caption: str
    negative: str
    kind: str


class HardNegatives(ListedImages):
    """Images, and true and false sentences about them; a file's name is the kind of its rows."""

    usual = re.compile(r"\.json$")
    expected = (
        "sentences with false ones: SugarCrepe's .json, a .csv or .jsonl with columns of images, "
        "captions and negative_caption, or a folder with these"
    )
    wanted: ClassVar = {"captions": SENTENCES, "false sentences": SENTENCES}

    def __init__(self, path: Path, given: DataDescription) -> None:
        super().__init__(path, given)
        self.negatives: list[Negative] = []

    def add(self, row: int, texts: Sequence[Any], values: Mapping[str, Any], file: Path) -> None:
        """Add the false sentences about the image of a row."""
        caption, false = texts
        kind = next((str(values[name]) for name in _KINDS if values.get(name)), file.stem)
        self.negatives += [Negative(row, caption[0], text, kind) for text in false]

    def add_json(self, file: Path, split: int) -> None:
        """Add the images and sentences of one of SugarCrepe's files."""
        rows = [(f"{name!r:.60}", value) for name, value in json_fields(file, _JSON)]
        for where, value in rows:
            if not isinstance(value, dict):
                raise SaccadeError(
                    f"{file}: {where}: found {value!r:.80}, expected {_JSON}. Correct it."
                )
        if rows:
            (image,) = columns_in(file, list(rows[0][1]), ("images",), (), USUAL)["images"]
            names = [str(value[image]) for _, value in rows if value.get(image)]
            folder, _ = image_folder(file, [names or [""]], self._given, "sentences")
            self.add_rows(file, self.add_root(folder), split, rows)

    def finish(self) -> None:
        """Set labels and splits after all files are added.

        Raises: SaccadeError if there is no false sentence.
        """
        super().finish()
        if not self.negatives:
            raise SaccadeError(f"{self.path}: found no rows, expected {self.expected}.")


def open_negatives(name: str, given: DataDescription) -> HardNegatives:
    """List the images of a file, a folder, or a pattern such as `sugarcrepe/replace_*.json`.

    Raises: SaccadeError if there is none, or they cannot be used.
    """
    return HardNegatives.opened(name, given)
