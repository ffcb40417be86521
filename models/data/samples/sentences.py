# SPDX-License-Identifier: Apache-2.0
"""Images with sentences, true and false: COCO's, Karpathy's and SugarCrepe's JSON, tables."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from saccade.core.errors import SaccadeError
from saccade.models.data.samples.formats import is_packed, is_saved, open_source
from saccade.models.data.samples.listed_images import ListedImages, image_folder, json_fields
from saccade.models.data.samples.source import (
    ID,
    PATH,
    SENTENCE,
    SENTENCES,
    SPLIT,
    Cell,
    DataDescription,
    SampleSource,
    field_values,
    refusal,
)
from saccade.models.data.samples.tables import USUAL, columns_in

_LISTS = ("", "annotations")  # the folders that these are in
_JSON = "COCO's captions, with images and annotations"
_CAPTION = "image_id and caption. Pass captions_train2014.json instead of instances or questions"
_RAW = Cell("text", lambda value: value.strip() if isinstance(value, str) else None)
_KINDS = ("kind", "type", "category")
_CONTRASTS = "SugarCrepe's objects with filename, caption and negative_caption"
_RESTVAL = "restval"  # Karpathy's split of COCO's validation images that are for training


class Sentences(ListedImages):
    """Images, each with one or more sentences."""

    usual = re.compile(r"^(captions_.*|dataset_?.*)\.json$")
    expected = (
        "captions: a COCO captions JSON such as captions_train2014.json, a .csv, .jsonl or "
        ".parquet with columns of images and captions, WebDataset .tar with .txt, or a folder with "
        "these"
    )
    wanted: ClassVar = {"captions": SENTENCES}

    def __init__(self, path: Path, given: DataDescription) -> None:
        super().__init__(path, given)
        self._texts: list[list[str]] = []
        self._without = 0  # images of a JSON file that have no sentence

    def finish(self) -> None:
        """Set sentences, labels and splits after all files are added.

        Raises: SaccadeError if there is no sentence.
        """
        super().finish()
        if not self._texts:
            raise SaccadeError(f"{self.path}: found no captions, expected {self.expected}.")
        self.sentences = [tuple(texts) for texts in self._texts]
        if self._without:
            self.notes = (f"{self.path}: left out {self._without:,} images without captions",)

    def add(self, row: int, texts: Sequence[Any], values: Mapping[str, Any], file: Path) -> None:
        """Add sentences about the image of a row."""
        self._add(row, texts[0])

    def _add(self, row: int, texts: Iterable[str]) -> None:
        if row == len(self._texts):
            self._texts.append([])
        self._texts[row] += texts

    def add_json(self, file: Path, split: int) -> None:
        """Add COCO's images and annotations, in any order, or Karpathy's images with sentences."""
        names: dict[int | str, tuple[str, int]] = {}
        texts: dict[int | str, list[str]] = {}
        fields: set[str] = set()
        count = 0
        for field, value in json_fields(file, _JSON):
            fields.add(field)
            if field == "images":
                key, name, own, said = _image(f"{file}: image {len(names) + 1:,}", value, split)
                names[key] = name, own
                texts.setdefault(key, []).extend(said)
            elif field == "annotations":
                count += 1
                refused = refusal(f"{file}: annotation {count:,}")
                key, text = field_values(value, refused, _CAPTION, image_id=ID, caption=SENTENCE)
                texts.setdefault(key, []).append(text)
        if not names or not any(texts.values()):
            shown = ", ".join(sorted(fields)[:8]) or "none"
            raise SaccadeError(
                f"{file}: found the fields {shown} without images or captions, expected {_JSON}. "
                "Pass a file such as captions_train2014.json."
            )
        if foreign := [key for key in texts if key not in names]:
            raise SaccadeError(
                f"{file}: found a caption of image_id {foreign[0]}, which is not among the "
                f"{len(names):,} images of the file. Add the image, or remove its captions."
            )
        listed = [name for name, _ in names.values()]
        folder, _ = image_folder(file, [listed], self._given, "captions")
        root = self.add_root(folder)
        for key, (name, own) in names.items():
            if texts[key]:
                self._add(self.image(root, name, own, f"image {key}"), texts[key])
            else:
                self._without += 1


def open_captions(name: str, given: DataDescription) -> SampleSource:
    """List images with sentences in any format: such files, Parquet files, shards.

    Raises: SaccadeError if there is none, or they cannot be used.
    """
    if is_packed(name) and not has_lists(Path(name)):
        return open_source(name, replace(given, beside="sentence"))
    return Sentences.opened(name, given)


def has_lists(path: Path) -> bool:
    """Return whether a folder has JSON files of captions with their usual names."""
    if not path.is_dir() or is_saved(path):
        return False
    files = (file for inside in _LISTS for file in (path / inside).glob("*"))
    return any(Sentences.usual.search(file.name) for file in files)


def _image(where: str, value: Any, split: int) -> tuple[int | str, str, int, list[str]]:
    """Return the id, the file, the split and the sentences of an entry of `images`."""
    refused = refusal(where)
    entry: dict[str, Any] = value if isinstance(value, dict) else {}
    # Karpathy's names of the same fields.
    cells = {
        "id" if "id" in entry else "imgid": ID,
        "file_name" if "file_name" in entry else "filename": PATH,
    }
    key, name = field_values(value, refused, "an object with id and file_name", **cells)
    if isinstance(entry.get("filepath"), str) and entry["filepath"]:
        name = f"{entry['filepath']}/{name}"
    if (own := entry.get("split")) is not None:
        split = SPLIT("train" if own == _RESTVAL else own, refused, "split")
    sentences = entry.get("sentences", [])
    sentences = sentences if isinstance(sentences, list) else [sentences]
    expected = "a sentence with its text (raw)"
    texts = [field_values(one, refused, expected, raw=_RAW)[0] for one in sentences]
    return key, name, split, texts


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
        rows = [(f"{name!r:.60}", value) for name, value in json_fields(file, _CONTRASTS)]
        for where, value in rows:
            if not isinstance(value, dict):
                raise SaccadeError(
                    f"{file}: {where}: found {value!r:.80}, expected {_CONTRASTS}. Correct it."
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
