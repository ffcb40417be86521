# SPDX-License-Identifier: Apache-2.0
"""Training on one's own samples: from memory and from files alike, from every format."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import labelled_sets
import language_sets
import numpy as np
import pytest
from support.models.sizes import TINY

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import load
from saccade.models.data.samples import images as image_file
from saccade.models.data.samples.source import ClassFolders
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import Task, share_of, with_pixels
from saccade.models.training.train import train

WORKERS = {"nac": (3,), "sot": (1, 3), "sparo": (2,)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = labelled_sets.digits(10)
    return labelled_sets.class_folders(tmp_path_factory.mktemp("digits"), samples)


def trained(family: str, data: str, out: Path, **others: Any) -> bytes:
    options = TrainOptions(out, data=data, set=TINY[family], steps=4, batch=8, side_px=8)
    train(family, replace(options, **others))
    return out.read_bytes()


@pytest.mark.parametrize("family", WORKERS)
def test_images_in_files_train_the_same_model(
    family: str, tmp_path: Path, folders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = trained(family, folders, tmp_path / "model.safetensors")
    monkeypatch.setattr(image_file, "KEPT_BYTES", 0)
    most = 0

    def counted(images: image_file.Images, places: Any) -> Any:
        nonlocal most
        most = max(most, len(places))
        return whole(images, places)

    whole = image_file.Images._decoded
    monkeypatch.setattr(image_file.Images, "_decoded", counted)
    for workers in WORKERS[family]:
        with image_file.ThreadPoolExecutor(workers) as pool:
            monkeypatch.setattr(image_file, "_pool", lambda pool=pool: pool)
            again = trained(family, folders, tmp_path / "model.safetensors", force=True)
        assert again == in_memory
    assert 0 < most <= 256, "never more than the samples for calibration at a time"


def test_unreadable_rows_are_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = labelled_sets.csv_file(tmp_path, labelled_sets.digits(10))
    (tmp_path / "images/1/003.png").write_bytes(b"GIF89a")
    out = tmp_path / "model.safetensors"
    with pytest.raises(SaccadeError, match=r"row 12: images/1/003.png: not a JPEG"):
        trained("nac", data, out)
    trained("nac", data, out, skip_bad=1)
    assert " --skip-bad 1 " in load(out).card["command"]


def test_files_are_not_opened_to_list_them(folders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.models.data.samples.formats import open_source
    from saccade.models.data.samples.source import DataDescription

    monkeypatch.setattr(ClassFolders, "read", lambda *_: pytest.fail("a file was read"))
    assert len(open_source(folders, DataDescription())) == 30


# Each process decodes and changes its own rows of a batch, which are those of the whole batch.


BATCH, STEPS, SIDE_PX = 5, 2, 12  # parts of 2 and 3 samples
MIXED = {"mixup": 0.8, "cutmix": 1.0}
# Family and options; the last is the number of rows that a process decodes for others.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "sot": ("sot", {}, 0),
    "sot, crops, mixed": ("sot", {"augment": ("crop", "jitter"), **MIXED}, 1),
    "sot, erased, mixed": ("sot", {"augment": ("erasing=1",), "mixup": 0.8}, 1),
    "nac": ("nac", {}, 0),
    "nac, mixed": ("nac", {"cutmix": 1.0}, 1),
    "sparo": ("sparo", {"augment": ("crop",)}, 0),
    "slot-attention": ("slot-attention", {"augment": ("flip",)}, 0),
    "vqa": ("vqa", {}, 0),
    "captioner": ("captioner", {}, 0),
}


class AtOnce:
    """In place of the threads that decode: everything is done when it is asked for."""

    map = staticmethod(map)

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given))
        return done


@pytest.fixture(scope="module")
def own_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("own")
    folder = labelled_sets.class_folders(place / "noise", labelled_sets.noise(14))
    own = {name: str(getattr(language_sets, kind)(place / kind)) for name, kind in
           (("vqa", "vqa"), ("captioner", "coco"))}  # fmt: skip
    return dict.fromkeys(TINY, folder) | own


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows whose images were decoded; none of them stays in memory."""
    rows: list[int] = []
    whole = image_file.Images.opened

    def counted(images: image_file.Images, row: int, use: Any) -> Any:
        rows.append(row)
        return whole(images, row, use)

    monkeypatch.setattr(image_file, "KEPT_BYTES", 0)
    monkeypatch.setattr(image_file, "_pool", AtOnce)
    monkeypatch.setattr(image_file.Images, "opened", counted)
    return rows


def batches(task: Task, share: tuple[int, int]) -> list[dict[str, np.ndarray]]:
    """The images of a process's part of the first batches."""
    rng, found = np.random.default_rng(3), []
    for step in range(STEPS):
        part = with_pixels(task.part(task.batch(step, rng), *share))
        found.append({name: value.numpy() for name, value in part.items() if value.ndim == 4})
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_process_decodes_its_own_rows(
    name: str, own_sets: dict[str, str], decoded: list[int], tmp_path: Path
) -> None:
    family, options, others = CASES[name]
    made = TrainOptions(
        tmp_path / "unused.safetensors", data=own_sets[family], set=TINY[family], side_px=SIDE_PX
    )
    made = TrainOptions(**vars(made) | {"batch": BATCH, "steps": 8} | options)
    task: Task = imported(entry_of(family).training)(made)
    decoded.clear()
    whole, seen = batches(task, (0, 1)), {*decoded}
    counts, rows = [], set()
    for rank in range(2):
        decoded.clear()
        for one, own in zip(whole, batches(task, (rank, 2)), strict=True):
            (image,) = one
            assert own[image].any()
            np.testing.assert_array_equal(own[image], one[image][share_of(BATCH, rank, 2)])
        counts.append(len(decoded))
        rows |= {*decoded}
    # One batch is decoded ahead; a row that a batch has twice may be decoded once.
    most = [(STEPS + 1) * (len(range(BATCH)[share_of(BATCH, rank, 2)]) + others) for rank in (0, 1)]
    assert all(count <= limit for count, limit in zip(counts, most, strict=True)), (counts, most)
    assert rows == seen
