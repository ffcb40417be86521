# SPDX-License-Identifier: Apache-2.0
"""Files of other codes: every format gives the same tensors, and none of them runs code."""

import argparse
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from saccade.core.errors import SaccadeError
from saccade.models.official.tensor_files import float32_bytes, read_tensors

WEIGHTS = {"a/kernel": torch.arange(6.0).reshape(2, 3), "a/bias": torch.tensor([1.5, -2.0, 0.0])}
NESTED = {"a": {name[2:]: value.numpy() for name, value in WEIGHTS.items()}}


def extension(array: np.ndarray, name: str | None = None, code: int = 1) -> Any:
    """An array as Flax packs it."""
    content = (array.shape, name or array.dtype.name, array.tobytes())
    return msgpack.ExtType(code, msgpack.packb(content, use_bin_type=True))


def write_messages(path: Path, tree: Any) -> None:
    path.write_bytes(msgpack.packb(tree, default=extension, strict_types=True))


def torch_file(content: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path, **options)


FORMATS: dict[str, Callable[[Path], None]] = {
    "state dict": torch_file(WEIGHTS),
    "old torch format": torch_file(WEIGHTS, _use_new_zipfile_serialization=False),
    "state dict of several GPUs": torch_file({f"module.{k}": v for k, v in WEIGHTS.items()}),
    "in containers": torch_file({"epoch": 3, "state_dict": WEIGHTS, "optimizer": {"state": {}}}),
    "beside the options of a run": torch_file(
        {"model": WEIGHTS, "args": argparse.Namespace(lr=0.1, name="run")}
    ),
    "safetensors": lambda path: save_file(WEIGHTS, path),
    "npz": lambda path: np.savez(path, **{k: v.numpy() for k, v in WEIGHTS.items()}),
    "Flax": lambda path: write_messages(path, NESTED),
    "Flax training state": lambda path: write_messages(
        path, {"step": 7, "optimizer": {"target": {"params": NESTED}, "state": {"step": 7}}}
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_reads_the_same_tensors(kind: str, tmp_path: Path) -> None:
    # The content says what a file is: Flax's have no ending, MCAN's end in .pkl.
    path = tmp_path / "checkpoint.npz"
    FORMATS[kind](path)
    tensors = read_tensors(path)
    assert sorted(tensors) == sorted(WEIGHTS)
    assert all(torch.equal(tensors[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_part_of_the_file_is_chosen_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "dino.pth"
    student = {f"module.{name}": value + 1 for name, value in WEIGHTS.items()}
    torch.save({"student": student, "teacher": WEIGHTS, "epoch": 1}, path)
    assert torch.equal(read_tensors(path, "student")["a/bias"], WEIGHTS["a/bias"] + 1)
    assert torch.equal(read_tensors(path, likely="teacher")["a/bias"], WEIGHTS["a/bias"])
    assert "teacher" not in read_tensors(path, "student")
    with pytest.raises(
        SaccadeError, match=r"no 'ema' at its top level, only epoch, student, teacher"
    ):
        read_tensors(path, "ema")


def test_flax_arrays_in_pieces_in_bfloat16_and_scalars(tmp_path: Path) -> None:
    large = np.arange(12, dtype=np.float32).reshape(3, 4)
    pieces = {str(i): extension(piece) for i, piece in enumerate(np.split(large.reshape(-1), 3))}
    half = np.array([1.0, -2.5], dtype=np.float32)
    tree = {
        "large": {"__msgpack_chunked_array__": True, "shape": {"0": 3, "1": 4}, "chunks": pieces},
        "half": extension((half.view(np.uint32) >> 16).astype(np.uint16), "bfloat16"),
        "one": extension(np.float32(3.0), code=3),
    }
    write_messages(tmp_path / "flax", tree)
    tensors = read_tensors(tmp_path / "flax")
    assert torch.equal(tensors["large"], torch.from_numpy(large))
    assert torch.equal(tensors["half"], torch.from_numpy(half))
    assert tensors["one"].item() == 3.0


class Malicious:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def bad_messages(**changes: Any) -> Callable[[Path], None]:
    content = {"shape": (2,), "name": "float32", "data": b"\0" * 8} | changes
    packed = msgpack.packb(tuple(content.values()))
    return lambda path: path.write_bytes(msgpack.packb({"a": msgpack.ExtType(1, packed)}))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (lambda path: None, "no such file"),
    "a folder": (lambda path: path.mkdir(), "found a folder"),
    "an empty file": (lambda path: path.write_bytes(b""), "the file is empty"),
    "a picture": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 40), "not a supp"),
    "a cut zip": (lambda path: path.write_bytes(b"PK\x03\x04" + b"0" * 40), "truncated or damaged"),
    "a cut safetensors": (
        lambda path: path.write_bytes((99).to_bytes(8, "little") + b'{"a":'),
        "truncated or damaged",
    ),
    "a whole model": (torch_file(torch.nn.Linear(2, 2)), "needs unpickling.*state_dict"),
    "numbers only": (torch_file({"epoch": "three"}), "epoch is str"),
    "no tensors": (torch_file({}), "contains no tensors"),
    "arrays of objects": (lambda path: save_objects(path), "Python objects"),
    "a shape that lies": (bad_messages(shape=(2**40,)), "8 bytes do not fit float32"),
    "a type of objects": (bad_messages(name="object"), "not a type of weights"),
    "a shape of texts": (bad_messages(shape=("2",)), "not a list of sizes"),
    "an unknown extension": (
        lambda path: path.write_bytes(msgpack.packb({"a": msgpack.ExtType(9, b"1")})),
        "extension type 9",
    ),
    "cut messages": (
        lambda path: path.write_bytes(msgpack.packb({"a": "b" * 30})[:-3]),
        "not a tree saved by Flax",
    ),
}


def save_objects(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.array([{}, None], dtype=object))


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, tmp_path: Path) -> None:
    make, reason = REFUSED[case]
    make(tmp_path / "file")
    with pytest.raises(SaccadeError, match=reason):
        read_tensors(tmp_path / "file")


@pytest.mark.parametrize("whole", [False, True])
def test_no_code_of_a_file_runs(whole: bool, tmp_path: Path) -> None:
    path, trace = tmp_path / "evil.pt", tmp_path / "trace"
    content = {"state_dict": WEIGHTS, "extra": Malicious(trace)}
    if whole:
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path)
    with pytest.raises(SaccadeError, match="needs unpickling"):
        read_tensors(path)
    assert not trace.exists()


def test_size_from_headers(tmp_path: Path) -> None:
    half = {name: value.half() for name, value in WEIGHTS.items()}
    save_file(half, tmp_path / "one.safetensors")
    size = (tmp_path / "one.safetensors").stat().st_size
    assert float32_bytes(tmp_path / "one.safetensors") == (36, size)
    save_file(WEIGHTS, tmp_path / "two.safetensors")
    places = {"x": "one.safetensors", "y": "two.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    both = size + (tmp_path / "two.safetensors").stat().st_size
    assert float32_bytes(index) == (72, both)
    (tmp_path / "one.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{x")
    assert float32_bytes(tmp_path / "one.safetensors") == (0, 0)
    torch.save(WEIGHTS, tmp_path / "a.pth")
    assert float32_bytes(tmp_path / "a.pth")[0] == 0
    assert float32_bytes(tmp_path / "none") == (0, 0)


def test_arrays_of_an_archive_are_mapped(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2**16)}, tmp_path / "a.pth")
    before = read_tensors(tmp_path / "a.pth")["a"]
    data = (tmp_path / "a.pth").read_bytes()
    with (tmp_path / "a.pth").open("r+b") as file:  # in place: the same file
        file.write(data.replace(bytes([0, 0, 128, 63]), bytes(4)))
    assert before.sum() == 0  # pages that were not read yet are those of the file
