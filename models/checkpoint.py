# SPDX-License-Identifier: Apache-2.0
"""A trained model in one safetensors file: weights, input, labels, calibration images, card."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.models.preprocessing import Preprocessing
from saccade.plugins.errors import SaccadeError, ShapeError, require
from saccade.plugins.files import write_atomically

if TYPE_CHECKING:
    import torch
    from torch import nn

SCHEMA, VERSION = "saccade.checkpoint", 1
_KEYS = {"schema", "version", "family", "config", "preprocessing", "labels", "card", "data_sha256"}
_WEIGHTS = "weights/"
_IMAGES, _LABELS = "calibration/images", "calibration/labels"


@dataclass(frozen=True)
class Checkpoint:
    """What a trained model is, and everything that later stages need to prove themselves.

    Shapes: calibration_images [n h w c] uint8, calibration_labels [n] int64, training data both.
    """

    path: Path
    sha256: str  # of the file's bytes: later stages name their parent by it
    family: str
    config: dict[str, Any]
    weights: dict[str, "torch.Tensor"]
    preprocessing: Preprocessing
    labels: tuple[str, ...]
    calibration_images: np.ndarray
    calibration_labels: np.ndarray
    card: dict[str, Any]

    def build(self, dtype: "torch.dtype | None" = None) -> "nn.Module":
        """The model in evaluation mode, its floating-point weights in `dtype` (float32).

        Raises: ShapeError if keys or shapes differ from the configuration's, SaccadeError if the
            configuration is out of range.
        """
        torch: Any = require("torch", extra="export")
        from saccade.models.families import build

        model = build(self.family, self.config)
        _check_fit(self, model.state_dict())
        model.load_state_dict(self.weights)
        return model.to(dtype or torch.float32).eval()


def load(path: Path | str) -> Checkpoint:
    """Read a checkpoint; nothing in it is executed.

    Raises: SaccadeError if the file is missing, truncated, corrupt, of another format, or of
        another version.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise SaccadeError(
            f"{path}: no such file. Train one with: saccade train nac --data digits --out {path}"
        ) from None
    except OSError as error:
        raise SaccadeError(f"{path}: cannot be read ({error}). Pass a checkpoint file.") from error
    return _parse(path, data)


def _parse(path: Path, data: bytes) -> Checkpoint:
    tensors = _tensors(path, data)
    header = _header(path, data)
    preprocessing = Preprocessing.from_dict(header["preprocessing"])
    labels = header["labels"]
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise SaccadeError(f"{path}: labels are {labels!r}, expected a list of texts.")
    images, answers = _calibration(path, tensors, preprocessing, len(labels))
    weights = {
        key.removeprefix(_WEIGHTS): value
        for key, value in tensors.items()
        if key.startswith(_WEIGHTS)
    }
    sha256 = hashlib.sha256(data).hexdigest()
    return Checkpoint(
        path=path,
        sha256=sha256,
        family=header["family"],
        config=header["config"],
        weights=weights,
        preprocessing=preprocessing,
        labels=tuple(labels),
        calibration_images=images,
        calibration_labels=answers,
        card=header["card"],
    )


def save(
    path: Path | str,
    *,
    family: str,
    config: dict[str, Any],
    weights: dict[str, "torch.Tensor"],
    preprocessing: Preprocessing,
    labels: tuple[str, ...],
    calibration_images: np.ndarray,
    calibration_labels: np.ndarray,
    card: dict[str, Any],
) -> Checkpoint:
    """Write a checkpoint; the same content gives the same bytes.

    Shapes: calibration_images [n h w c] uint8, calibration_labels [n] int64.
    Raises: SaccadeError if the file cannot be written or would not load again.
    """
    torch: Any = require("torch", extra="export")
    tensors = {_WEIGHTS + key: value.detach().contiguous() for key, value in weights.items()}
    tensors[_IMAGES] = torch.from_numpy(np.ascontiguousarray(calibration_images))
    tensors[_LABELS] = torch.from_numpy(np.ascontiguousarray(calibration_labels))
    header = {
        "schema": SCHEMA,
        "version": VERSION,
        "family": family,
        "config": config,
        "preprocessing": preprocessing.to_dict(),
        "labels": list(labels),
        "card": card,
    }
    data = _pack(tensors, header)
    checkpoint = _parse(Path(path), data)
    write_atomically(Path(path), data)
    return checkpoint


def _pack(tensors: dict[str, "torch.Tensor"], header: dict[str, Any]) -> bytes:
    from safetensors.torch import save as serialize

    # One metadata key only: safetensors writes several in the order of a random hash.
    bare = serialize(tensors)
    header = header | {"data_sha256": _data_sha256(bare)}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return serialize(tensors, metadata={"saccade": text})


def _header_bytes(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _data_sha256(data: bytes) -> str:
    return hashlib.sha256(memoryview(data)[8 + _header_bytes(data) :]).hexdigest()


def _tensors(path: Path, data: bytes) -> dict[str, "torch.Tensor"]:
    require("torch", extra="export")
    from safetensors import SafetensorError
    from safetensors.torch import load as deserialize

    try:
        return deserialize(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise SaccadeError(f"{path}: {_diagnosis(data)}") from error


def _diagnosis(data: bytes) -> str:
    retrain = "Copy it again from its source, or train a new one with: saccade train"
    if not data:
        return f"the file is empty. {retrain}"
    if data[:4] == b"PK\x03\x04" or (data[0] == 0x80 and data[1:2] in b"\x02\x03\x04\x05"):
        kind = "a zip archive, as torch.save writes" if data[0] != 0x80 else "a Python pickle"
        return (
            f"found {kind}, expected a safetensors file; saccade runs no code from a checkpoint. "
            "Convert it once: torch.load(file, weights_only=True), then "
            "saccade.models.checkpoint.save"
        )
    start = 8 + _header_bytes(data)
    try:
        entries = json.loads(data[8:start])
        end = start + max(v["data_offsets"][1] for k, v in entries.items() if k != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        cut = data[8:9] == b"{" and len(data) < start
        end = start if cut else 0
    if end > len(data):
        return f"the file is truncated: found {len(data)} bytes, its header wants {end}. {retrain}"
    return f"found a file that is not safetensors, or a corrupt one. {retrain}"


def _header(path: Path, data: bytes) -> dict[str, Any]:
    metadata = json.loads(data[8 : 8 + _header_bytes(data)]).get("__metadata__") or {}
    if "saccade" not in metadata:
        raise SaccadeError(
            f"{path}: a safetensors file without saccade's metadata (found {sorted(metadata)}). "
            "Weights of another project have to be converted: saccade.models.checkpoint.save"
        )
    try:
        header = json.loads(metadata["saccade"])
        found = (header["schema"], header["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise SaccadeError(f"{path}: corrupt metadata ({error}). Copy the file again.") from error
    if found != (SCHEMA, VERSION):
        raise SaccadeError(
            f"{path}: found {found[0]} version {found[1]}, expected {SCHEMA} version {VERSION}. "
            "Use the version of saccade that wrote it, or train again."
        )
    if set(header) != _KEYS:
        raise SaccadeError(
            f"{path}: metadata keys missing {sorted(_KEYS - set(header))}, unknown "
            f"{sorted(set(header) - _KEYS)}. Train the checkpoint again with this version."
        )
    if header["data_sha256"] != _data_sha256(data):
        raise SaccadeError(
            f"{path}: corrupt, the tensors do not have the SHA-256 that the file states. "
            "Copy it again from its source."
        )
    return header


def _calibration(
    path: Path, tensors: dict[str, "torch.Tensor"], expected: Preprocessing, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    if _IMAGES not in tensors or _LABELS not in tensors:
        raise SaccadeError(f"{path}: no calibration images. Train the checkpoint again.")
    images, labels = tensors[_IMAGES].numpy(), tensors[_LABELS].numpy()
    shape = (len(labels), expected.height_px, expected.width_px, expected.channels)
    if images.dtype != np.uint8 or images.shape != shape or labels.dtype != np.int64:
        raise ShapeError(
            f"{path}: calibration images are {images.dtype} {images.shape} with {labels.dtype} "
            f"labels, expected uint8 {shape} with int64 labels. Train the checkpoint again."
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise SaccadeError(
            f"{path}: calibration labels reach from {labels.min()} to {labels.max()}, expected 0 "
            f"to {classes - 1}. Train the checkpoint again."
        )
    return images, labels


def _check_fit(checkpoint: Checkpoint, expected: dict[str, "torch.Tensor"]) -> None:
    found = checkpoint.weights
    missing = sorted(set(expected) - set(found))
    extra = sorted(set(found) - set(expected))
    shapes = [
        f"{key}: found {tuple(found[key].shape)}, expected {tuple(expected[key].shape)}"
        for key in sorted(set(found) & set(expected))
        if found[key].shape != expected[key].shape
    ]
    if missing or extra or shapes:
        raise ShapeError(
            f"{checkpoint.path}: weights do not fit family '{checkpoint.family}'. "
            f"Missing {len(missing)} keys (first: {missing[:3]}), unexpected {len(extra)} "
            f"(first: {extra[:3]}), {len(shapes)} shapes differ (first: {shapes[:3]}). "
            "Weights and configuration come from different models: train or convert it again."
        )
