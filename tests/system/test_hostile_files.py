# SPDX-License-Identifier: Apache-2.0
"""Hostile data sets, weights of other codes and JSON: a message, nothing allocated or followed."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("msgpack", reason="pip install '.[export]'")

from hostile_files import (  # noqa: E402
    DEEP,
    deep_dictionaries,
    deep_json,
    deep_key,
    doubled_dictionaries,
    images_npz,
    npy,
    safetensors_file,
    torch_zip,
    twice_named,
    zip_bomb,
    zip_file,
)

from saccade.core import limits  # noqa: E402
from saccade.core.errors import SaccadeError  # noqa: E402
from saccade.core.files import FileRefused, read_bounded  # noqa: E402
from saccade.exporter.artefact.frontier import read_frontier  # noqa: E402
from saccade.exporter.artefact.manifest import read_manifest  # noqa: E402
from saccade.exporter.graph.limits import read_file  # noqa: E402
from saccade.models.checkpoint import load  # noqa: E402
from saccade.models.checkpoint_format import refuse_foreign  # noqa: E402
from saccade.models.data.datasets import load_data  # noqa: E402
from saccade.models.data.token_states import token_states  # noqa: E402
from saccade.models.official.json_files import names_from, object_from  # noqa: E402
from saccade.models.official.tensor_files import read_tensors  # noqa: E402
from saccade.models.sparo.ranking import read_selection  # noqa: E402
from saccade.models.training.loop import read_state  # noqa: E402
from saccade.models.training.options import parse_overrides  # noqa: E402
from saccade.models.training.recipe_file import read_recipe  # noqa: E402
from saccade.serving.bench.report import read_report  # noqa: E402
from saccade.serving.client.embeddings import load_embeddings  # noqa: E402
from saccade.serving.client.images import encoded  # noqa: E402
from saccade.serving.commands.inspection import inspect  # noqa: E402
from saccade.serving.commands.pictures import read_pixels  # noqa: E402

# A data set of images with another array, and what is said of it.
ARRAYS: dict[str, tuple[str, bytes, str]] = {
    "1e13 numbers": ("images", npy("|u1", (10**13,), bytes(9)), "claims the shape"),
    "4e9 numbers": ("images", npy("|u1", (4 * 10**9,), bytes(9)), "claims .*0 bytes, and has 9"),
    "one number more": ("labels", npy("<i8", (41,), bytes(320)), "328 bytes, and has 320"),
    "one number fewer": ("labels", npy("<i8", (39,), bytes(320)), "312 bytes, and has 320"),
    "400 axes": ("labels", npy("<i8", (1,) * 400), "claims the shape"),
    "below zero": ("labels", npy("<i8", (-1, -1), bytes(8)), "claims"),
    "objects": ("labels", npy("|O", (1,), b"x"), "Python objects"),
    "texts of no letter": ("class_names", npy("<U0", (10**9,)), "claims"),
    "a header of brackets": ("labels", npy("(" * 25_000 + ")" * 25_000, (1,), b""), "damaged"),
}
DIRECTORY = b"PK\x05\x06" + bytes(8) + (10**9).to_bytes(4, "little") + bytes(6) + bytes(2**23)
ARCHIVES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a zip bomb": (zip_bomb, "unpacks to 1073741824 bytes, at most"),
    "two files of one name": (twice_named, "have the same name"),
    "a zip of texts": (lambda path: zip_file(path, {"a.txt": b""}), "expected arrays"),
    "an .npy": (lambda path: path.write_bytes(npy("|u1", (9,), bytes(9))), "npz"),
    "a directory of 1 GB": (lambda path: path.write_bytes(DIRECTORY), "damaged"),
    "a pipe": (os.mkfifo, "pipe or device"),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "images": lambda path: load_data(path, "train"),
    "token states": lambda path: token_states(path, "train"),
    "embeddings": load_embeddings,
    "weights": read_tensors,
}


@pytest.mark.parametrize("case", [*ARRAYS, *ARCHIVES])
def test_npz(case: str, tmp_path: Path) -> None:
    path, (*made, words) = tmp_path / "x.npz", (ARRAYS | ARCHIVES)[case]
    if case in ARRAYS:
        images_npz(path, **{made[0]: made[1]})
    else:
        made[0](path)
    with pytest.raises(SaccadeError, match=f"(?s){words}"):
        READERS["images"](path)
    for reader in READERS.values():
        with pytest.raises(SaccadeError):
            reader(path)


DEEPLY, MANY = "nested more than 64 deep", "contains more than 1000000 values"
MESSAGES = b"\x81\xa1a\xdc\x04\x00" + (b"\xdc\x10\x00" + b"\x80" * 4096) * 1024
# The pickle in an archive of torch, the bytes of a file, the tensors that torch saves.
PICKLES: dict[str, tuple[bytes, str]] = {
    "deep dictionaries": (deep_dictionaries(DEEP), DEEPLY),
    "a key whose hash ends the process": (deep_key(500_000), DEEPLY),
    "2^40 leaves": (doubled_dictionaries(40), MANY),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", "nests more than 64 deep"),
}
FILES: dict[str, tuple[bytes, str]] = {
    "a bare pickle of deep dictionaries": (deep_dictionaries(DEEP), DEEPLY),
    "messages in messages": (b"\x81\xa1a" * DEEP + b"\x80", "not a tree saved by Flax"),
    "four million messages": (MESSAGES, MANY),
}
TENSORS: dict[str, tuple[torch.Tensor, str]] = {
    "a number 1e13 times": (torch.zeros(1).expand(10**13), "is a view of shape"),
    "not there": (torch.zeros(1, device="meta"), "expected plain numbers"),
    "few of many numbers": (torch.zeros(3, 4).to_sparse(), "expected plain numbers"),
}
HEADERS: dict[str, tuple[Any, str]] = {
    "400 axes": (
        {"a": {"dtype": "F32", "shape": [1] * 400, "data_offsets": [0, 4]}}, "has 400 axes",
    ),
    "deep header": (b'{"a":' + deep_json().encode() + b"}", DEEPLY),
}  # fmt: skip


def key_before_archive(path: Path, key: bytes) -> None:
    path.write_bytes(key + torch_zip(path, b"\x80\x02}.").read_bytes())


WEIGHTS: list[tuple[str, Callable[..., Any], Any, str]] = [
    *((case, torch_zip, *row) for case, row in PICKLES.items()),
    *((case, Path.write_bytes, *row) for case, row in FILES.items()),
    *((case, lambda path, a: torch.save({"a": a}, path), *row) for case, row in TENSORS.items()),
    *((case, lambda path, a: safetensors_file(path, a, bytes(4)), *row)
      for case, row in HEADERS.items()),
    ("a key in front of an archive", key_before_archive, deep_key(500_000), DEEPLY),
    ("a pipe", os.mkfifo, 0o600, "pipe or a device"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "given", "words"), [row[1:] for row in WEIGHTS], ids=[row[0] for row in WEIGHTS]
)
def test_weights_of_other_codes(make, given, words, tmp_path):
    make(tmp_path / "x.pt", given)
    with pytest.raises(SaccadeError, match=f"(?s){words}"):
        read_tensors(tmp_path / "x.pt")


# Readers of a file that a folder or a command line names; none waits, and none reads without end.
REGULAR: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "image of a request": ("x.png", lambda path: encoded([path])),
    "picture": ("x.png", read_pixels),
    "ONNX": ("x.onnx", read_file),
    "inspect": ("x.onnx", inspect),
    "checkpoint": ("x.safetensors", lambda path: refuse_foreign(path) or load(path)),
    "folder of a checkpoint": ("config.json", lambda path: load(path.parent)),
    "recipe": ("x.toml", read_recipe),
    "table": ("x.csv", lambda path: load_data(path, "train")),
}
IRREGULAR: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("reader", REGULAR)
def test_what_is_no_file(reader: str, kind: str, tmp_path: Path) -> None:
    name, read = REGULAR[reader]
    IRREGULAR[kind](tmp_path / name)
    expected = r"found a (folder, expected a file|pipe or (a )?device)"
    with pytest.raises(SaccadeError, match=expected):
        read(tmp_path / name)


@pytest.mark.parametrize("reader", ["image of a request", "picture", "ONNX"])
def test_a_file_of_5_gib(reader: str, tmp_path: Path) -> None:
    name, read = REGULAR[reader]
    with (tmp_path / name).open("wb") as file:
        file.truncate(5 * 2**30)
    with pytest.raises(SaccadeError, match="found 5368709120 bytes, expected at most"):
        read(tmp_path / name)


JSON_READERS: dict[str, Callable[[Path], Any]] = {
    "--config": lambda path: object_from(path, "--config"),
    "--labels": lambda path: names_from(path, "--labels"),
    "--slots": read_selection,
    "manifest": read_manifest,
    "frontier.json": read_frontier,
    "report.json": read_report,
}
JSON_TEXTS: dict[str, bytes] = {
    "deep": deep_json().encode(),
    "500 deep": (deep_json(500)).encode(),
    "deep in a key": b'{"a": ' + deep_json().encode() + b"}",
    "two million values": b"[" + b"{}," * 2_000_001 + b"{}]",
    "never ends": b'{"a' + b'\\"' * 2_000_000 + b"\\",
    "a number of 10^5 digits": b"[" + b"9" * 10**5 + b"]",
    "1e999": b'{"schema": 1e999}',
    "NaN": b'{"schema": NaN}',
    "null": b"null",
    "7": b"7",
    "empty": b"",
    "half a character": b'{"schema": "\\ud800", "version": 1}',
    "no UTF-8": b'{"\xff\xfe": 1}',
    "too large": b" " * (limits.JSON_BYTES + 1),
}


@pytest.mark.parametrize("text", JSON_TEXTS)
def test_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.manifest.json"
    path.write_bytes(JSON_TEXTS[text])
    for name, reader in JSON_READERS.items():
        with pytest.raises(SaccadeError) as error:
            reader(path)
        assert len(str(error.value)) < 2_000, name


def test_a_field_that_is_there_twice_is_in_doubt(tmp_path: Path) -> None:
    path = tmp_path / "x.manifest.json"
    path.write_bytes(b'{"schema": "saccade.manifest", "variant": {"sha256": "a", "sha256": "b"}}')
    with pytest.raises(SaccadeError, match="found the field 'sha256' twice"):
        read_manifest(path)


def test_deep_values_on_the_command_line() -> None:
    with pytest.raises(SaccadeError, match="--set dim: nested more than 64 deep"):
        parse_overrides([f"dim={deep_json(2000)}"])
    assert parse_overrides(["dim=64", "input=image"]) == {"dim": 64, "input": "image"}


SELECTION = {"order": [0, 1], "mask": None, "kind": "slot", "data": "d", "checkpoint_sha256": "0"}
NO_SELECTIONS: dict[str, dict[str, Any]] = {
    "order of texts": {"order": ["0"]},
    "order null": {"order": None},
    "kind a list": {"kind": ["slot"]},
    "ragged mask": {"mask": [[1, 0], [1]]},
    "mask of texts": {"mask": ["1"]},
    "mask beyond 1": {"mask": [2.0]},
    "hash a number": {"checkpoint_sha256": 7},
}


@pytest.mark.parametrize("case", NO_SELECTIONS)
def test_selection(case: str, tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    path.write_text(json.dumps(SELECTION))
    assert read_selection(path) == SELECTION
    path.write_text(json.dumps(SELECTION | NO_SELECTIONS[case]))
    with pytest.raises(SaccadeError, match="expected the keys"):
        read_selection(path)


def test_names_without_end(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_text("a\n" * 200_000)
    with pytest.raises(SaccadeError, match="expected at most 100000"):
        names_from(path, "--labels")
    path.write_text("a" * 5_000)
    with pytest.raises(SaccadeError, match="expected at most 1000"):
        names_from(path, "--labels")
    with pytest.raises(SaccadeError, match="device"):
        names_from(Path("/dev/zero"), "--labels")
    with pytest.raises(SaccadeError, match="device"):
        object_from(Path("/dev/zero"), "--config")


def test_names_and_shapes_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PICKLE_OPCODES", 1_000)
    for content in (b"N0" * 600 + b"N.", b"]q\x00" * 600 + b"."):
        torch_zip(tmp_path / "x.pt", b"\x80\x02" + content)
        with pytest.raises(SaccadeError, match="more than 1000 steps"):
            read_tensors(tmp_path / "x.pt")


def test_state_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "x.resume.pt"
    for content in (deep_dictionaries(DEEP), deep_key(500_000), b"\x80\x02]q\x00h\x00a."):
        torch_zip(path, content)
        with pytest.raises(SaccadeError, match="found a damaged file"):
            read_state(path, {})
    torch.save({"version": 1, "run": "[1]", "state": {}}, path)
    with pytest.raises(SaccadeError, match="found a damaged file"):
        read_state(path, {})


@pytest.mark.parametrize("size", [99, 100, 101, 5_000])
def test_a_pipe_is_read_up_to_a_limit(size: int, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def fill() -> None:
        with suppress(BrokenPipeError), path.open("wb") as file:
            file.write(bytes(size))

    writer = threading.Thread(target=fill)
    writer.start()
    if size <= 100:
        assert read_bounded(path, 100) == bytes(size)
    else:
        with pytest.raises(FileRefused, match="more than 100 bytes"):
            read_bounded(path, 100)
    writer.join(timeout=30)
