# SPDX-License-Identifier: Apache-2.0
"""Hostile checkpoints and configurations: a message, nothing they claim is built or allocated."""

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_files import (
    DEEP,
    CheckpointFile,
    deep_json,
    safetensors_file,
)
from safetensors.torch import save_file

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import load
from saccade.models.families import build
from saccade.models.preprocessing import Preprocessing

Case = tuple[Callable[[CheckpointFile, Path], Path], str]


@pytest.fixture(scope="module")
def sound() -> CheckpointFile:
    return CheckpointFile()


def config(**values: Any) -> Callable[[CheckpointFile, Path], Path]:
    return lambda sound, path: sound.with_config(path, **values)


def header(**values: Any) -> Callable[[CheckpointFile, Path], Path]:
    return lambda sound, path: sound.write(path, **values)


def tensor(name: str, value: Any) -> Callable[[CheckpointFile, Path], Path]:
    return lambda sound, path: sound.write(path, tensors={name: value})


def input_of(**values: Any) -> Callable[[CheckpointFile, Path], Path]:
    return lambda sound, path: sound.write(
        path, preprocessing=sound.header["preprocessing"] | values
    )


def bytes_of(change: Callable[[bytes], bytes]) -> Callable[[CheckpointFile, Path], Path]:
    """A file whose bytes are made of those of the sound one."""

    def make(sound: CheckpointFile, path: Path) -> Path:
        path.write_bytes(change(sound.write(path).read_bytes()))
        return path

    return make


WEIGHT = "weights/read_out_codes"
CHECKPOINTS: dict[str, Case] = {
    "missing": (lambda _, path: path, "no such file.*shipped:digits-sum"),
    "empty": (bytes_of(lambda _: b""), "is empty"),
    "truncated": (bytes_of(lambda data: data[:-100]), r"truncated: found \d+ bytes.*needs \d+"),
    "truncated in its header": (bytes_of(lambda data: data[:100]), "truncated"),
    "one bit flipped": (bytes_of(lambda d: d[:-1] + bytes([d[-1] ^ 1])), "corrupt.*SHA-256"),
    "a header of 2^62 bytes": (bytes_of(lambda _: b"\0" * 7 + b"\x40{}" + bytes(64)), "truncated"),
    "text": (bytes_of(lambda _: b"hello, I am a model\n" * 9), "not safetensors"),
    "a pickle": (bytes_of(lambda _: pickle.dumps({"a": 1})), "pickle.*saccade convert"),
    "a torch file": (lambda _, path: torch.save({}, path) or path, "zip archive.*saccade convert"),
    "foreign": (
        lambda _, path: save_file({"a": torch.zeros(2)}, path) or path,
        "without saccade's metadata",
    ),
    "of another schema": (header(schema="x"), "found x version 3"),
    "of a later version": (header(version=4), "version 4, expected .* 3"),
    "without a card": (
        lambda sound, path: sound.with_text(path, lambda text: text.replace(', "card": {}', "")),
        "missing keys: card",
    ),
    "with a key too many": (header(colour="red"), "unknown keys: colour"),
    "a label beyond the classes": (
        tensor("calibration/labels", torch.tensor([0, 2])),
        "2, .* 0 to 1",
    ),
    "config null": (header(config=None), "config: found None, expected an object"),
    "config 7": (header(config=7), "config: found 7, expected an object"),
    "config a list": (header(config=[1]), r"config: found \[1\], expected an object"),
    "family a list": (header(family=["nac"]), r"family: found \['nac'\], expected a string"),
    "card a list": (header(card=[]), r"card: found \[\], expected an object"),
    "preprocessing 7": (header(preprocessing=7), "preprocessing: found 7, expected an object"),
    "labels numbers": (header(labels=[1]), r"labels: \[0\]: found 1, expected a string"),
    "200,000 labels": (header(labels=["a"] * 200_000), "found 200000 .* expected at most 100000"),
    "a long label": (header(labels=["a" * 10**6]), "1000000 characters, expected at most 1000"),
    "alpha a text": (config(alpha="x"), "alpha is 'x', expected a finite number"),
    "alpha true": (config(alpha=True), "alpha is True, expected a finite number"),
    "seed a text": (config(seed="x"), "seed is 'x', expected a whole number"),
    "seed a list": (config(seed=[0]), r"seed is \[0\], expected a whole number"),
    "mean null": (config(mean=None), "mean is None, expected a list of values"),
    "width 1e9": (config(dim=10**9, heads=1), "dim is 1000000000, expected .* at most"),
    "width 1e6": (config(dim=2**20, ffn_dim=2**20), "the model has .* numbers, expected at"),
    "wider than its weights": (config(ffn_dim=4096), "weights do not fit family 'nac'"),
    "layers 1e9": (config(propagator_layers=10**9), "propagator_layers is 1000000000, expected"),
    "layers without weights": (config(propagator_layers=2), "weights do not fit family 'nac'"),
    "std 1e300": (input_of(std=[1e300]), r"std is \(1e\+300,\), expected from 1e-06 to 1e\+06"),
    "std 0": (input_of(std=[0]), r"std is \(0,\), expected above 0"),
    "std -1": (input_of(std=[-1]), r"std is \(-1,\), expected above 0"),
    "std 1e-300": (input_of(std=[1e-300]), "std is .*, expected from 1e-06"),
    "mean 1e300": (input_of(mean=[1e300]), "mean is .*, expected from -1e"),
    "config's std 1e300": (config(std=[1e300]), "std is .*, expected from 1e-06"),
    "image of 1e9 pixels": (input_of(height_px=10**9), "height_px is 1000000000, expected .*at mo"),
    "cap of 1e9": (input_of(max_image_mib=10**9), "max_image_mib is 1000000000, expected .*at mos"),
    "fill a million": (input_of(fill=[0] * 10**6), "fill is .*, expected at most .* values"),
    "NaN weights": (tensor(WEIGHT, torch.full((1, 4), torch.nan)), "contains NaN or infinity"),
    "infinite weights": (tensor(WEIGHT, torch.full((1, 4), torch.inf)), "contains NaN or infinity"),
    "weights of whole numbers": (
        tensor(WEIGHT, torch.zeros(1, 4, dtype=torch.int64)),
        "found torch.int64, expected torch.float32",
    ),
    "complex weights": (tensor(WEIGHT, torch.zeros(1, 4, dtype=torch.complex64)), "complex64"),
    "calibration in bfloat16": (
        tensor("calibration/more", torch.zeros(2, dtype=torch.bfloat16)),
        "'more' are torch.bfloat16",
    ),
    "20 axes": (tensor("calibration/more", torch.zeros([1] * 20)), "has 20 axes"),
    "400 axes": (
        lambda _, path: safetensors_file(
            path, {"a": {"dtype": "F32", "shape": [1] * 400, "data_offsets": [0, 4]}}, bytes(4)
        ),
        "has 400 axes",
    ),
    "a size of 2^62": (
        lambda _, path: safetensors_file(
            path, {"a": {"dtype": "F32", "shape": [0, 2**62, 2], "data_offsets": [0, 0]}}
        ),
        "sizes and a name of an ordinary length",
    ),
    "a type of no torch": (
        lambda sound, path: safetensors_file(
            path,
            {
                "__metadata__": {"saccade": json.dumps(sound.header | {"data_sha256": ""})},
                "a": {"dtype": "F6_E2M3", "shape": [16], "data_offsets": [0, 12]},
            },
            bytes(12),
        ),
        "not safetensors, or a corrupt one",
    ),
    "metadata that is a text": (
        lambda _, path: safetensors_file(path, {"__metadata__": "saccade"}),
        "not safetensors, or a corrupt one",
    ),
    "metadata whose values are no texts": (
        lambda sound, path: safetensors_file(path, {"__metadata__": {"saccade": sound.header}}),
        "not safetensors, or a corrupt one",
    ),
    "tensors without a place": (
        lambda _, path: safetensors_file(path, {"a": {"dtype": "F32", "shape": [8]}}),
        "not safetensors, or a corrupt one",
    ),
    "deep header": (
        lambda _, path: safetensors_file(path, deep_json().encode()),
        "nested more than 64 deep",
    ),
    "deep metadata": (
        lambda sound, path: sound.with_text(path, lambda _: deep_json()),
        "corrupt metadata .*nested more than 64 deep",
    ),
    "deep card": (
        lambda sound, path: sound.with_text(
            path, lambda text: text.replace('"card": {}', f'"card": {deep_json(DEEP)}')
        ),
        "nested more than 64 deep",
    ),
    "half a character": (
        lambda sound, path: sound.with_text(path, lambda text: text.replace('"a"', '"\\ud800"')),
        "corrupt metadata",
    ),
    "a folder": (lambda _, path: path.mkdir() or path, "found a folder, expected a file"),
    "a pipe": (lambda _, path: os.mkfifo(path) or path, "found a pipe or device"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoint(case: str, sound: CheckpointFile, tmp_path: Path) -> None:
    make, words = CHECKPOINTS[case]
    path = make(sound, tmp_path / "x.safetensors")
    with pytest.raises(SaccadeError) as error:
        load(path).build()
    message = str(error.value)
    assert re.search(words, message, re.S), message[:500]
    assert len(message) < 2_000, "a hostile file fills the terminal"


def test_a_sound_checkpoint_is_read(sound: CheckpointFile, tmp_path: Path) -> None:
    checkpoint = load(sound.write(tmp_path / "x.safetensors"))
    model = checkpoint.build()
    assert model.config.to_dict() | checkpoint.config == model.config.to_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, sound.tensors[f"weights/{name}"]), name


def test_no_weight_is_made_before_names_and_shapes_fit(
    sound: CheckpointFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from saccade.models.nac.model import NAC

    made: list[str] = []
    start = NAC.__init__

    def watched(self: Any, *given: Any, **named: Any) -> None:
        start(self, *given, **named)
        made.append(next(self.parameters()).device.type)

    monkeypatch.setattr(NAC, "__init__", watched)
    with pytest.raises(SaccadeError, match="weights do not fit"):
        load(sound.with_config(tmp_path / "x.safetensors", ffn_dim=16)).build()
    assert made == ["meta"]


def fields_of_families() -> Iterator[tuple[str, Any]]:
    from saccade.models.catalogue import presets
    from saccade.models.families import FAMILIES

    for family in FAMILIES:
        yield family, next(iter(presets(family).values()))


def test_every_field_of_every_family_has_its_type() -> None:
    wrong: tuple[Any, ...] = (None, {}, {"a": 1}, [[]], [None], ["x", 1], True, "x", 1.5, 7, [1.5])
    wrong += ([True], float("nan"), 10**400, -(10**9), 10**9, [10**9], [0] * 10**4)
    refused = 0
    for family, known in fields_of_families():
        plain = known.to_dict()
        for name, value in plain.items():
            for other in wrong:
                try:
                    type(known).from_dict({**plain, name: other})
                except SaccadeError as error:
                    assert "configuration: " in str(error), (family, name, other)
                    assert len(str(error)) < 1_000, (family, name)
                    refused += 1
                else:
                    same = type(other) is type(value) or isinstance(value, float)
                    assert same, (family, name, other)
    assert refused > 3_000


def test_a_configuration_that_is_none() -> None:
    for values in (None, 7, [], "x"):
        with pytest.raises(SaccadeError, match="expected an object of fields"):
            build("sot", values)  # type: ignore[arg-type]


def test_numpy_values_are_no_preprocessing_by_accident() -> None:
    with pytest.raises(SaccadeError, match=r"channels is 1\.0"):
        Preprocessing(8, 8, 1.0, (0.5,), (0.5,))  # type: ignore[arg-type]
    kept = Preprocessing(8, 8, 1, (np.float64(0.5),), (np.float64(0.5),))
    assert kept.to_dict()["std"] == [0.5]
