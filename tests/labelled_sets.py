# SPDX-License-Identifier: Apache-2.0
"""One small labelled set in every format that --data takes: `python tests/labelled_sets.py FOLDER`.

Digits of scikit-learn, or pieces of its two photographs, which are not square.
"""

import csv
import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from picture_files import png
from PIL import Image

SPLITS = ("train", "validation", "test")


class Sample(NamedTuple):
    """An image as a PNG, its class, and its split."""

    name: str
    data: bytes
    label: str
    split: str


def digits(per_class: int = 6, classes: int = 3, held_out: int = 1) -> list[Sample]:
    """Digits of 8 x 8 px: of each class `held_out` for validation, as many for the test."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    pixels = np.rint(loaded.images * 255 / 16).astype(np.uint8)
    return _split(
        [
            [png(image) for image in pixels[loaded.target == label][:per_class]]
            for label in range(classes)
        ],
        [str(label) for label in range(classes)],
        held_out,
    )


def noise(per_class: int = 5, classes: int = 2) -> list[Sample]:
    """Gray noise of 8 x 8 px, which needs no package."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (classes, per_class, 8, 8), dtype=np.uint8)
    return _split([[png(image) for image in own] for own in pixels], ["a", "b", "c"][:classes])


def photographs(per_class: int = 6, held_out: int = 1) -> list[Sample]:
    """Pieces of the photographs that scikit-learn ships, of many sizes."""
    from sklearn.datasets import load_sample_images

    loaded = load_sample_images()
    rng = np.random.default_rng(0)
    pieces = []
    for photograph in loaded.images:
        own = []
        for _ in range(per_class):
            height, width = (int(side) for side in rng.integers(24, 64, 2))
            top, left = (int(rng.integers(most)) for most in (300, 500))
            own.append(png(photograph[top : top + height, left : left + width]))
        pieces.append(own)
    return _split(pieces, [Path(name).stem for name in loaded.filenames], held_out)


def _split(
    images: Sequence[Sequence[bytes]], names: Sequence[str], held_out: int = 1
) -> list[Sample]:
    """The samples by split and then by class, as they lie in class folders."""
    samples = [
        Sample(f"{number:03}", data, name, SPLITS[max(0, 2 - (len(own) - 1 - number) // held_out)])
        for name, own in zip(names, images, strict=True)
        for number, data in enumerate(own)
    ]
    return sorted(samples, key=lambda sample: (SPLITS.index(sample.split), sample.label))


def class_folders(folder: Path, samples: Sequence[Sample]) -> str:
    names = {"validation": "val"}
    for sample in samples:
        place = folder / names.get(sample.split, sample.split) / sample.label
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{sample.name}.png").write_bytes(sample.data)
    return str(folder)


def _files(folder: Path, samples: Sequence[Sample]) -> Iterator[tuple[str, Sample]]:
    for sample in samples:
        path = folder / "images" / sample.label / f"{sample.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.data)
        yield str(path.relative_to(folder)), sample


def csv_file(folder: Path, samples: Sequence[Sample]) -> str:
    with (folder / "mine.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "split"])
        table.writerows([path, one.label, one.split] for path, one in _files(folder, samples))
    return str(folder / "mine.csv")


def jsonl_file(folder: Path, samples: Sequence[Sample]) -> str:
    lines = [
        json.dumps({"file_name": path, "label": one.label, "split": one.split})
        for path, one in _files(folder, samples)
    ]
    (folder / "mine.jsonl").write_text("\n".join(lines))
    return str(folder / "mine.jsonl")


def shards(folder: Path, samples: Sequence[Sample], per_shard: int = 5) -> str:
    """WebDataset: the label is the text of the `.cls` member."""
    for split in SPLITS:
        own = [sample for sample in samples if sample.split == split]
        for start in range(0, len(own), per_shard):
            with tarfile.open(folder / f"{split}-{start // per_shard:03}.tar", "w") as tar:
                for place, sample in enumerate(own[start : start + per_shard], start):
                    for suffix, data in (("png", sample.data), ("cls", sample.label.encode())):
                        add_member(tar, f"{place:05}.{suffix}", data)
    return str(folder)


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def hugging_face_table(samples: Sequence[Sample], *, split: bool = False):
    """Columns and schema as Hugging Face `datasets` writes them for Image and ClassLabel."""
    import pyarrow as pa

    names = sorted({sample.label for sample in samples})
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        "image": pa.array(
            [{"bytes": one.data, "path": f"{one.name}.png"} for one in samples], image
        ),
        "label": pa.array([names.index(one.label) for one in samples], pa.int64()),
    }
    if split:
        columns["split"] = pa.array([one.split for one in samples])
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table(columns)
    return table.replace_schema_metadata(metadata)


def parquet_file(folder: Path, samples: Sequence[Sample]) -> str:
    return parquet_of(hugging_face_table(samples, split=True), folder / "mine.parquet")


def parquet_of(table: Any, path: Path) -> str:
    import pyarrow.parquet as pq

    pq.write_table(table, path, row_group_size=4)
    return str(path)


def parquet(**columns: list[object]) -> Callable[[Path], str]:
    """Return a function that writes these columns into a folder."""

    def make(folder: Path) -> str:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns), folder / "x.parquet")
        return str(folder / "x.parquet")

    return make


def parquet_folder(folder: Path, samples: Sequence[Sample]) -> str:
    """As on the Hugging Face hub: `data/train-00000-of-00001.parquet`."""
    (folder / "data").mkdir()
    whole = hugging_face_table(samples)
    for split in SPLITS:
        rows = [place for place, one in enumerate(samples) if one.split == split]
        parquet_of(whole.take(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return str(folder)


def saved_folder(folder: Path, samples: Sequence[Sample]) -> str:
    """As `DatasetDict.save_to_disk` writes it."""
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
    whole = hugging_face_table(samples)
    for split in SPLITS:
        rows = [place for place, one in enumerate(samples) if one.split == split]
        save_table(folder / split, whole.take(rows), _split=split)
    return str(folder)


def save_table(folder: Path, table: Any, **state: Any) -> None:
    """As `Dataset.save_to_disk` writes it."""
    import pyarrow as pa

    folder.mkdir(exist_ok=True)
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / name), "wb") as file:
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
    files = {"_data_files": [{"filename": name}]}
    (folder / "state.json").write_text(json.dumps(state | files))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": ""}))


FORMATS: dict[str, Callable[[Path, Sequence[Sample]], str]] = {
    "class folders": class_folders,
    "CSV": csv_file,
    "JSON lines": jsonl_file,
    "shards": shards,
    "Parquet": parquet_file,
    "Parquet of the hub": parquet_folder,
    "Hugging Face": saved_folder,
}


def medmnist(folder: Path, samples: Sequence[Sample]) -> str:
    """An .npz as MedMNIST's, whose images have one size."""
    names = sorted({sample.label for sample in samples})
    arrays = {}
    for split in SPLITS:
        own = [sample for sample in samples if sample.split == split]
        key = {"validation": "val"}.get(split, split)
        arrays[f"{key}_images"] = np.stack([pixels(sample) for sample in own])
        arrays[f"{key}_labels"] = np.array([[names.index(one.label)] for one in own], np.uint8)
    np.savez(folder / "mine.npz", **arrays)
    return str(folder / "mine.npz")


def pixels(sample: Sample) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(sample.data)))


def write_all(formats: Mapping[str, Callable[[Path, Any], str]], folder: Path, own: Any) -> None:
    """Write a set in every format, each in its own folder."""
    for name, write in formats.items():
        place = folder / name.lower().replace(" ", "-")
        place.mkdir(parents=True)
        print(write(place, own))


if __name__ == "__main__":
    for kind, samples in (("digits", digits(100, 10, 15)), ("photographs", photographs(100, 15))):
        write_all(FORMATS, Path(sys.argv[1]) / kind, samples)
