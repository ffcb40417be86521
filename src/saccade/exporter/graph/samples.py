# SPDX-License-Identifier: Apache-2.0
"""The gate's samples: first from the checkpoint's own data, then random ones."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.errors import SaccadeError, ShapeError
from saccade.models.checkpoint import Checkpoint
from saccade.models.interface import Arrays, Component, TensorSpec


@dataclass(frozen=True)
class GateSizes:
    """Numbers of samples that the gate feeds to a component, and batch sizes.

    Raises: SaccadeError if one of them is less than 1.
    """

    real_inputs: int = 256  # from the checkpoint's own data
    random_inputs: int = 64
    batches: tuple[int, ...] = (1, 2, 7, 64)

    def __post_init__(self) -> None:
        sizes = (self.real_inputs, self.random_inputs, *self.batches)
        if not self.batches or min(sizes) < 1:
            raise SaccadeError(f"{self}: expected numbers of at least 1, and a batch size.")


GATE_SIZES = GateSizes()  # the default; a manifest records the sizes used


@dataclass(frozen=True)
class Samples:
    """The inputs by name, and the calibration arrays of the first samples.

    Shapes: each input [n ...]; labelled [m ...] with m at most n.
    """

    inputs: dict[str, np.ndarray]
    labelled: dict[str, np.ndarray]
    sizes: GateSizes = GATE_SIZES

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def real(self) -> dict[str, np.ndarray]:
        """The inputs without the random ones."""
        return {name: values[: self.sizes.real_inputs] for name, values in self.inputs.items()}


def samples_of(
    checkpoint: Checkpoint, component: Component, sizes: GateSizes = GATE_SIZES
) -> Samples:
    """Return the same samples each time: spread over the calibration data, then from a fixed seed.

    Raises: SaccadeError if the checkpoint has too few samples or none for an input.
    """
    calibration = checkpoint.calibration
    count = len(next(iter(calibration.values())))
    if count < sizes.real_inputs:
        raise SaccadeError(
            f"{checkpoint.path}: has {count} calibration samples, expected at least "
            f"{sizes.real_inputs}. Train or convert the checkpoint again: this release always "
            "stores enough."
        )
    chosen = np.linspace(0, count - 1, sizes.real_inputs).astype(np.int64)
    labelled = {name: array[chosen] for name, array in calibration.items()}
    real = component.samples(labelled)
    if missing := component.missing(real):
        raise SaccadeError(
            f"{checkpoint.path}: has no calibration samples of {', '.join(missing)}, only of "
            f"{', '.join(sorted(calibration))}. Train or convert the checkpoint again."
        )
    rng = np.random.default_rng(0)
    noise = random_inputs(component, rng, sizes.random_inputs, like=real)
    inputs = {
        spec.name: _joined(spec, real[spec.name], noise[spec.name]) for spec in component.inputs
    }
    return Samples(inputs, labelled, sizes)


def random_inputs(
    component: Component, rng: np.random.Generator, count: int, like: Arrays | None = None
) -> dict[str, np.ndarray]:
    """Draw random inputs: by the component's own function, or any bytes and floats from N(0, 1).

    Named axes take their sizes from `like`.
    """
    if component.random:
        return dict(component.random(rng, count))
    noise: dict[str, np.ndarray] = {}
    for spec in component.inputs:
        axes = spec.shape[1:] if like is None else like[spec.name].shape[1:]
        shape = (count, *(int(axis) for axis in axes))
        if spec.dtype == "uint8":
            noise[spec.name] = rng.integers(0, 256, shape, dtype=np.uint8)
        elif spec.dtype == "float32":
            noise[spec.name] = rng.standard_normal(shape, dtype=np.float32)
        else:
            raise TypeError(f"input {spec.name}: {spec.dtype} needs its own Component.random")
    return noise


def _joined(spec: TensorSpec, real: np.ndarray, noise: np.ndarray) -> np.ndarray:
    both = np.concatenate([_checked(spec, real), _checked(spec, noise)])
    return np.ascontiguousarray(both)


def _checked(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    wanted: Any = spec.shape
    fits = len(wanted) == array.ndim and all(
        isinstance(axis, str) or axis == length
        for axis, length in zip(wanted, array.shape, strict=False)
    )
    if not fits or array.dtype != spec.dtype:
        raise ShapeError(
            f"samples of {spec.name}: found {array.dtype} {list(array.shape)}, expected "
            f"{spec.dtype} [{spec.axes}]. Train or convert the checkpoint again."
        )
    return array
