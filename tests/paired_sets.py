# SPDX-License-Identifier: Apache-2.0
"""One small set of images with sentences in every format: `python tests/paired_sets.py FOLDER`.

Generated scenes as PNG files, with two or three sentences each.
"""

import csv
import json
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from labelled_sets import SPLITS, add_member, parquet_of, save_table, write_all
from picture_files import png

from saccade.models.data.scene_texts import caption
from saccade.models.data.shapes import scenes


class Pair(NamedTuple):
    """An image as a PNG, its sentences, and its split."""

    name: str
    data: bytes
    texts: tuple[str, ...]
    split: str


def told(count: int, side_px: int = 16) -> list[Pair]:
    """Scenes of one or two objects: of every five, three are for training."""
    drawn = scenes("train", count, side_px=side_px, objects=(1, 2))
    rng = np.random.default_rng(0)
    pairs = []
    for place, (image, objects) in enumerate(zip(drawn.images, drawn.objects, strict=True)):
        texts = tuple(caption(objects, rng) for _ in range(2 + place % 2))
        split = SPLITS[max(0, place % 5 - 2)]
        pairs.append(Pair(f"{place:04}.png", png(image), texts, split))
    return sorted(pairs, key=lambda pair: SPLITS.index(pair.split))


def _files(folder: Path, pairs: Sequence[Pair]) -> Iterator[tuple[str, Pair]]:
    (folder / "images").mkdir(exist_ok=True)
    for pair in pairs:
        (folder / "images" / pair.name).write_bytes(pair.data)
        yield f"images/{pair.name}", pair


def csv_file(folder: Path, pairs: Sequence[Pair]) -> str:
    """One sentence per row, so that images occur in several rows."""
    with (folder / "pairs.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "caption", "split"])
        for path, pair in _files(folder, pairs):
            table.writerows([path, text, pair.split] for text in pair.texts)
    return str(folder / "pairs.csv")


def jsonl_file(folder: Path, pairs: Sequence[Pair]) -> str:
    """All sentences of an image in one row."""
    lines = [
        json.dumps({"file_name": path, "captions": pair.texts, "split": pair.split})
        for path, pair in _files(folder, pairs)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return str(folder / "pairs.jsonl")


def table_of(pairs: Sequence[Pair]) -> Any:
    import pyarrow as pa

    columns = {
        "image": [pair.data for pair in pairs],
        "caption": [list(pair.texts) for pair in pairs],
        "split": [pair.split for pair in pairs],
    }
    return pa.table(columns)


def parquet_file(folder: Path, pairs: Sequence[Pair]) -> str:
    return parquet_of(table_of(pairs), folder / "pairs.parquet")


def saved_folder(folder: Path, pairs: Sequence[Pair]) -> str:
    save_table(folder, table_of(pairs))
    return str(folder)


def shards(folder: Path, pairs: Sequence[Pair]) -> str:
    """WebDataset: one sentence per line of `.txt`."""
    for split in SPLITS:
        with tarfile.open(folder / f"{split}-000.tar", "w") as tar:
            for pair in pairs:
                if pair.split == split:
                    add_member(tar, pair.name, pair.data)
                    key = Path(pair.name).stem
                    add_member(tar, f"{key}.txt", "\n".join(pair.texts).encode())
    return str(folder)


def coco(folder: Path, pairs: Sequence[Pair]) -> str:
    """COCO has one file per split: `captions_{train,val,test}2014.json`."""
    names = dict(zip(SPLITS, ("train", "val", "test"), strict=True))
    files = dict(_files(folder, pairs))
    for split, name in names.items():
        own = [
            (number, path, pair)
            for number, (path, pair) in enumerate(files.items())
            if pair.split == split
        ]
        content = {
            "images": [{"id": number, "file_name": path} for number, path, _ in own],
            "annotations": [
                {"image_id": number, "id": 10 * number + index, "caption": text}
                for number, _, pair in own
                for index, text in enumerate(pair.texts)
            ],
        }
        (folder / f"captions_{name}2014.json").write_text(json.dumps(content))
    return str(folder / "captions_{train,val,test}2014.json")


FORMATS: dict[str, Callable[[Path, Sequence[Pair]], str]] = {
    "CSV": csv_file,
    "JSON lines": jsonl_file,
    "Parquet": parquet_file,
    "Hugging Face": saved_folder,
    "shards": shards,
    "COCO": coco,
}


def negatives(folder: Path, count: int = 8, side_px: int = 16) -> str:
    """SugarCrepe: one JSON per kind; here, the color is another one, or both colors swap."""
    (folder / "images").mkdir()
    wrong = {"red": "green", "green": "blue", "blue": "yellow", "yellow": "red"}
    drawn = scenes("test", count, side_px=side_px, objects=(1, 1))
    entries = {}
    for place, (image, (one,)) in enumerate(zip(drawn.images, drawn.objects, strict=True)):
        (folder / "images" / f"{place}.png").write_bytes(png(image))
        entries[str(place)] = {
            "filename": f"{place}.png",
            "caption": f"a {one.colour} {one.shape}",
            "negative_caption": f"a {wrong[one.colour]} {one.shape}",
        }
    added = {
        key: entry | {"negative_caption": f"{entry['caption']} and a cross"}
        for key, entry in list(entries.items())[: count // 2]
    }
    (folder / "replace_att.json").write_text(json.dumps(entries))
    (folder / "add_obj.json").write_text(json.dumps(added))
    return str(folder)


if __name__ == "__main__":
    write_all(FORMATS, Path(sys.argv[1]), told(400, 40))
