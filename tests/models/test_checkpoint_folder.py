# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a folder of config.json, model.safetensors and a card is read like a file."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import TESTS

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.variant import default_model_name
from saccade.exporter.evaluation.evaluated_model import subjects_of_checkpoint
from saccade.models.checkpoint import load
from saccade.models.official.convert import ConvertOptions, convert
from saccade.models.shipped import located
from saccade.serving.commands import closings
from saccade.serving.commands.cli import run
from saccade.serving.commands.inspection import inspect

FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("folder") / "animals"
    convert("auto", TESTS / "golden" / "hugging_face" / "vit", ConvertOptions(out))
    return out


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / folder.name
    copy.mkdir()
    for name in FILES:
        (copy / name).write_bytes((folder / name).read_bytes())
    return copy


def test_a_folder_is_read_like_its_file(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == FILES
    checkpoint = load(folder)
    assert checkpoint.sha256 == load(folder / "model.safetensors").sha256
    assert checkpoint.labels == ("cat", "dog", "eft")
    content = json.loads((folder / "config.json").read_text())
    assert content["model_type"] == "saccade" and content["label2id"]["eft"] == 2
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: saccade\n") and "squashed to 16 x 16 px" in card
    # The name of a variant is the folder's, not that of the file in it.
    assert default_model_name(folder) == default_model_name(checkpoint.path) == "animals"
    assert subjects_of_checkpoint(checkpoint)[0].name.startswith("animals-")
    given = {"path": folder}
    closing = closings.evaluate(given, SimpleNamespace(results=[]))
    assert closing is not None
    lines = closing.lines(0)
    assert f"saccade export {folder} --out build/animals" in lines[-1]
    found = inspect(folder)
    assert found.kind == "a checkpoint of saccade"
    assert found.next == (f"saccade export {folder} --out build/animals",)


def test_a_file_becomes_a_folder_and_a_folder_a_file(folder: Path, tmp_path: Path) -> None:
    file, again = tmp_path / "animals.safetensors", tmp_path / "animals"
    convert("auto", folder, ConvertOptions(file))
    convert("auto", file, ConvertOptions(again))
    for name in FILES:
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert file.read_bytes() == (folder / "model.safetensors").read_bytes()
    with pytest.raises(SaccadeError, match="already a saccade checkpoint"):
        convert("auto", file, ConvertOptions(tmp_path / "other", labels=tmp_path / "names.txt"))
    with pytest.raises(SaccadeError, match="exists"):
        convert("auto", file, ConvertOptions(again))


def test_a_changed_configuration_is_refused(copied: Path) -> None:
    config = copied / "config.json"
    config.write_text(config.read_text().replace('"cat"', '"cow"'))
    for path in (copied, copied / "model.safetensors"):
        with pytest.raises(SaccadeError, match=r"id2label is .*cow.* a change to it has no effect"):
            load(path)


def test_a_folder_without_weights(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(SaccadeError, match=r"but no model\.safetensors. Copy it there"):
        load(copied)


def test_a_folder_is_no_artefact_folder(folder: Path) -> None:
    with pytest.raises(SaccadeError, match=r"found a checkpoint, .* --out build/animals"):
        _ = ArtefactFolder(folder).manifests


def test_an_ending_that_is_neither(tmp_path: Path) -> None:
    source = TESTS / "golden" / "hugging_face" / "vit"
    with pytest.raises(SaccadeError, match=r"--out is .*\.pth, expected .* or one without"):
        convert("auto", source, ConvertOptions(tmp_path / "ours.pth"))


def test_the_next_bench_of_a_converted_model_asks_for_images(copied: Path) -> None:
    """`bench` cannot find the authors' training data; that of shipped checkpoints it can."""
    trained = copied.parent / "trained"
    trained.mkdir()
    shutil.copy(located("shipped:sot-shapes"), trained)
    result = SimpleNamespace(manifests=(1,), exit_code=0, to_dict=lambda: {"variants": []})
    for folder, data in ((copied, " --data IMAGES"), (trained, "")):
        for command, given in (
            ("export", {"options": SimpleNamespace(out=folder)}),
            ("verify", {"folder": folder, "bisect": False}),
        ):
            closing = getattr(closings, command)(given, result)
            assert closing is not None
            assert closing.next == f"saccade bench {folder}{data} --out {folder}-report"


def test_the_next_command_names_the_data_that_only_the_user_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("build/photos")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    card = {"data": "photos", "own_data": True}
    header = SimpleNamespace(card=card, preprocessing={})
    monkeypatch.setattr(closings, "header_of", lambda _: header)
    result = SimpleNamespace(manifests=(1,), results=(1,), exit_code=0)

    def following(command: str, given: dict[str, Any]) -> str:
        closing = getattr(closings, command)(given, result)
        assert closing is not None
        return closing.next.removeprefix("saccade bench build/photos")

    exported = {"options": SimpleNamespace(out=folder)}
    end = " --out build/photos-report"
    assert following("export", exported) == f" --data PATH/photos{end}", "the artefact is not it"
    (tmp_path / "my images/photos").mkdir(parents=True)
    assert following("export", exported) == f" --data 'my images/photos'{end}"
    (tmp_path / "other/photos").mkdir(parents=True)
    assert following("export", exported) == f" --data PATH/photos{end}", "two of that name"
    (tmp_path / "photos").mkdir()
    assert following("export", exported) == f" --data photos{end}"
    card.pop("own_data")
    assert following("export", exported) == end, "generated data is found by its name"
    card |= {"own_data": True, "task": "retrieval"}  # as a SPARO of sentences, without classes
    assert following("export", exported) == f" --data photos --task retrieval{end}"
    scored = {"path": folder, "options": SimpleNamespace(data=None, task="knn")}
    assert following("evaluate", scored) == f" --data photos --task knn{end}"
    scored["options"].data, scored["options"].task = "other", None
    assert following("evaluate", scored) == f" --data other{end}"
    scored = {"path": folder, "options": SimpleNamespace(data="a b.csv", task=None)}
    assert following("evaluate", scored) == f" --data 'a b.csv'{end}"
    scored["options"].task = "retrieval"
    assert following("evaluate", scored) == f" --data 'a b.csv' --task retrieval{end}"


def test_a_quiet_conversion_prints_only_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = TESTS / "golden" / "hugging_face" / "vit", tmp_path / "animals.safetensors"
    words = ["convert", str(source), "--out", str(out), "--force"]
    assert run(words) == 0
    assert "  note: calibration: 256 generated scenes of colored shapes" in capsys.readouterr().out
    assert run([*words, "-q"]) == 0
    assert capsys.readouterr() == (f"{out}: written.\n", "")
