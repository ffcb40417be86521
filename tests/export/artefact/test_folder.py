# SPDX-License-Identifier: Apache-2.0
"""An artefact folder is read and hashed once, and what changes under a command is noticed."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folder_walk import MOST, settled, walked
from tiny_artefacts import ENTRY, FULL, HALF, MODEL, artefacts

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact import folder as module
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME, FrontierEntry, entry_of, read_frontier
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return settled(artefacts(tmp_path / "folder", checkpoint=False))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed, in order."""
    names: list[str] = []

    def noted(path: Path) -> str:
        names.append(path.name)
        return original(path)

    original = module.sha256_of
    monkeypatch.setattr(module, "sha256_of", noted)
    return names


def measured(folder: ArtefactFolder, name: str, **changes: Any) -> FrontierEntry:
    variant = next(variant for variant in folder.variants if variant.name == name)
    entry = replace(entry_of(ENTRY), variant=name, sha256=variant.sha256)
    return replace(entry, budget=variant.main.variant.budget, **changes)


def test_a_file_is_hashed_once_whoever_asks(place: Path, hashed: list[str]) -> None:
    folder = ArtefactFolder(place)
    assert ArtefactFolder.open(folder) is folder
    assert hashed == []  # nothing is read before it is asked for
    for _ in range(3):
        folder.check_files()
    for manifest in folder.only(folder.variants[1:], []).manifests:
        assert folder.file(manifest) == place / manifest.file.name
    assert sorted(hashed) == [f"{HALF}.onnx", f"{FULL}.onnx"]


def in_place(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def renamed(path: Path, data: bytes) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(data)
    other.rename(path)


def with_its_old_time(path: Path, data: bytes) -> None:
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("write", [in_place, renamed, with_its_old_time])
def test_a_change_after_the_hash_is_noticed(
    place: Path, write: Callable[[Path, bytes], None]
) -> None:
    folder = ArtefactFolder(place)
    folder.check_files()
    path = place / f"{FULL}.onnx"
    write(path, path.read_bytes()[::-1])  # other bytes, as many
    with pytest.raises(SaccadeError, match="was changed after its export"):
        folder.file(folder.manifests[0])
    path.unlink()
    with pytest.raises(SaccadeError, match="missing, but its manifest exists"):
        folder.check_files()


def test_what_was_written_just_now_is_hashed_again(
    place: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a file system whose clock ticks once an hour: a change would leave the same times.
    monkeypatch.setattr(module, "_TICK_NS", 3600 * 10**9)
    (place / f"{FULL}.onnx").touch()
    folder = ArtefactFolder(place)
    for _ in range(2):
        folder.file(folder.manifests[0])
    assert hashed == [f"{FULL}.onnx"] * 2


def test_measurements_are_not_added_to_a_folder_that_changed(place: Path) -> None:
    folder = ArtefactFolder(place)
    entry = measured(folder, FULL)
    path = place / f"{HALF}.onnx"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(SaccadeError, match="was changed after its export"):
        folder.merge([entry])
    assert not (place / FILE_NAME).exists()


def test_measurements_that_another_command_added_meanwhile_stay(place: Path) -> None:
    folder = ArtefactFolder(place)
    assert folder.frontier is None
    ArtefactFolder(place).merge([measured(folder, HALF)])
    folder.merge([measured(folder, FULL)])
    assert folder.frontier == read_frontier(place / FILE_NAME)
    assert [entry.variant for entry in folder.frontier.entries] == [FULL, HALF]


def test_a_component_of_the_variants_has_a_component_of_the_measurements(place: Path) -> None:
    folder = ArtefactFolder(place)
    folder.merge([measured(folder, FULL), measured(folder, HALF)])
    full, half = folder.variants
    part = folder.only([half])
    assert (part.variants, part.manifests) == ((half,), (half.main,))
    assert part.frontier and [entry.variant for entry in part.frontier.entries] == [HALF]
    slower = measured(folder, FULL, device="elsewhere")
    other = folder.only([full], [slower])
    assert other.frontier and other.frontier.entries == (slower,)
    assert folder.frontier and len(folder.frontier.entries) == 2
    assert folder.only([full], []).frontier != folder.frontier
    with pytest.raises(TypeError, match="not into a view"):
        other.merge([slower])


def test_one_precision_of_a_folder_whose_others_were_measured(place: Path, tmp_path: Path) -> None:
    half = f"{MODEL}-b0500-fp16"
    for suffix in (".onnx", ".manifest.json"):
        shutil.copyfile(place / f"{HALF}{suffix}", place / f"{half}{suffix}")
    path = place / f"{half}.manifest.json"
    content = json.loads(path.read_text().replace(HALF, half))
    content["variant"]["precision"] = "fp16"
    path.write_text(json.dumps(content))
    folder = ArtefactFolder(place)
    folder.merge([measured(folder, FULL), measured(folder, half, precision="fp16")])
    options = RepositoryOptions(tmp_path / "out", precisions=("fp32",))
    assert deploy(folder, options).unmeasured == (HALF,)
    entries = read_frontier(tmp_path / "out" / FILE_NAME).entries
    assert [entry.variant for entry in entries] == [FULL]


def test_deploy_reads_the_folder_once(tmp_path: Path) -> None:
    folder = artefacts(tmp_path / "folder")
    seen = ArtefactFolder(folder)
    seen.merge([measured(seen, FULL), measured(seen, HALF)])
    with walked(folder) as walk:
        deploy(folder, RepositoryOptions(tmp_path / "out"))
    walk.check(*MOST["deploy"])
    assert walk.opened[FILE_NAME] == 1


def test_a_second_reader_is_noticed(place: Path) -> None:
    with walked(place) as walk:
        ArtefactFolder(place).check_files()
        ArtefactFolder(place).check_files()
    with pytest.raises(AssertionError, match=r"hashed .*2"):
        walk.check(*MOST["deploy"])
    places = len(walk.places)
    assert any(place.startswith("exporter/artefact/folder.py:") for place in walk.places)
    with walked(place) as walk:
        ArtefactFolder(place).check_files()
    walk.check(places, len(walk.files))
    with pytest.raises(AssertionError, match="places"):
        walk.check(places - 1, len(walk.files))
