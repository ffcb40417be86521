# SPDX-License-Identifier: Apache-2.0
"""User errors: exit code 2, a message that says what to do, and nothing written."""

import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("msgpack", reason="pip install '.[export]'")

import official_files  # noqa: E402

from saccade.core.errors import SaccadeError  # noqa: E402
from saccade.models.families import build  # noqa: E402
from saccade.models.official import convert as driver  # noqa: E402
from saccade.models.official.convert import SOURCES  # noqa: E402
from saccade.models.vqa.questions import question_tokens  # noqa: E402
from saccade.serving.client.texts import text_tokens  # noqa: E402
from saccade.serving.commands.cli import run  # noqa: E402

FILES: dict[str, Any] = official_files.FILES


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """Each source's official file, made once."""
    made: dict[str, Any] = {}

    def find(source: str) -> Any:
        if source not in made:
            made[source] = FILES[source](tmp_path_factory.mktemp(source))
        return made[source]

    return find


@pytest.fixture
def refused(tmp_path, capsys):
    """Run `saccade convert`, which has to refuse; gives the message."""

    def call(source: str, path: Path, *flags: object) -> str:
        out = tmp_path / "out" / "ours.safetensors"
        out.parent.mkdir(exist_ok=True)
        code = run(["convert", source, str(path), *map(str, flags), "--out", str(out)])
        message = capsys.readouterr().err
        assert code == 2, message
        assert list(out.parent.iterdir()) == []
        assert message.startswith("saccade: ")
        return " ".join(message.split())

    return call


def with_config(file: Any, place: Path, changes: Mapping[str, Any]) -> list[str]:
    """The file's flags with other values in its configuration."""
    flags = list(file.flags)
    config: dict[str, Any] = {}
    if "--config" in flags:
        at = flags.index("--config")
        config = json.loads(Path(flags[at + 1]).read_text())
        del flags[at : at + 2]
    path = place / "changed.json"
    path.write_text(json.dumps(_merged(config, changes)))
    return [*flags, "--config", str(path)]


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merged(old.get(key, {}), x) for key, x in new.items() if isinstance(x, dict)}
    return {**old, **new, **both}


def without(flags: tuple[str, ...], *names: str) -> list[str]:
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [word for flag, value in pairs if flag not in names for word in (flag, value)]


# A plain ViT may be a DeiT: nothing in the file says how its images were scaled.
PAIRS = [(a, b) for a in FILES for b in SOURCES if a != b and (a, b) != ("vit", "deit")]


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_of_another_source(source, file_of, monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_write", lambda *_: pytest.fail("was written"))
    for theirs in (a for a, b in PAIRS if b == source):
        file = file_of(theirs)
        options = driver.ConvertOptions(
            tmp_path / "x.safetensors",
            attention="softmax" if source == "tvmax-vqa" else None,
            checkpoint_key="teacher" if theirs == "sparo-dino" else None,
        )
        with pytest.raises(SaccadeError, match=f"(?s){theirs}") as error:
            driver.convert(source, file.path, options)
        assert f"'{theirs}'" in str(error.value), (theirs, str(error.value))


# Of each source: what the configuration says, and what the message says.
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "slots": ("sparo-clip", {"L": 9}, "L 9, but the file's tensors have 8"),
    "code": ("sparo-clip", {"embed_dim": 50}, "embed_dim 50, .* have 48"),
    "groups": ("sparo-clip", {"sparo_heads": 3}, "sparo_heads 3, .* have 4"),
    "depth": ("sparo-clip", {"reduce_depth": "one"}, "reduce_depth is 'one', expected a whole"),
    "no tower": ("sparo-clip", {"vision_cfg": "ViT-B-32"}, "vision_cfg is 'ViT-B-32', .* object"),
    "codes": ("open-clip", {"num_codes": 30}, "num_codes 30, .* have 24"),
    "patch": ("open-clip", {"vision_cfg": {"patch_size": 4}}, "patch_size 4, .* have 8"),
    "width": ("sot", {"ViTConfig": {"embed_dim": 64}}, "embed_dim 64, .* have 32"),
    "image": ("sot", {"img_size": 224}, "img_size 224, .* have 28"),
    "heads": ("sot", {"ViTConfig": {"num_heads": 5}}, "heads is 5, expected a divisor"),
    "pool": (
        "sot",
        {"representationConfig": {"args": {"num_heads": 3}}},
        "20 rows .* num_heads 3, expected a multiple of 6",
    ),
    "words": ("tvmax-vqa", {"token_size": 51}, "token_size 51, .* have 50"),
    "many": ("tvmax-vqa", {"MULTI_HEAD": "many"}, "MULTI_HEAD is 'many', expected a whole"),
    "grid": ("tvmax-vqa", {"grid": "9x10"}, "grid is '9x10', expected a list of 2 values"),
    "no grid": ("tvmax-vqa", {"grid": [0, 10]}, r"grid is \[0, 10\], expected .* at least 1"),
    "strides": ("invariant-slot-attention", {"encoder_strides": [2]}, "expected 2 values"),
    "kind": ("invariant-slot-attention", {"attention": "t-sa"}, "belongs to 'ts-sa'"),
    "objects": ("invariant-slot-attention", {"slots": 0}, "slots is 0, expected .* at least 1"),
    "more": ("invariant-slot-attention", {"slots": 7}, r"\(4, 16\), expected \(7, 16\)"),
    "typo": ("invariant-slot-attention", {"round": 3}, "unknown field 'round'"),
    "of ViT": ("vit", {"num_heads": 5}, "heads is 5, expected a divisor"),
    "of DINO": ("sparo-dino", {"L": 7}, "L 7, .* have 6"),
    "no patch": ("swin", {"img_size": 2}, "patch_px is 4, expected a divisor of height_px"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_config_that_does_not_fit_its_weights(case, file_of, refused, tmp_path):
    source, changes, words = UNFIT[case]
    file = file_of(source)
    message = refused(source, file.path, *with_config(file, tmp_path, changes))
    assert re.search(words, message), message


MISSING: dict[str, tuple[str, tuple[str, ...], str]] = {
    "labels": (
        "sot",
        ("--labels",),
        "10 classes, found 0 labels. Pass the names with --labels",
    ),
    "labels of ViT": ("vit", ("--labels",), "5 classes, found 0 labels"),
    "answers": ("tvmax-vqa", ("--labels",), "no names for its 20 answers.*--labels FILE"),
    "attention": (
        "tvmax-vqa",
        ("--attention", "--lam"),
        r"does not tell which one.*Pass --attention softmax\|sparsemax\|tvmax",
    ),
    "heads": ("vit", ("--config",), "Pass it with --config"),
    "strides": ("invariant-slot-attention", ("--config",), "encoder_strides.*Pass --config"),
    "activation": ("open-clip", ("--config",), "quick_gelu"),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_asked_for_by_its_flag(case, file_of, refused):
    source, flags, words = MISSING[case]
    file = file_of(source)
    message = refused(source, file.path, *without(file.flags, *flags))
    assert re.search(words, message), message


def _cut(path: Path, whole: bytes) -> None:
    path.write_bytes(whole[: len(whole) // 2])


class Runs:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


DAMAGED: dict[str, tuple[Callable[[Path, bytes], Any], str]] = {
    "nothing there": (lambda path, _: None, "no such file. Pass the authors' checkpoint"),
    "empty": (lambda path, _: path.write_bytes(b""), "the file is empty. Copy"),
    "cut": (_cut, "truncated or damaged.*Copy it again"),
    "a text": (lambda path, _: path.write_text("weights"), "not a supported checkpoint"),
    "needs code": (
        lambda path, _: torch.save({"state_dict": Runs(path.with_name("ran"))}, path),
        r"needs unpickling, which runs code.*torch.save\(model.state_dict\(\)",
    ),
    "a bare pickle that needs code": (
        lambda path, _: path.write_bytes(pickle.dumps(Runs(path.with_name("ran")), protocol=2)),
        "needs unpickling, which runs code",
    ),
    "a whole model": (
        lambda path, _: torch.save(torch.nn.Linear(2, 2), path),
        "needs unpickling.*save only the weights",
    ),
    "no weights": (lambda path, _: torch.save({}, path), "contains no tensors"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_cannot_be_read(case, file_of, refused, tmp_path):
    make, words = DAMAGED[case]
    file, path = file_of("vit"), tmp_path / "checkpoint.pth"
    make(path, file.path.read_bytes())
    message = refused("vit", path, *file.flags)
    assert re.search(words, message), message
    assert "safe_globals" not in message  # torch's advice is to run the code
    assert not (tmp_path / "ran").exists()


def test_of_several_networks_in_a_file_one_is_asked_for(file_of, refused):
    message = refused("vit", file_of("sparo-dino").path)
    assert "--checkpoint-key (found student, teacher" in message


def test_an_official_file_where_ours_is_expected(file_of, tmp_path, capsys):
    path = file_of("vit").path
    assert run(["export", str(path), "--out", str(tmp_path / "folder")]) == 2
    assert "saccade convert SOURCE FILE" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "folder").exists()


SMALLER_THAN_A_PATCH: dict[str, dict[str, Any]] = {
    "nac": {"height_px": 2, "width_px": 2, "patch_px": 4},
    "sparo": {"height_px": 4, "width_px": 4, "patch_px": 8},
    "sot": {"height_px": 4, "width_px": 4, "patch_px": 8, "token_embedding": "naive"},
    "vqa": {"grid": [0, 3]},
}


@pytest.mark.parametrize("family", SMALLER_THAN_A_PATCH)
def test_an_image_smaller_than_a_patch(family):
    with pytest.raises(SaccadeError, match=r"(patch_px|height_px|grid) is .*, expected"):
        build(family, SMALLER_THAN_A_PATCH[family])


WORDS = ("a", "red", "circle")


def test_a_text_longer_than_the_context_is_cut_only_if_asked(caplog):
    metadata: dict[str, Any] = {"tokenizer": "words", "context_length": 4, "words": WORDS}
    metadata |= {"merges": (), "vocabulary": 7}
    with pytest.raises(SaccadeError, match=r"3 words, expected at most 2.*truncation"):
        text_tokens(["a red circle"], metadata)
    cut = text_tokens(["a red circle", "a red", "a"], metadata, truncate=True)
    np.testing.assert_array_equal(cut, [[1, 4, 5, 2], [1, 4, 5, 2], [1, 4, 2, 0]])
    assert "1 of 3 texts were cut to 4 tokens" in caplog.text
    questions = {"words": WORDS, "vocabulary": "listed", "question_length": 2}
    with pytest.raises(SaccadeError, match="has 3 words, expected 1 to 2"):
        question_tokens(questions, "a red circle?")
    assert list(question_tokens(questions, "a red circle?", truncate=True)) == [0, 1]
