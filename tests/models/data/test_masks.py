# SPDX-License-Identifier: Apache-2.0
"""The user's images with instance masks: equal from every format, resized alike, refused by row."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from labelled_sets import add_member
from masked_sets import (
    FORMATS,
    HEIGHT,
    WIDTH,
    coco_json,
    folders,
    packed,
    parquet_file,
    png,
    scenes,
    table_of,
)
from PIL import Image

from saccade.core import verbosity
from saccade.core.errors import SaccadeError
from saccade.models.data import segmented_images as coco
from saccade.models.data.options import DataOptions
from saccade.models.data.samples import images as image_file
from saccade.models.data.samples import tables
from saccade.models.data.samples.masks import Masks
from saccade.models.data.segmented_images import SegmentedImages, segmented_images
from saccade.models.preprocessing import Preprocessing

FITTED = Preprocessing(12, 12, 3, (0.0,) * 3, (1.0,) * 3)


def own(data: str, split: str = "all", **asked: Any) -> SegmentedImages:
    return segmented_images(data, split, preprocessing=FITTED, asked=DataOptions(**asked))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_masks(form: str, tmp_path: Path) -> None:
    pairs = scenes()
    data = FORMATS[form](tmp_path, pairs)
    every = own(data)
    order = np.concatenate([own(data, split).masks for split in ("train", "validation", "test")])
    assert every.masks is not None and np.array_equal(every.masks, order)
    assert [len(own(data, split).images) for split in ("train", "val", "test")] == [7, 1, 2]
    # Half of a side, from the middle columns: each pixel is the one below and right of a center.
    expected = np.stack([mask[1::2, 9:-8:2] for _, mask in pairs])
    rows = Masks(image_file.Images(every.masks.source, np.arange(10), FITTED.wanted()),
                 np.arange(10), (0,))  # fmt: skip
    assert rows.shape == (10, 12, 12) and np.asarray(rows).dtype == np.uint8
    assert np.array_equal(np.asarray(rows), expected)
    assert np.array_equal(rows[np.array([3, 1])], expected[[3, 1]])
    assert np.array_equal(rows[2:4][np.array([1])], expected[[3]])
    assert every.sha256 != every.images_sha256 == own(data).images_sha256


def test_polygons_are_the_pixels_whose_centers_are_inside() -> None:
    star = np.array([(20.2, 1.3), (33.7, 22.9), (2.1, 8.8), (38.5, 9.4), (6.6, 23.1)])
    drawn = coco.mask_of_polygon(star, HEIGHT, WIDTH)
    x, y = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
    inside = np.zeros((HEIGHT, WIDTH), bool)
    for (x0, y0), (x1, y1) in zip(star, np.roll(star, -1, 0), strict=True):
        inside ^= ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
    assert np.array_equal(drawn, inside) and 100 < drawn.sum() < 400
    beyond = np.array([(-9.0, -9.0), (60.0, -9.0), (60.0, 60.0), (-9.0, 60.0)])
    assert coco.mask_of_polygon(beyond, HEIGHT, WIDTH).all()


def test_run_lengths_are_those_of_pycocotools() -> None:
    # What its `encode` returns for a 5 x 5 image, in which the middle 3 x 3 pixels are inside.
    counts = [6, 3, 2, 3, 2, 3, 6]
    assert coco.run_lengths("6320004").tolist() == counts
    inside = coco.mask_of_runs(np.array(counts), 5, 5)
    assert inside.sum() == 9 and inside[1:4, 1:4].all()
    long = [0, 5_000_000, 3, 40, 100_000, 7]
    assert coco.run_lengths(packed(long)).tolist() == long


def test_a_mask_turns_with_its_image(tmp_path: Path) -> None:
    """Masks drawn on the image as stored or as shown are one mask."""
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    (_, mask) = scenes(1)[0]
    fit = Preprocessing(WIDTH, HEIGHT, 3, (0.0,) * 3, (1.0,) * 3)
    for place, orientation in enumerate((5, 6, 7, 8)):
        image = Image.fromarray((mask * 100)[..., None].repeat(3, 2))
        exif = image.getexif()
        exif[0x0112] = orientation
        for number, shown in enumerate((False, True)):
            name = f"{2 * place + number}"
            image.save(tmp_path / "images" / f"{name}.png", exif=exif)
            upright = np.asarray(Image.fromarray(mask).transpose(image_turn(orientation)))
            drawn = upright if shown else mask
            (tmp_path / "masks" / f"{name}.png").write_bytes(png(drawn))
    data = segmented_images(str(tmp_path), "all", preprocessing=fit)
    assert np.array_equal(np.asarray(data.masks), np.asarray(data.images)[..., 0] // 100)


def image_turn(orientation: int) -> Image.Transpose:
    turns = Image.Transpose
    return {5: turns.TRANSPOSE, 6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90}[
        orientation
    ]


def test_objects_are_numbered_and_backgrounds_chosen(tmp_path: Path) -> None:
    pairs = scenes(3)
    wide = [np.array([0, 300, 70_000], np.int32)[mask] for _, mask in pairs]
    names = [f"{number:03}.png" for number in range(3)]
    folders(tmp_path, pairs)
    (tmp_path / "masks/a" / names[0]).write_bytes(png(wide[0].clip(max=60_000).astype(np.uint16)))
    void = np.where(pairs[1][1] == 2, 255, pairs[1][1])
    (tmp_path / "masks/a" / names[1]).write_bytes(png(void.astype(np.uint8)))
    plain, without = (np.asarray(own(str(tmp_path), background=b).masks) for b in ((0,), (0, 255)))
    assert [sorted(np.unique(mask)) for mask in plain] == [[0, 1, 2]] * 3
    values = sorted(tuple(np.unique(mask)) for mask in without)
    assert values == [(0, 1), (0, 1, 2), (0, 1, 2)]
    np.savez(tmp_path / "a.npz", images=np.stack([i for i, _ in pairs]), masks=np.stack(wide))
    fit = Preprocessing(HEIGHT, WIDTH, 3, (0.0,) * 3, (1.0,) * 3)
    arrays = segmented_images(str(tmp_path / "a.npz"), "all", preprocessing=fit)
    assert sorted(m.tobytes() for m in arrays.masks) == sorted(m.tobytes() for _, m in pairs)


def test_splits_are_those_of_folders_and_names(tmp_path: Path) -> None:
    pairs = scenes(4)
    for split, part in (("train", pairs[:3]), ("val", pairs[3:])):
        (tmp_path / split).mkdir()
        folders(tmp_path / split, part)
    (tmp_path / "other").mkdir()
    inside = [tmp_path / name for name in ("other/images", "other/masks")]
    for folder in inside:
        for split in ("train", "test"):
            (folder / split).mkdir(parents=True)
            (folder / split / "a.png").write_bytes(png(pairs[0][0 if folder == inside[0] else 1]))
    (tmp_path / "coco").mkdir()
    written = Path(coco_json(tmp_path / "coco", pairs))
    json_path = written.rename(written.with_name("instances_val2017.json"))
    arrays = {"train_images": np.zeros((3, 12, 12, 3), np.uint8)}
    arrays |= {"train_masks": np.ones((3, 12, 12, 1), np.int64)}
    arrays |= {"test_images": np.zeros((2, 12, 12, 3), np.uint8)}
    arrays |= {"test_masks": np.ones((2, 12, 12), bool)}
    np.savez(tmp_path / "a.npz", **arrays)
    for data, sizes in (
        (tmp_path, {"train": 3, "validation": 1, "held-out": 1}),
        (tmp_path / "other", {"train": 1, "held-out": 1, "test": 1}),
        (json_path, {"validation": 4, "held-out": 4, "all": 4}),
        (tmp_path / "a.npz", {"train": 2, "validation": 1, "test": 2}),
    ):
        for split, count in sizes.items():
            found = own(str(data), split)
            assert len(found.images) == len(found.masks) == count, (data, split)


def test_images_without_masks_are_taken(tmp_path: Path) -> None:
    pairs = scenes(6)
    folders(tmp_path, pairs)
    (tmp_path / "list.jsonl").write_text('{"path": "images/a/000.png"}\n' * 5)
    np.savez(tmp_path / "a.npz", images=np.zeros((5, 12, 12, 3), np.uint8))
    np.savez(tmp_path / "b.npz", images=np.zeros((5, 12, 12, 3), np.uint8), labels=np.arange(5) % 2)
    import pyarrow.parquet as pq

    pq.write_table(table_of(pairs).select(["image"]), tmp_path / "a.parquet")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, (image, _) in enumerate(pairs):
            add_member(tar, f"{number}.png", png(image))
            add_member(tar, f"{number}.cls", b"cat")
    packed_data = ("a.parquet", "a.tar")
    for data in ("images", "images/a", "list.jsonl", "a.npz", "b.npz", *packed_data):
        found = own(str(tmp_path / data))
        assert found.masks is None and len(found.images) in (5, 6), data
        assert found.sha256 == found.images_sha256


def test_masks_are_read_when_they_are_used(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(image_file, "KEPT_BYTES", 0)
    data = own(folders(tmp_path, scenes()))
    for file in (tmp_path / "masks/a").iterdir():
        file.write_bytes(b"")
    assert isinstance(data.images, image_file.Images) and data.images[np.arange(3)].any()
    assert data.images_sha256
    with pytest.raises(SaccadeError, match="cannot be read as a PNG"):
        assert data.sha256


def jpeg(mask: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(mask).save(file, "JPEG")
    return file.getvalue()


NOISE = np.random.default_rng(0).permutation(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
WRONG: dict[str, tuple[Callable[[np.ndarray], bytes | None], str]] = {
    "missing": (lambda mask: None, r"found no mask masks/a/004.png. Add it, or remove it"),
    "other size": (
        lambda mask: png(mask[:, 1:]),
        "its mask has 39 x 24 pixels, but the image 40 x 24. Save both in one size",
    ),
    "turned": (lambda mask: png(np.ascontiguousarray(mask.T)), "has 24 x 40 pixels, but the image"),
    "colors": (
        lambda mask: png(np.stack([mask] * 3, -1)),
        r"mask masks/a/004.png has colors \(RGB\), expected the index of an object per pixel",
    ),
    "shades": (
        lambda mask: png(NOISE.astype(np.uint16)),
        "its mask has 959 different values, expected at most 255 objects",
    ),
    "JPEG": (jpeg, "cannot be read as a PNG file. JPEG changes indices: save it as PNG"),
    "cut off": (lambda mask: png(mask)[:60], "cannot be read as a PNG file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_masks_are_refused_by_row_or_left_out(case: str, tmp_path: Path, capsys) -> None:
    data = folders(tmp_path, scenes())
    make, words = WRONG[case]
    written = make(scenes()[4][1])
    path = tmp_path / "masks/a/004.png"
    path.unlink() if written is None else path.write_bytes(written)
    with pytest.raises(SaccadeError, match=f"{tmp_path}: images/a/004.png: .*{words}"):
        np.asarray(own(data).masks)
    (tmp_path / "images/a/007.png").write_bytes(b"GIF89a")
    with verbosity.verbosity():
        kept = own(data, skip_bad=2)
    assert kept.skipped == 2 and len(np.asarray(kept.masks)) == len(kept.images) == 8
    said = capsys.readouterr().err
    assert "left out 2 of 10 rows" in said and "images/a/007.png: not a JPEG" in said
    with pytest.raises(SaccadeError, match="--skip-bad 1 leaves out at most 1"):
        own(data, skip_bad=1)


def _table(change: Callable[[list[Any]], None]) -> Callable[[Path], str]:
    def make(place: Path) -> str:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = table_of(scenes())
        masks = table["mask"].to_pylist()
        change(masks)
        pq.write_table(table.set_column(1, "mask", pa.array(masks)), place / "mine.parquet")
        return str(place / "mine.parquet")

    return make


def _shard(change: Callable[[dict[str, bytes]], Any]) -> Callable[[Path], str]:
    def make(place: Path) -> str:
        members = {}
        for number, (image, mask) in enumerate(scenes()):
            members |= {f"{number}.png": png(image), f"{number}.mask.png": png(mask)}
        change(members)
        with tarfile.open(place / "mine.tar", "w") as tar:
            for name in sorted(members, key=lambda name: name.partition(".")[0]):
                add_member(tar, name, members[name])
        return str(place / "mine.tar")

    return make


def _later_masks(place: Path) -> str:
    for name, (image, mask) in zip("ab", scenes(), strict=False):
        with tarfile.open(place / f"{name}.tar", "w") as tar:
            add_member(tar, f"{name}.png", png(image))
            if name == "b":
                add_member(tar, f"{name}.mask.png", png(mask))
    return str(place)


# What is wrong, the message, and whether --skip-bad leaves it out.
PACKED: dict[str, tuple[Callable[[Path], str], str, bool]] = {
    "a null": (
        _table(lambda masks: masks.__setitem__(4, None)),
        "mine.parquet: row 5: its mask in column 'mask': found NoneType in column 'mask', exp",
        True,
    ),
    "text": (
        _table(lambda masks: masks.__setitem__(4, b"text")),
        "mine.parquet: row 5: its mask in column 'mask' cannot be read as a PNG file",
        True,
    ),
    "colors": (
        _shard(lambda members: members.__setitem__("4.mask.png", members["4.png"])),
        r"mine.tar: sample '4': its mask 4.mask.png has colors \(RGB\), expected the index of",
        True,
    ),
    "a mask is missing": (
        _shard(lambda members: members.pop("4.mask.png")),
        "mine.tar: sample '4' has .png, but the samples before have .mask.png image",
        False,
    ),
    "two masks": (
        _shard(lambda members: members.__setitem__("0.seg.png", b"")),
        r"sample '0' has .mask.png .png .seg.png, expected one image .* at most one mask \(.mask",
        False,
    ),
    "a mask called as an image": (
        _shard(lambda members: members.__setitem__("0.jpg", members["0.png"])),
        r"sample '0' has .jpg .mask.png .png, expected one image",
        False,
    ),
    "masks in a later shard": (
        _later_masks,
        r"b.tar: has a column of masks \(.mask.png\), but a.tar has none. Use files with equal",
        False,
    ),
    "no image": (
        _shard(lambda members: members.pop("0.png")),
        r"sample '0' has .mask.png, expected one image",
        False,
    ),
}


@pytest.mark.parametrize("case", PACKED)
def test_wrong_masks_in_tables_and_shards_are_refused_by_row(case: str, tmp_path: Path) -> None:
    make, words, skipped = PACKED[case]
    data = make(tmp_path)
    with pytest.raises(SaccadeError, match=words):
        np.asarray(own(data).masks)
    if skipped:
        kept = own(data, skip_bad=1)
        assert kept.skipped == 1 and len(np.asarray(kept.masks)) == len(kept.images) == 9
    else:
        with pytest.raises(SaccadeError, match=words):
            own(data, skip_bad=10)


def test_a_group_of_rows_is_read_once_for_images_and_masks(tmp_path: Path, monkeypatch) -> None:
    import pyarrow.parquet as pq

    read: list[Any] = []
    one = pq.ParquetFile.iter_batches

    def counted(file: Any, step: int, row_groups: Any, columns: Any) -> Any:
        read.append((*row_groups, *columns))
        return one(file, step, row_groups, columns)

    data = own(parquet_file(tmp_path, scenes()))
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    for row in (0, 1, 4, 5, 2, 6):
        data.masks.source.read(row, 10**6)
        data.masks.source.read_mask(row, FITTED.wanted())
    assert len(read) == len(set(read)) <= 4


def test_two_groups_of_rows_stay_in_memory(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"image": ["a", "b", "c"]}), tmp_path / "x.parquet", row_group_size=1)
    file, read = pq.ParquetFile(tmp_path / "x.parquet"), []
    groups = tables.RowGroups(file, 1000)

    def counted(step: int, row_groups: list[int], columns: Any) -> Any:
        read.extend(row_groups)
        return file.iter_batches(step, row_groups, columns)

    fields = {"metadata": file.metadata, "schema_arrow": file.schema_arrow}
    groups = tables.RowGroups(SimpleNamespace(**fields, iter_batches=counted), 1000)
    for column in ("image", None):
        read.clear()
        assert [groups.row(row, column)["image"] for row in (0, 1, 0, 2, 0, 1)] == [*"abacab"]
        assert read == [0, 1, 2, 1]


def test_a_file_that_declares_other_rows_than_it_has_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    import pyarrow as pa

    group = SimpleNamespace(num_rows=5, num_columns=0)
    metadata = SimpleNamespace(num_row_groups=1, row_group=lambda _: group)
    there = pa.table({"mask": [b"x"] * 4})
    read = SimpleNamespace(
        metadata=metadata,
        schema_arrow=there.schema,
        iter_batches=lambda *_, **__: there.to_batches(),
    )
    rows = tables.RowGroups(read, 1000)
    assert len(rows) == 5 and rows.row(3) == {"mask": b"x"}
    with pytest.raises(OSError, match="found 4 rows in group 0, expected more"):
        rows.row(4)
    data = parquet_file(tmp_path, scenes(4))
    with monkeypatch.context() as patch:
        patch.setattr(tables.RowGroups, "__len__", lambda _: 10**15)
        with pytest.raises(SaccadeError, match=r"read as Parquet.*found 1,000,000.* rows in"):
            own(data)
    monkeypatch.setattr(tables.RowGroups, "__len__", lambda _: 1000)
    with pytest.raises(OSError, match="found 4 values in column 'mask', expected 1000"):
        tables.ParquetTable(Path(data)).column("mask")


TRIANGLE = {"id": 5, "image_id": 1, "segmentation": [[0, 0, 9, 0, 0, 9]]}
BAD_JSON: dict[str, tuple[dict[str, Any], str]] = {
    "no images": ({"images": []}, "found no images, expected COCO's JSON of instances"),
    "captions": (
        {"annotations": [{"id": 3, "image_id": 1, "caption": "a dog"}]},
        "annotation 3: found the fields caption, id, image_id, expected image_id and segmentation",
    ),
    "foreign image": (
        {"annotations": [TRIANGLE | {"image_id": 99}]},
        "annotation 5: its image 99 is not in the list of images",
    ),
    "two points": (
        {"annotations": [TRIANGLE | {"segmentation": [[0, 0, 9, 0]]}]},
        "annotation 5: found .*0, 9, 0.* as segmentation, expected polygons of at least 3 points",
    ),
    "polygons without end": (
        {"annotations": [TRIANGLE | {"segmentation": [[0, 0, 9, 0, 0, 9]] * 1001}]},
        "up to 1,000",
    ),
    "words": ({"annotations": [TRIANGLE | {"segmentation": [["a"] * 6]}]}, "expected polygons"),
    "empty": ({"annotations": [TRIANGLE | {"segmentation": []}]}, "expected polygons"),
    "short runs": (
        {"annotations": [TRIANGLE | {"segmentation": {"counts": [3, 4]}}]},
        "1.png: annotation 5: its run lengths add up to 7, expected 960, the pixels of",
    ),
    "odd text": (
        {"annotations": [TRIANGLE | {"segmentation": {"counts": "\u00e9"}}]},
        "annotation 5: its counts are not run lengths",
    ),
    "half a number": (
        {"annotations": [TRIANGLE | {"segmentation": {"counts": "1o"}}]},
        "its counts end inside a number",
    ),
    "no size": ({"images": [{"id": 1, "file_name": "a.png"}]}, "image 1: .*, expected id, file_n"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_wrong_coco_is_refused_by_annotation(case: str, tmp_path: Path) -> None:
    changes, words = BAD_JSON[case]
    data = coco_json(tmp_path, scenes(3), **changes)
    with pytest.raises(SaccadeError, match=words):
        np.asarray(own(data).masks)


def test_other_wrong_data_is_refused(tmp_path: Path) -> None:
    folders(tmp_path, scenes(2))
    (tmp_path / "a.json").write_text("[1, 2")
    (tmp_path / "a.csv").write_text("picture,mask\na.png,b.png\n")
    (tmp_path / "b.csv").write_text("image,mask\nimages/a/000.png,../x.png\n" * 1)
    (tmp_path / "c.csv").write_text("image,mask\nimages/a/000.png,\n")
    (tmp_path / "empty/images").mkdir(parents=True)
    (tmp_path / "empty/masks").mkdir()
    images = np.zeros((4, 12, 12, 3), np.uint8)
    np.savez(tmp_path / "one-hot.npz", images=images, masks=np.zeros((4, 2, 12, 12), np.uint8))
    np.savez(
        tmp_path / "half.npz", train_images=images, train_masks=images[..., 0], val_images=images
    )
    np.savez(tmp_path / "big.npz", images=np.zeros((4, 9, 12, 3), np.uint8))
    for name, words in {
        "a.json": "cannot be read as COCO's JSON of instances",
        "a.csv": "found the columns 'picture', 'mask', expected one of images",
        "b.csv": r"row 1: images/a/000.png: its mask ../x.png: leads out of",
        "c.csv": "row 1: images/a/000.png: found '' in column 'mask', expected a path",
        "empty": "found no images in images, expected PNG",
        "one-hot.npz": r"found uint8 \(4, 2, 12, 12\) as masks, expected .*take masks.argmax\(1\)",
        "half.npz": "val_images has no masks, but others have. Add val_masks",
        "big.npz": r"images are \(9, 12, 3\) \(height, width, channels\), the model expects",
        "*.npz": "found .npz files, expected a folder .* Name one of them",
        "missing": "found neither a name nor a path.*images/ and masks/",
    }.items():
        with pytest.raises(SaccadeError, match=words):
            np.asarray(own(str(tmp_path / name), skip_bad=0).masks)
