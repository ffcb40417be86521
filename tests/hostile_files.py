# SPDX-License-Identifier: Apache-2.0
"""Small files that claim, nest or repeat more than they contain."""

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as serialize

from saccade.models.checkpoint_format import write_tensors
from saccade.models.preprocessing import Preprocessing

DEEP = 100_000
CONFIG = {"modules": 4, "readout_modules": 1, "dim": 8, "code_dim": 4, "signature_dim": 4}
CONFIG |= {"propagator_layers": 1, "heads": 2, "ffn_dim": 8, "classes": 2}


class CheckpointFile:
    """A valid checkpoint of a tiny NAC, to be changed in one place."""

    def __init__(self) -> None:
        from saccade.models.families import build

        weights = build("nac", CONFIG).state_dict()
        self.tensors = {f"weights/{name}": weight for name, weight in weights.items()}
        self.tensors["calibration/image"] = torch.zeros(2, 8, 8, 1, dtype=torch.uint8)
        self.header: dict[str, Any] = {
            "schema": "saccade.checkpoint",
            "version": 3,
            "family": "nac",
            "config": CONFIG,
            "preprocessing": Preprocessing(8, 8, 1, (0.5,), (0.5,)).to_dict(),
            "labels": ["a", "b"],
            "card": {},
        }

    def write(
        self, path: Path, *, tensors: Mapping[str, torch.Tensor] | None = None, **header: Any
    ) -> Path:
        """Write it with other header values or additional tensors."""
        write_tensors(path, {**self.tensors, **(tensors or {})}, {**self.header, **header})
        return path

    def with_config(self, path: Path, **values: Any) -> Path:
        """Write it with other values in its configuration."""
        return self.write(path, config={**CONFIG, **values})

    def with_text(self, path: Path, change: Callable[[str], str]) -> Path:
        """Write it with changed metadata text."""
        metadata = serialize(self.tensors, metadata={"saccade": change(json.dumps(self.header))})
        path.write_bytes(metadata)
        return path


def safetensors_file(path: Path, header: bytes | Mapping[str, Any], data: bytes = b"") -> Path:
    """Write a header as given, followed by bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def npy(descr: str, shape: tuple[int, ...], data: bytes = b"") -> bytes:
    """Return an array file with that header, followed by any bytes."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def zip_file(path: Path, members: Mapping[str, bytes], *, packed: bool = False) -> Path:
    """Write an archive of these members."""
    way = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", way) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def twice_named(path: Path) -> Path:
    """Write an archive of images with two label files of the same name."""
    images_npz(path)
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("labels.npy", npy("<i8", (40,), bytes(8 * 40)))
    return path


def zip_bomb(path: Path, size: int = 2**30) -> Path:
    """Write a small archive whose directory claims that it unpacks to `size` bytes."""
    zip_file(path, {"images.npy": npy("|u1", (2**20,), bytes(2**20))}, packed=True)
    data = bytearray(path.read_bytes())
    struct.pack_into("<L", data, data.rindex(b"PK\x01\x02") + 24, size)
    path.write_bytes(data)
    return path


def images_npz(path: Path, **arrays: bytes) -> Path:
    """Write a valid data set of 40 images, with some arrays replaced."""
    sound = {
        "images": np.arange(40 * 8 * 8, dtype=np.uint32).astype(np.uint8).reshape(40, 8, 8),
        "labels": np.arange(40) % 2,
    }
    members = {}
    for name, array in sound.items():
        file = io.BytesIO()
        np.save(file, array)
        members[f"{name}.npy"] = file.getvalue()
    return zip_file(path, members | {f"{name}.npy": data for name, data in arrays.items()})


def torch_zip(path: Path, content: bytes) -> Path:
    """Write an archive like torch.save, with this pickle for names and shapes."""
    file = io.BytesIO()
    torch.save({}, file)
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    return zip_file(path, members | {pickled: content})


def deep_dictionaries(depth: int) -> bytes:
    """Return the pickle of {0: {0: {0: ...}}}."""
    return b"\x80\x02" + b"}K\x00" * depth + b"}" + b"s" * depth + b"."


def deep_key(depth: int) -> bytes:
    """Return the pickle of a dictionary with the key ((((...),),),), whose hash recurses in C."""
    return b"\x80\x02}N" + b"\x85" * depth + b"Ns."


def doubled_dictionaries(times: int) -> bytes:
    """Return dictionaries that each contain the previous one twice by memo: 2^times leaves."""
    steps = [b"\x80\x02", b"}q\x00"]
    for index in range(times):
        old, new = bytes([index]), bytes([index + 1])
        steps.append(b"}q" + new + b"(K\x00h" + old + b"K\x01h" + old + b"u")
    return b"".join(steps) + b"."


def pickled(value: Any) -> bytes:
    """Pickle with protocol 2, as torch does."""
    return pickle.dumps(value, protocol=2)


def deep_json(depth: int = DEEP) -> str:
    """Return nested lists."""
    return "[" * depth + "]" * depth
