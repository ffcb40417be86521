# SPDX-License-Identifier: Apache-2.0
"""`saccade inspect`: every kind of file and folder, the command that follows, and damaged ones."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.models.checkpoint import load
from saccade.models.official.convert import SOURCES
from saccade.models.shipped import shipped_checkpoint
from saccade.serving.client.embeddings import Embeddings, save_embeddings
from saccade.serving.commands import cli
from saccade.serving.commands.inspection import inspect


def test_a_shipped_checkpoint_by_its_name(capsys):
    assert cli.run(["inspect", "shipped:digits-sum", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["labels"]) == ("nac", 10)
    assert found["sha256"] == sha256_of(shipped_checkpoint("digits-sum"))
    assert found["budgets"] == "b1000, b0500, b0250, b0125 (modules)"
    assert found["next"] == ["saccade export shipped:digits-sum --out build/digits-sum"]


def test_an_artefact_folder_and_its_files(tiny_folder, capsys):
    found = inspect(tiny_folder)
    assert found.facts["family"] == "nac" and not found.facts["measured"]
    assert [row["keeps"].split(" (")[1] for row in found.facts["variants"]] == [
        "b1000)", "b0500)", "b0250)", "b0125)",
    ]  # fmt: skip
    assert "saccade bench" in found.next[0]
    onnx = sorted(tiny_folder.glob("*.onnx"))[0]
    of_file = inspect(onnx)
    assert of_file.facts["sha256"] == sha256_of(onnx)
    beside = onnx.with_name(f"{onnx.stem}.manifest.json")
    assert inspect(beside).facts == of_file.facts
    assert cli.run(["inspect", str(tiny_folder)]) == 0
    out = capsys.readouterr().out
    assert "an artefact folder" in out and f"Next: saccade bench {tiny_folder}" in out


FOREIGN = {  # each with the command that a message names
    "of transformers": (("config.json",), "saccade convert {place} --out build/of-tr"),
    "of a hub, and no text": (
        ("open_clip_config.json",),
        "saccade convert '{place}' --out 'build/of",
    ),
    "classes": (
        ("dog/a.png", "cat/b.jpg"),
        "saccade train nac --data {place} --out my.safetensors",
    ),
    "splits": (("train/dog/a.PNG",), "saccade evaluate MODEL --data {place}"),
    "flat": (("a, b.webp",), "saccade bulk ARTEFACTS --input {place} --out ANSWERS"),
    "weights.bin": ((), "saccade inspect {place}"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_saccade_did_not_write_leads_to_its_command(name, tmp_path, capsys):
    names, following = FOREIGN[name]
    place = tmp_path / name.replace("of transformers", "of-transformers")
    for one in names:
        (place / one).parent.mkdir(parents=True, exist_ok=True)
        (place / one).write_text('{"model_type": "vit", "model_cfg": {}}')
    if not names:
        place.write_bytes(b"weights")
    following = following.format(place=place)
    commands = [("verify", place), ("preflight", place), ("predict", place, "cat.png")]
    if "convert" not in following and names:
        commands += [("convert", place, "--out", tmp_path / "x.safetensors")]
        assert following in inspect(place).next
    if names:
        commands += [("export", place, "--out", tmp_path / "x")]
    for words in commands:
        assert cli.run([*map(str, words)]) == 2
        said = capsys.readouterr().err
        assert following in said and "Traceback" not in said, words
    assert [path for path in tmp_path.iterdir() if path != place] == []


def test_a_changed_file_is_refused(tiny_folder, tmp_path):
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    victim = sorted(copy.glob("*.onnx"))[0]
    victim.write_bytes(victim.read_bytes()[:-1] + b"\x00")
    for path in (copy, victim):
        with pytest.raises(SaccadeError, match="changed after its export"):
            inspect(path)


def test_a_repository(tiny_folder, tmp_path):
    from saccade.serving.repository.deploy import deploy
    from saccade.serving.repository.options import RepositoryOptions

    deployment = deploy(tiny_folder, RepositoryOptions(out=tmp_path / "repository"))
    found = inspect(deployment.folder)
    assert found.facts["variants"] == list(deployment.variants)
    assert found.facts["not_measured"] == list(deployment.variants)
    assert found.next[0] == f"saccade preflight {deployment.folder}"
    assert inspect(deployment.folder / "saccade.json") == found


def test_embeddings_and_data_sets(tmp_path):
    embeddings = Embeddings(np.zeros((2, 3), np.float32), "sparo-b1000-fp32", "a" * 64, "")
    save_embeddings(tmp_path / "e.npz", embeddings, ["a.png", "b.png"])
    found = inspect(tmp_path / "e.npz")
    assert (found.facts["vectors"], found.facts["dimensions"]) == (2, 3)
    np.savez(tmp_path / "d.npz", images=np.zeros((1, 8, 8, 1), np.uint8), labels=np.zeros(1))
    assert "data set" in inspect(tmp_path / "d.npz").kind


@pytest.mark.parametrize("content", ["plan", "manifest"])
def test_answers_of_a_bulk_job(tmp_path, content):
    plan = {"schema": "saccade.bulk", "version": 1, "model": "m", "inputs": 7}
    (tmp_path / "_plan").mkdir()
    (tmp_path / "_plan" / "plan.json").write_text(json.dumps(plan))
    if content == "manifest":
        (tmp_path / "manifest.json").write_text(json.dumps(plan | {"answers": 7, "errors": 0}))
        (tmp_path / "_SUCCESS").write_text("7\n")
    found = inspect(tmp_path)
    assert found.facts["finished"] == (content == "manifest")
    assert found.facts["inputs"] == 7


# What `convert` refuses to guess, by source.
NEEDED = {name: {"--labels"} for name in ("nac", "sot", "vit", "deit", "swin", "resnet")} | {
    "sparo-clip": set(),
    "open-clip": {"--config"},
    "invariant-slot-attention": {"--config"},
    "sparo-dino": set(),
    "tvmax-vqa": {"--attention", "--labels"},
    "transformers": set(),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_foreign_checkpoint_names_its_converter(source, tmp_path):
    pytest.importorskip("msgpack", reason="pip install '.[export]'")
    import official_files

    file = official_files.FILES[source](tmp_path)
    found = inspect(file.path)
    assert found.facts["looks_like"] == source
    # A hub's folder tells its source itself.
    words = "" if file.path.is_dir() else f"{source} "
    assert found.next[0].startswith(f"saccade convert {words}{file.path} --")
    given = {word for word in file.flags if word.startswith("--")}
    shown = {word for word in found.next[0].split() if word.startswith("--")} - {"--out"}
    assert shown == NEEDED[source] and shown <= given
    weights = file.path / "model.safetensors" if file.path.is_dir() else file.path
    assert found.facts["sha256"] == sha256_of(weights)


@pytest.mark.parametrize("damage", ["truncated", "corrupt"])
def test_a_damaged_checkpoint_is_refused_as_export_refuses_it(damage, tmp_path):
    path = tmp_path / "damaged.safetensors"
    whole = shipped_checkpoint("digits-sum").read_bytes()
    path.write_bytes(whole[:-100] if damage == "truncated" else whole[:-1] + b"\x01")
    assert whole[-1:] != b"\x01"
    with pytest.raises(SaccadeError, match=damage) as refused:
        inspect(path)
    with pytest.raises(SaccadeError) as by_export:
        load(path)
    assert str(refused.value) == str(by_export.value)


class Trap:
    """What unpickling would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [False, True])
def test_nothing_is_unpickled(tmp_path, zipped):
    """The texts of a file that would run code are read all the same."""
    names = ("cls_token", "classifier.cls_fc.weight", "blocks.0.attn.qkv.weight")
    data = pickle.dumps([*names, Trap(tmp_path / "ran")], protocol=2)
    path = tmp_path / "trap.pt"
    path.write_bytes(data)
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("trap/data.pkl", data)
    assert inspect(path).facts["looks_like"] == "sot"
    assert not (tmp_path / "ran").exists()


def test_a_pickled_module_is_named_and_how_to_save_its_weights(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    found = inspect(tmp_path / "module.pt")
    assert found.facts["contains"] == "a pickled torch module (torch.nn.modules.linear.Linear)"
    assert "torch.save(model.state_dict(), 'weights.pt')" in found.next[0]


def test_an_unknown_state_dict_shows_its_names(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"b.weight": torch.ones(1), "a.weight": torch.ones(1)}, tmp_path / "plain.pt")
    found = inspect(tmp_path / "plain.pt")
    assert found.facts["first_names"] == ["a.weight", "b.weight"]
    assert found.next[0].startswith("compare them with docs/convert.md")
    assert "--checkpoint-key KEY" in found.next[0]


# What no kind of file has, and what is said of it.
OF_NO_KIND = {
    "empty.bin": (b"", "found an empty file"),
    "text.txt": (b"hello, world: no weights", "found a text file"),
    "long.safetensors": ((limits.JSON_BYTES + 1).to_bytes(8, "little") + b"{", ""),
    "cut.safetensors": ((100).to_bytes(8, "little") + b'{"a": 1', ""),
    "cut.pt": (pickle.dumps(["a" * 100], protocol=2)[:50], ""),
    "list.json": (b"[1]", ""),
    "foreign.json": (b'{"a": 1}', "found JSON without a schema"),
    "broken.json": (b"{", ""),
}


@pytest.mark.parametrize("name", OF_NO_KIND)
def test_other_files_are_refused(name, tmp_path, capsys):
    path, (content, words) = tmp_path / name, OF_NO_KIND[name]
    path.write_bytes(content)
    assert cli.run(["inspect", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and words in said


@pytest.mark.parametrize("path", ["shipped:digits-sum", "mine.safetensors"])
def test_verify_of_a_checkpoint_names_the_export(path, capsys):
    assert cli.run(["verify", path]) == 2
    stem = path.removeprefix("shipped:").removesuffix(".safetensors")
    assert f"saccade export {path} --out build/{stem}" in capsys.readouterr().err


def test_headings_are_not_repeated(capsys):
    assert cli.run(["inspect", "shipped:digits-sum"]) == 0
    out = capsys.readouterr().out
    assert "SHA-256 " in out and "sha256" not in out and out.count("SHA-256") == 1
    assert "  size " in out and "  bytes " not in out


def test_nothing_and_other_folders_are_refused(tmp_path):
    with pytest.raises(SaccadeError, match="found nothing there"):
        inspect(tmp_path / "missing")
    with pytest.raises(SaccadeError, match="contains nothing saccade wrote"):
        inspect(tmp_path)
