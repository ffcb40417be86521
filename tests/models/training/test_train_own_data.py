# SPDX-License-Identifier: Apache-2.0
"""Training on one's own samples: from memory and from files alike, from every format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import labelled_sets
import pytest
from support.models.sizes import TINY

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import load
from saccade.models.data.samples import images as image_file
from saccade.models.data.samples.source import ClassFolders
from saccade.models.training.options import TrainOptions
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


@pytest.mark.parametrize("family", TINY)
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
