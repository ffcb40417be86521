# SPDX-License-Identifier: Apache-2.0
"""A trained model in one safetensors file: weights, preprocessing, labels, samples, card."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade import limits
from saccade.errors import SaccadeError, ShapeError, require
from saccade.files import read_regular, write_together
from saccade.models.checkpoint_folder import check_config, checkpoint_file, folder_files
from saccade.models.checkpoint_format import (
    SCHEMA,
    VERSION,
    Header,
    check_data,
    pack,
    read_header,
    unpack,
)
from saccade.models.preprocessing import Preprocessing
from saccade.models.shipped import SHIPPED

if TYPE_CHECKING:
    import torch
    from torch import nn

_WEIGHTS, _CALIBRATION = "weights/", "calibration/"
_OLD_NAMES = {"images": "image"}  # in version 1


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint of a trained model, with everything that later stages need to check their work.

    `calibration` contains samples of what the model was trained on, by input name, with the
    right answers as `labels` if there are any. The first axis counts the samples.
    Shapes: image [n h w c] uint8, labels [n] int64, others as in the family's inputs.
    """

    path: Path
    sha256: str  # of the file's bytes; later stages identify their parent by it
    family: str
    config: dict[str, Any]
    weights: dict[str, "torch.Tensor"]
    preprocessing: Preprocessing | None  # None if the model takes no image
    labels: tuple[str, ...]
    calibration: dict[str, np.ndarray]
    card: dict[str, Any]

    def build(self, dtype: "torch.dtype | None" = None) -> "nn.Module":
        """Build the model in evaluation mode, with floating-point weights in `dtype` (float32).

        Raises: ShapeError if keys or shapes differ from the configuration's, SaccadeError if the
            configuration is out of range.
        """
        torch: Any = require("torch", extra="export")
        from saccade.models.families import build, outline

        _check_fit(self, outline(self.family, self.config).state_dict())
        model = build(self.family, self.config, fresh=False)
        model.load_state_dict(self.weights)
        return model.to(dtype or torch.float32).eval()

    def save_pretrained(self, folder: Path | str, *, replace: bool = True) -> "Checkpoint":
        """Write the checkpoint as a folder: config.json, model.safetensors, README.md (its card).

        A path that ends in .safetensors becomes one file. The same checkpoint gives the same bytes.

        Raises: SaccadeError as `save`.
        """
        return save(
            folder,
            family=self.family,
            config=self.config,
            weights=self.weights,
            preprocessing=self.preprocessing,
            labels=self.labels,
            calibration=self.calibration,
            card=self.card,
            replace=replace,
        )


def load(path: Path | str, *, check: Callable[[Header], None] | None = None) -> Checkpoint:
    """Read a checkpoint: a file, a folder, or a shipped one (`shipped:NAME`).

    Nothing in it is executed.
    `check` may refuse the file by its header, before torch is imported and tensors are read.

    Raises: SaccadeError if the file is missing, truncated, corrupt, of another format, or of
        another version.
    """
    path = checkpoint_file(path)
    try:
        data = read_regular(path, limits.WEIGHTS_BYTES)
    except FileNotFoundError:
        raise SaccadeError(
            f"{path}: no such file. Pass the path of a saccade checkpoint, or a shipped one, such "
            f"as {SHIPPED}digits-sum."
        ) from None
    except OSError as error:
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        which = f"the checkpoint in it: {inside[0]}" if len(inside) == 1 else "a checkpoint file."
        raise SaccadeError(f"{path}: cannot be read ({error}). Pass {which}") from error
    return _parse(path, data, partial(_checked, path, check))


def _checked(path: Path, check: Callable[[Header], None] | None, header: Header) -> None:
    check_config(path, header)
    if check is not None:
        check(header)


def _parse(path: Path, data: bytes, check: Callable[[Header], None] | None = None) -> Checkpoint:
    header = read_header(path, data)
    if check is not None:
        check(header)
    tensors = unpack(path, data)
    check_data(path, data, header)
    declared = header.preprocessing
    preprocessing = None if declared is None else Preprocessing.from_dict(declared)
    labels = header.labels
    calibration = _calibration(path, tensors, preprocessing, len(labels))
    weights = {
        key.removeprefix(_WEIGHTS): value
        for key, value in tensors.items()
        if key.startswith(_WEIGHTS)
    }
    check_finite(str(path), weights)
    sha256 = hashlib.sha256(data).hexdigest()
    return Checkpoint(
        path=path,
        sha256=sha256,
        family=header.family,
        config=header.config,
        weights=weights,
        preprocessing=preprocessing,
        labels=labels,
        calibration=calibration,
        card=header.card,
    )


def save(
    path: Path | str,
    *,
    family: str,
    config: dict[str, Any],
    weights: dict[str, "torch.Tensor"],
    preprocessing: Preprocessing | None,
    labels: tuple[str, ...],
    calibration: dict[str, np.ndarray],
    card: dict[str, Any],
    beside: Mapping[Path, bytes] | None = None,
    replace: bool = True,
) -> Checkpoint:
    """Write a checkpoint, after the files of `beside`; the same content gives the same bytes.

    A path that ends in .safetensors becomes one file, any other a folder of Hugging Face's names.

    Raises: SaccadeError if the file cannot be written or would not load again, or if it exists
        and `replace` is false.
    """
    torch: Any = require("torch", extra="export")
    tensors = {_WEIGHTS + key: value.detach().contiguous() for key, value in weights.items()}
    for name, samples in calibration.items():
        tensors[_CALIBRATION + name] = torch.from_numpy(np.array(samples, order="C"))
    header = {
        "schema": SCHEMA,
        "version": VERSION,
        "family": family,
        "config": config,
        "preprocessing": None if preprocessing is None else preprocessing.to_dict(),
        "labels": list(labels),
        "card": card,
    }
    data = pack(tensors, header)
    path = Path(path)
    written = {path: data}
    if path.suffix != ".safetensors":
        written = folder_files(path, read_header(path, data), data)
    checkpoint = _parse(list(written)[-1], data)
    write_together({**(beside or {}), **written}, replace=replace)
    return checkpoint


def _calibration(
    path: Path,
    tensors: dict[str, "torch.Tensor"],
    expected: Preprocessing | None,
    classes: int,
) -> dict[str, np.ndarray]:
    arrays = {}
    for key, value in tensors.items():
        if key.startswith(_CALIBRATION):
            name = key.removeprefix(_CALIBRATION)
            try:
                arrays[_OLD_NAMES.get(name, name)] = value.numpy()
            except (TypeError, ValueError) as error:
                raise SaccadeError(
                    f"{path}: calibration samples {name!r:.80} are {value.dtype} "
                    f"{tuple(value.shape)}, a type that NumPy does not have. Train the checkpoint "
                    "again."
                ) from error
    counts = {name: len(samples) if samples.ndim else 0 for name, samples in arrays.items()}
    if not arrays or len(set(counts.values())) > 1:
        raise ShapeError(
            f"{path}: found calibration arrays of different lengths: {counts}, expected as many "
            "samples in each. Train the checkpoint again."
        )
    _check_images(path, arrays.get("image"), expected)
    _check_labels(path, arrays.get("labels"), classes)
    return arrays


def _check_images(path: Path, images: np.ndarray | None, expected: Preprocessing | None) -> None:
    if images is None or expected is None:
        if images is None and expected is None:
            return
        there, lacking = ("an input size", "no images") if expected else ("images", "no input size")
        raise SaccadeError(
            f"{path}: has {there} for calibration, but {lacking}. Train the checkpoint again."
        )
    shape = (len(images), expected.height_px, expected.width_px, expected.channels)
    if images.dtype != np.uint8 or images.shape != shape:
        raise ShapeError(
            f"{path}: calibration images are {images.dtype} {images.shape}, expected uint8 "
            f"{shape}. Train the checkpoint again."
        )


def _check_labels(path: Path, labels: np.ndarray | None, classes: int) -> None:
    if labels is None:
        return
    if labels.dtype != np.int64 or labels.ndim != 1:
        raise ShapeError(
            f"{path}: calibration labels are {labels.dtype} {labels.shape}, expected int64 "
            f"({len(labels)},). Train the checkpoint again."
        )
    if classes and len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise SaccadeError(
            f"{path}: calibration labels range from {labels.min()} to {labels.max()}, expected 0 "
            f"to {classes - 1}. Train the checkpoint again."
        )


def _check_fit(checkpoint: Checkpoint, expected: dict[str, "torch.Tensor"]) -> None:
    weights = checkpoint.weights
    missing = sorted(set(expected) - set(weights))
    extra = sorted(set(weights) - set(expected))
    shapes = [
        f"{key}: found {tuple(weights[key].shape)}, expected {tuple(expected[key].shape)}"
        for key in sorted(set(weights) & set(expected))
        if weights[key].shape != expected[key].shape
    ]
    shapes += [
        f"{key}: found {weights[key].dtype}, expected {expected[key].dtype}"
        for key in sorted(set(weights) & set(expected))
        if _kind(weights[key]) != _kind(expected[key])
    ]
    if missing or extra or shapes:
        raise ShapeError(
            f"{checkpoint.path}: weights do not fit family '{checkpoint.family}'. "
            f"Missing {len(missing)} keys (first: {missing[:3]}), unexpected {len(extra)} "
            f"(first: {extra[:3]}), {len(shapes)} shapes or types differ (first: {shapes[:3]}). "
            "Weights and configuration come from different models. Train or convert the checkpoint "
            "again."
        )


def _kind(tensor: "torch.Tensor") -> str:
    """Return the kind of type after loading: float16 becomes float32, integers stay integers."""
    if tensor.is_complex():
        return "complex"
    return "float" if tensor.is_floating_point() else str(tensor.dtype)


def check_finite(where: str, weights: "Mapping[str, torch.Tensor]") -> None:
    """Check that all weights are finite."""
    for key, value in weights.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise SaccadeError(
                f"{where}: {key} contains NaN or infinity, which happens when training diverges. "
                "Use an earlier checkpoint, or train again with a lower learning rate."
            )
