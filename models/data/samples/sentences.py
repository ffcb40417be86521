# SPDX-License-Identifier: Apache-2.0
"""Images with sentences: COCO's JSON, Karpathy's, CSV and JSON lines; one row per image."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.core.errors import Damaged, SaccadeError
from saccade.models.data.samples.columnar import is_saved
from saccade.models.data.samples.formats import is_packed, open_source
from saccade.models.data.samples.listed_images import (
    ListedImages,
    checked_id,
    image_folder,
    json_fields,
    table_columns,
    table_split,
    table_texts,
)
from saccade.models.data.samples.manifests import SENTENCES, table_rows
from saccade.models.data.samples.source import DataDescription, SampleSource, numbered, split_named

EXPECTED = (
    "captions: a COCO captions JSON such as captions_train2014.json, a .csv, .jsonl or .parquet "
    "with columns of images and captions, WebDataset .tar with .txt, or a folder with these"
)
USUAL = re.compile(r"^(captions_.*|dataset_?.*)\.json$")
_LISTS = ("", "annotations")  # the folders that these are in
_JSON = "COCO's captions, with images and annotations"
_RESTVAL = "restval"  # Karpathy's split of COCO's validation images that are for training


class Sentences(ListedImages):
    """Images, each with one or more sentences."""

    usual, expected = USUAL, EXPECTED

    def __init__(self, path: Path, given: DataDescription) -> None:
        super().__init__(path, given)
        self._texts: list[list[str]] = []
        self._without = 0  # images of a JSON file that have no sentence

    def add_file(self, file: Path, split: int) -> None:
        """Add the images and sentences of one file.

        Raises: SaccadeError if a row or field cannot be used.
        """
        if file.suffix.lower() == ".json":
            self._add_json(file, split)
        else:
            self._add_table(file, split)

    def finish(self) -> None:
        """Set sentences, labels and splits after all files are added.

        Raises: SaccadeError if there is no sentence.
        """
        super().finish()
        if not self._texts:
            raise SaccadeError(f"{self.path}: found no captions, expected {EXPECTED}.")
        self.sentences = [tuple(texts) for texts in self._texts]
        if self._without:
            self.notes = (f"{self.path}: left out {self._without:,} images without captions",)

    def _add(self, row: int, texts: Iterable[str]) -> None:
        if row == len(self._texts):
            self._texts.append([])
        self._texts[row] += texts

    def _add_table(self, file: Path, split: int) -> None:
        root = self.add_root(self._given.root or file.parent)
        columns: dict[str, str] = {}
        for number, values in enumerate(table_rows(file)):
            columns = columns or table_columns(file, list(values), {"captions": SENTENCES})
            where = f"{file}: {numbered(number)}"
            (name,) = table_texts(where, values.get(columns["images"]), columns["images"], "a path")
            column = columns["captions"]
            texts = table_texts(where, values.get(column), column, "a caption")
            own = table_split(where, values, split)
            self._add(self.image(root, name, own, numbered(number)), texts)

    def _add_json(self, file: Path, split: int) -> None:
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
                key, text = _annotation(f"{file}: annotation {count:,}", value)
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


def open_sentences(name: str, given: DataDescription) -> Sentences:
    """List the images of a file, a folder, or a pattern such as `captions_{train,val}2014.json`.

    Raises: SaccadeError if there is none, or they cannot be used.
    """
    return Sentences.opened(name, given)


def open_captions(name: str, given: DataDescription) -> SampleSource:
    """List images with sentences in any format: such files, Parquet files, shards.

    Raises: SaccadeError if there is none, or they cannot be used.
    """
    if is_packed(name) and not has_lists(Path(name)):
        return open_source(name, replace(given, beside="sentence"))
    return open_sentences(name, given)


def has_lists(path: Path) -> bool:
    """Return whether a folder has JSON files of captions with their usual names."""
    if not path.is_dir() or is_saved(path):
        return False
    return any(USUAL.search(file.name) for inside in _LISTS for file in (path / inside).glob("*"))


def _image(where: str, value: Any, split: int) -> tuple[int | str, str, int, list[str]]:
    """Return the id, the file, the split and the sentences of an entry of `images`."""
    entry = value if isinstance(value, dict) else {}
    name = entry.get("file_name", entry.get("filename"))
    if not isinstance(name, str) or not name:
        raise Damaged(where, f"found {value!r:.80}, expected an object with file_name")
    key = checked_id(where, entry.get("id", entry.get("imgid")), "id")
    if isinstance(entry.get("filepath"), str) and entry["filepath"]:
        name = f"{entry['filepath']}/{name}"
    if (own := entry.get("split")) is not None:
        named = "train" if own == _RESTVAL else str(own)
        if (found := split_named(named)) is None:
            raise SaccadeError(
                f"{where}: found the split {own!r:.80}, expected train, val or test."
            )
        split = found
    sentences = entry.get("sentences", [])
    sentences = sentences if isinstance(sentences, list) else [sentences]
    texts = [one.get("raw") if isinstance(one, dict) else None for one in sentences]
    raw = [text.strip() for text in texts if isinstance(text, str)]
    if len(raw) < len(texts):
        raise SaccadeError(
            f"{where}: found sentences {sentences!r:.80}, expected their texts (raw)."
        )
    return key, name, split, raw


def _annotation(where: str, value: Any) -> tuple[int | str, str]:
    entry = value if isinstance(value, dict) else {}
    text = entry.get("caption")
    if not isinstance(text, str) or not text.strip() or "image_id" not in entry:
        found = f"the fields {', '.join(sorted(entry)[:8])}" if entry else f"{value!r:.80}"
        if isinstance(text, str):
            found = f"the caption {text!r:.80}"
        hint = "Pass captions_train2014.json instead of instances or questions"
        raise SaccadeError(
            f"{where}: found {found}, expected image_id and caption. {hint}, or correct the entry."
        )
    return checked_id(where, entry["image_id"], "image_id"), text.strip()
