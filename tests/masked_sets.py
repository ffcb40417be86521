# SPDX-License-Identifier: Apache-2.0
"""One small set of images with instance masks, in every format that is read.

`python tests/masked_sets.py FOLDER` writes them.
"""

import json
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from labelled_sets import add_member, parquet_of, save_table, write_all
from picture_files import png
from PIL import Image

HEIGHT, WIDTH = 24, 40  # not square: 8 columns on each side are cut off
Pair = tuple[np.ndarray, np.ndarray]


def scenes(count: int = 10) -> list[Pair]:
    """Dark noise with two lighter rectangles each, the smaller one in front."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(count):
        image = rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        mask = np.zeros((HEIGHT, WIDTH), np.uint8)
        top, left = int(rng.integers(4)), int(rng.integers(8))
        mask[top : top + 16, left : left + 20] = 1
        mask[top + 6 : top + 20, left + 12 : left + 26] = 2
        image //= np.array([8, 2, 1], np.uint8)[mask][..., None]
        pairs.append((image, mask))
    return pairs


def palette(mask: np.ndarray) -> bytes:
    image = Image.frombytes("P", mask.shape[::-1], mask.tobytes())
    image.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0])
    return png(image)


def folders(place: Path, pairs: Sequence[Pair]) -> str:
    for name in ("images/a", "masks/a"):
        (place / name).mkdir(parents=True)
    for number, (image, mask) in enumerate(pairs):
        (place / f"images/a/{number:03}.png").write_bytes(png(image))
        write = palette if number % 2 else png
        (place / f"masks/a/{number:03}.png").write_bytes(write(mask))
    return str(place)


def manifest(place: Path, pairs: Sequence[Pair]) -> str:
    folders(place, pairs)
    names = [f"{number:03}.png" for number in range(len(pairs))]
    rows = [f"images/a/{name},masks/a/{name}" for name in names]
    (place / "list.csv").write_text("image,mask\n" + "\n".join(rows))
    return str(place / "list.csv")


def json_lines(place: Path, pairs: Sequence[Pair]) -> str:
    folders(place, pairs)
    names = [f"{number:03}.png" for number in range(len(pairs))]
    rows = [{"path": f"images/a/{name}", "mask_path": f"masks/a/{name}"} for name in names]
    (place / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(place / "list.jsonl")


def run_lengths(inside: np.ndarray) -> list[int]:
    """COCO's counts of a mask, column by column, beginning outside."""
    flat = np.concatenate([[False], inside.T.flatten()])
    ends = np.flatnonzero(np.diff(np.concatenate([flat, [not flat[-1]]]).astype(int))) + 1
    return np.diff(np.concatenate([[1], ends])).tolist()


def packed(counts: Sequence[int]) -> str:
    """COCO's text of run lengths."""
    letters = []
    for place, count in enumerate(counts):
        value = count - counts[place - 2] if place > 2 else count
        while True:
            group, value = value & 31, value >> 5
            more = value != (-1 if group & 16 else 0)
            letters.append(chr(48 + group + 32 * more))
            if not more:
                break
    return "".join(letters)


def coco_json(place: Path, pairs: Sequence[Pair], **changes: Any) -> str:
    """Polygons, run lengths and their compressed text in turn; the front object comes last."""
    (place / "photos").mkdir()
    images, annotations = [], []
    for number, (image, mask) in enumerate(pairs):
        name = f"photos/{number}.png"
        (place / name).write_bytes(png(image))
        images.append({"id": number, "file_name": name, "height": HEIGHT, "width": WIDTH})
        rows, columns = np.nonzero(mask)
        (top, left) = (rows.min(), columns.min())
        whole = np.zeros_like(mask, bool)
        whole[top : top + 16, left : left + 20] = True  # also behind the other one
        x, y = float(left), float(top)
        corners = [x, y, x + 20, y, x + 20, y + 16, x, y + 16]
        front = run_lengths(mask == 2)
        size = [HEIGHT, WIDTH]
        forms: list[Any] = [{"counts": packed(front), "size": size}, {"counts": front}]
        back: list[Any] = [[corners], {"counts": packed(run_lengths(whole)), "size": size}]
        crowd = {"counts": run_lengths(~whole & (mask == 0)), "size": size}
        for form in (back[number % 2], forms[number % 2]):
            found = {"id": len(annotations), "image_id": number, "segmentation": form}
            annotations.append(found)
        annotations.append({"image_id": number, "segmentation": crowd, "iscrowd": 1})
    content = {"info": {}, "images": images, "annotations": annotations} | changes
    (place / "instances.json").write_text(json.dumps(content))
    return str(place / "instances.json")


def table_of(pairs: Sequence[Pair]) -> Any:
    """Bytes of images and masks; those of images as Hugging Face `datasets` stores them."""
    import pyarrow as pa

    images = [{"bytes": png(image), "path": None} for image, _ in pairs]
    masks = [(palette if number % 2 else png)(mask) for number, (_, mask) in enumerate(pairs)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.table({"image": pa.array(images, kind), "mask": masks})


def parquet_file(place: Path, pairs: Sequence[Pair]) -> str:
    return parquet_of(table_of(pairs), place / "mine.parquet")


def saved_folder(place: Path, pairs: Sequence[Pair]) -> str:
    save_table(place, table_of(pairs))
    return str(place)


def shards(place: Path, pairs: Sequence[Pair]) -> str:
    """Two WebDataset shards: `a.png` and `a.mask.png`."""
    for shard in range(2):
        with tarfile.open(place / f"{shard}.tar", "w") as tar:
            for number, (image, mask) in enumerate(pairs):
                if number * 2 // len(pairs) == shard:
                    add_member(tar, f"{number:03}.png", png(image))
                    add_member(tar, f"{number:03}.mask.png", png(mask))
    return str(place)


FORMATS: dict[str, Callable[[Path, Sequence[Pair]], str]] = {
    "folders": folders,
    "CSV": manifest,
    "JSON lines": json_lines,
    "COCO": coco_json,
    "Parquet": parquet_file,
    "Hugging Face": saved_folder,
    "shards": shards,
}


if __name__ == "__main__":
    write_all(FORMATS, Path(sys.argv[1]), scenes(60))
