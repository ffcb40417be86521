# SPDX-License-Identifier: Apache-2.0
"""A trained model in one safetensors file: weights, preprocessing, labels, samples, card."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.core import limits
from saccade.core.errors import SaccadeError, ShapeError, require
from saccade.core.files import Writer, check_regular, sha256_of, write_together
from saccade.core.json_text import parse_json
from saccade.core.mapped_pages import return_tensor
from saccade.models.checkpoint_folder import CONFIG, check_config, checkpoint_file, folder_files
from saccade.models.checkpoint_format import (
    SCHEMA,
    VERSION,
    Header,
    checked_sha256,
    header_json,
    header_text,
    mapped,
    mapped_tensors,
    parsed_header,
    read_header,
    write_tensors,
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
    Weights and samples are memory-mapped from the file, and read when they are used.
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

        Large weights that are stored in that type are not copied: the model uses the memory of
        `weights`. Change a deep copy of it, not the model itself.

        Raises: ShapeError if keys or shapes differ from the configuration's, SaccadeError if the
            configuration is out of range.
        """
        require("torch", extra="export")
        from saccade.models.families import filled, outline

        _check_fit(self, outline(self.family, self.config).state_dict())
        return filled(self.family, self.config, self.weights, dtype)

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
        check_regular(path, limits.WEIGHTS_BYTES)
        state = _state(path)
        with mapped(path) as data:
            header = read_header(path, data)
    except FileNotFoundError:
        raise SaccadeError(
            f"{path}: no such file. Pass the path of a saccade checkpoint, or a shipped one, such "
            f"as {SHIPPED}digits-sum."
        ) from None
    except OSError as error:
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        which = f"the checkpoint in it: {inside[0]}" if len(inside) == 1 else "a checkpoint file."
        advice = f"Pass {which}"
        if (path / CONFIG).is_file():
            out = f"{path.name}.safetensors"
            advice = f"Convert it first: saccade convert {shlex.quote(str(path))} --out {out}"
        raise SaccadeError(f"{path}: cannot be read ({error}). {advice}") from error
    check_config(path, header)
    if check is not None:
        check(header)
    tensors = mapped_tensors(path)
    checkpoint = _checkpoint(path, checked_sha256(path, header), header, tensors)
    if _state(path) != state:
        raise SaccadeError(
            f"{path}: changed while it was read. Wait until the process that writes it has "
            "finished, then try again."
        )
    return checkpoint


def weights_bytes(path: Path) -> int:
    """Return the size of a checkpoint's weights in float32, from its header alone.

    Raises: SaccadeError if it is another kind of file.
    """
    with mapped(path) as data:
        read_header(path, data)
        entries = parse_json(header_text(data))
    shapes = (entry["shape"] for name, entry in entries.items() if name.startswith(_WEIGHTS))
    return 4 * sum(map(prod, shapes))


def _state(path: Path) -> tuple[int, ...]:
    state = path.stat()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _checkpoint(
    path: Path, sha256: str, header: Header, tensors: "Mapping[str, torch.Tensor]"
) -> Checkpoint:
    declared = header.preprocessing
    preprocessing = None if declared is None else Preprocessing.from_dict(declared)
    labels = header.labels
    calibration = _calibration(path, tensors, preprocessing, len(labels))
    weights = _weights(tensors)
    check_finite(str(path), weights)
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
    called: str | None = None,
) -> Checkpoint:
    """Write a checkpoint, after the files of `beside`; the same content gives the same bytes.

    A path that ends in .safetensors becomes one file, any other a folder of Hugging Face's names.
    `called` is the name of the folder in its card; by default, its own.

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
    path = Path(path)
    parsed = parsed_header(path, header_json(header | {"data_sha256": ""}))
    write = partial(write_tensors, tensors=tensors, header=header)
    written: dict[Path, bytes | Writer] = {path: write}
    if path.suffix != ".safetensors":
        written = folder_files(path, parsed, write, called)
    path = list(written)[-1]
    checkpoint = _checkpoint(path, "", parsed, tensors)
    write_together({**(beside or {}), **written}, replace=replace)
    tensors = mapped_tensors(path)
    return dataclasses.replace(
        checkpoint,
        sha256=sha256_of(path),
        weights=_weights(tensors),
        calibration=_calibration(path, tensors, checkpoint.preprocessing, len(labels)),
    )


def _weights(tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    return {
        key.removeprefix(_WEIGHTS): value
        for key, value in tensors.items()
        if key.startswith(_WEIGHTS)
    }


def _calibration(
    path: Path,
    tensors: "Mapping[str, torch.Tensor]",
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
        # A sum of finite numbers may overflow. The sum is taken first because it needs no memory.
        finite = not value.is_floating_point() or value.sum().isfinite() or value.isfinite().all()
        return_tensor(value)  # checking a file must not keep it in memory
        if not finite:
            raise SaccadeError(
                f"{where}: {key} contains NaN or infinity, which happens when training diverges. "
                "Use an earlier checkpoint, or train again with a lower learning rate."
            )
