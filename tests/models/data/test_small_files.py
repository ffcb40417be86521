# SPDX-License-Identifier: Apache-2.0
"""Small files of data that ask for all memory."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from masked_sets import coco_json, scenes

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.models.data import segmented_images as coco
from saccade.models.data.samples import tables
from saccade.models.data.samples.source import RowUnreadable
from saccade.models.preprocessing import Preprocessing

FITTED = Preprocessing(12, 12, 3, (0.0,) * 3, (1.0,) * 3)


def test_a_polygon_with_too_many_edges_is_not_drawn() -> None:
    zigzag = np.array([(0.0, 0.0), (5.0, 5_000.0)] * 1_000)
    with pytest.raises(ValueError, match="cross 10,000,000 lines of pixels, expected at most 4"):
        coco.mask_of_polygon(zigzag, 5_000, 10)
    twice = np.array([(1.0, 1.0), (5.0, 1.0), (5.0, 5.0), (1.0, 5.0)] * 300)
    assert not coco.mask_of_polygon(twice, 6, 6).any()  # an even number of times


def test_run_lengths_whose_sum_starts_again_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 18446744073709551641, expected 25"):
        coco.mask_of_runs(np.array([2**62] * 4 + [25]), 5, 5)


def test_masks_of_many_objects_take_the_memory_of_one(tmp_path: Path) -> None:
    side, count = 600, 255
    runs = [{"counts": [i, side**2 - i - 9 * i, 9 * i], "size": [side] * 2} for i in range(count)]
    entries = [{"id": i, "image_id": 1, "segmentation": one} for i, one in enumerate(runs)]
    image = {"id": 1, "file_name": "0.png", "height": side, "width": side}
    data = coco_json(tmp_path, scenes(1), images=[image], annotations=entries)
    source = coco.CocoInstances(Path(data), coco.DataDescription(beside="mask"))
    tracemalloc.start()
    mask = source.read_mask(0, FITTED.wanted())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * side**2 and len(np.unique(mask)) > 50
    (tmp_path / "more").mkdir()
    more = coco_json(tmp_path / "more", scenes(1), images=[image], annotations=entries * 2)
    source = coco.CocoInstances(Path(more), coco.DataDescription(beside="mask"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coco, "_drawn", None)
        with pytest.raises(RowUnreadable, match="found 510 annotations, expected at most 255"):
            source.read_mask(0, FITTED.wanted())


def test_equal_values_that_are_stored_once_are_not_unpacked(tmp_path: Path, monkeypatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(limits, "ARCHIVE_FREE_BYTES", 2**20)
    for count, name in ((60, "few"), (6_000, "many")):
        table = pa.table({"image": [bytes(2**10)] * count, "label": ["a"] * count})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    few, many = (tables.ParquetTable(tmp_path / f"{name}.parquet") for name in ("few", "many"))
    assert len(few.read(59, "image", 10**6)) == 2**10
    with pytest.raises(SaccadeError, match=r"unpacks to more than [4-5],\d+,\d+ bytes, the most"):
        many.read(0, "image", 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetFile, "iter_batches", None)  # it is not tried again for each row
        with pytest.raises(SaccadeError, match="unpacks to more than"):
            many.read(1, "image", 10**6)
    assert len(many.column("label")) == 6_000
