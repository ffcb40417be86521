# SPDX-License-Identifier: Apache-2.0
"""Hostile folders: links, sizes and names that a manifest denies, and wrong files beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.json_files import put
from tiny_artefacts import ENTRY, FIGURES, FULL, HALF, artefacts

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME, read_frontier
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import DESCRIPTION, read_repository
from saccade.serving.repository.options import RepositoryOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artefact folder without its checkpoint."""
    return artefacts(tmp_path / "folder", checkpoint=False)


def test_a_file_of_another_size_than_its_manifest_says(folder: Path) -> None:
    put(folder / f"{FULL}.manifest.json", ("file", "bytes"), 7)
    with pytest.raises(SaccadeError, match="bytes, expected 7 as in its manifest"):
        ArtefactFolder(folder).check_files()


@pytest.mark.parametrize("kind", ["device", "folder", "other bytes"])
def test_an_artefact_that_is_a_link_has_the_bytes_of_its_manifest(kind: str, folder: Path) -> None:
    file = folder / f"{FULL}.onnx"
    targets = {
        "device": Path("/dev/zero"),
        "folder": folder,
        "other bytes": folder / f"{HALF}.onnx",
    }
    file.unlink()
    file.symlink_to(targets[kind])
    with pytest.raises(SaccadeError, match=r"missing, but|was changed after its export"):
        ArtefactFolder(folder).check_files()


def test_a_manifest_that_names_other_inputs_than_the_file(folder: Path, tmp_path: Path) -> None:
    for name in (FULL, HALF):
        put(folder / f"{name}.manifest.json", ("inputs", 0, "name"), "picture")
    with pytest.raises(SaccadeError, match="an input 'image', but its manifest has only picture"):
        deploy(folder, RepositoryOptions(tmp_path / "out"))


@pytest.mark.parametrize("end", ["\r", "\x0b", "\x85", "\u2028"])
def test_a_label_with_any_end_of_a_line(end: str, folder: Path, tmp_path: Path) -> None:
    for name in (FULL, HALF):
        put(folder / f"{name}.manifest.json", ("labels", 0), f"circle{end}square")
    with pytest.raises(SaccadeError, match="is empty or has a line break"):
        deploy(folder, RepositoryOptions(tmp_path / "out"))


NESTED: dict[str, Any] = {"text": {"text": {"batch_1": FIGURES}}}
FRONTIERS: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "entries as an object": (("entries",), {}, "entries: found {}, expected a list"),
    "entries as a text": (("entries",), "abc", "entries: found 'abc', expected a list"),
    "null as entries": (("entries",), None, "entries: found None"),
    "a concurrency of 5,000 digits": (
        ("entries", 0, "grpc"), {"concurrency_1" + "0" * 5000: FIGURES}, "is not known",
    ),
    "a part inside a part": (("entries", 0, "in_process", "text"), NESTED, "'text' is not known"),
    "a large number": (("entries", 0, "score", "value"), 10**400, "value: found 1000"),
}  # fmt: skip


def test_frontier_as_bench_writes_it(folder: Path) -> None:
    assert len(read_frontier(frontier(folder)).entries) == 1


@pytest.mark.parametrize("name", FRONTIERS)
def test_frontier_names_the_value(name: str, folder: Path) -> None:
    keys, value, said = FRONTIERS[name]
    path = frontier(folder)
    put(path, keys, value)
    with pytest.raises(SaccadeError) as caught:
        read_frontier(path)
    assert said in str(caught.value) and "saccade bench" in str(caught.value)


def frontier(folder: Path) -> Path:
    path = folder / FILE_NAME
    content = {"schema": "saccade.frontier", "version": 1, "model": "tiny", "entries": [ENTRY]}
    path.write_text(json.dumps(content))
    return path


REPOSITORIES: dict[str, tuple[str, Any, str]] = {
    "variants as a text": ("variants", "abc", "variants: found 'abc', expected a list"),
    "variants of numbers": ("variants", [1], "variants: [0]: found 1, expected a string"),
    "a model that is null": ("model", None, "model: found None, expected a string"),
    "files as a list": ("files", [], "files: found [], expected an object"),
    "files whose hash is a number": ("files", {"a": 1}, "files: a: found 1, expected a string"),
    "samples as an object": ("samples", {}, "samples: found {}, expected a list"),
    "a runtime that is a list": ("runtime", [], "runtime is []"),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository; restore what you change."""
    place = tmp_path_factory.mktemp("described")
    folder = artefacts(place / "folder", checkpoint=False)
    return deploy(folder, RepositoryOptions(place / "repository")).folder


@pytest.mark.parametrize("name", REPOSITORIES)
def test_repository_names_the_value(name: str, repository: Path) -> None:
    key, value, said = REPOSITORIES[name]
    path = repository / DESCRIPTION
    whole = path.read_bytes()
    try:
        put(path, (key,), value)
        with pytest.raises(SaccadeError) as caught:
            read_repository(repository)
    finally:
        path.write_bytes(whole)
    message = str(caught.value)
    assert said in message and "saccade repository" in message and "saccade export" not in message
