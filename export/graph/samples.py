# SPDX-License-Identifier: Apache-2.0
"""The gate's samples: first from the checkpoint's own data, then extreme and random ones."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.checkpoint import Checkpoint
from saccade.models.interface import Arrays, Component, TensorSpec

GateLevel = Literal["quick", "standard", "thorough"]
# A wrong graph shows on a few samples, so `standard` takes many only where they cost little.
STANDARD_MULTIPLY_ADDS = 10**11  # of all samples together, at one pass
FEWEST_STANDARD = 16
STANDARD_SCORE_S = 10.0  # for the score of a type narrower than float32
_LEAST_REAL = 8  # calibration samples, without which no export is checked
_EXTREMES = 3  # black, white, one pixel


@dataclass(frozen=True)
class GateSizes:
    """Numbers of samples that the gate feeds to a component, and batch sizes.

    Units: seconds for `score_s`.
    Raises: SaccadeError if a number is less than 1.
    """

    real_inputs: int = 256  # from the checkpoint's own data
    random_inputs: int = 64
    batches: tuple[int, ...] = (1, 2, 7, 64)
    # How long the score of a narrower type may be compared with float32's on further samples of the
    # calibration data; None: the score is compared with float64's on the real inputs.
    score_s: float | None = None
    level: str = "custom"

    def __post_init__(self) -> None:
        sizes = (self.real_inputs, self.random_inputs, *self.batches)
        if not self.batches or min(sizes) < 1:
            raise SaccadeError(f"{self}: expected numbers of at least 1, and a batch size.")


THOROUGH = GateSizes(level="thorough")


def gate_sizes(level: GateLevel, multiply_adds: int) -> GateSizes:
    """Return the sizes of a level for a component whose samples cost that many multiply-adds.

    `thorough` does not depend on the cost. `standard` is as large as `thorough` for small models
    and has 16 samples for large ones; its largest batch has all samples, at most 64. `quick` has 8.

    Raises: SaccadeError for another level.
    """
    check_one_of("gate", level, get_args(GateLevel))
    if level == "thorough":
        return THOROUGH
    if level == "quick":
        return GateSizes(4, 4, (1, 8), score_s=0.0, level=level)
    most = THOROUGH.real_inputs + THOROUGH.random_inputs
    count = min(most, max(FEWEST_STANDARD, STANDARD_MULTIPLY_ADDS // max(1, multiply_adds)))
    random = max(FEWEST_STANDARD // 2, count // 5)
    if count == most:
        return replace(THOROUGH, level=level)
    batches = (1, 7, min(count, THOROUGH.batches[-1]))
    return GateSizes(count - random, random, batches, score_s=STANDARD_SCORE_S, level=level)


@dataclass(frozen=True)
class Samples:
    """The inputs by name, and the calibration arrays of the first samples.

    Shapes: each input [n ...]; labelled [m ...] with m at most n.
    """

    inputs: dict[str, np.ndarray]
    labelled: dict[str, np.ndarray]
    sizes: GateSizes = THOROUGH

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


def samples_of(
    checkpoint: Checkpoint, component: Component, sizes: GateSizes = THOROUGH
) -> Samples:
    """Return the same samples each time: spread over the calibration data, then from a fixed seed.

    The first of the others are extremes: a black image, a white one, one with a single white pixel.

    Raises: SaccadeError if the checkpoint has too few samples or none for an input.
    """
    chosen = _spread(checkpoint, sizes.real_inputs)
    labelled, real = calibration_samples(checkpoint, component, chosen)
    rng = np.random.default_rng(0)
    noise = random_inputs(component, rng, sizes.random_inputs, like=real)
    inputs = {
        spec.name: _joined(spec, real[spec.name], _with_extremes(spec, noise[spec.name]))
        for spec in component.inputs
    }
    return Samples(inputs, labelled, replace(sizes, real_inputs=len(chosen)))


def further_noise(checkpoint: Checkpoint, component: Component, seen: int) -> Arrays:
    """Return the random inputs of `thorough` after the first `seen`, which a lower level has.

    Shapes: each input [n ...].
    """
    real = calibration_samples(checkpoint, component, np.zeros(1, np.int64))[1]
    noise = random_inputs(component, np.random.default_rng(0), THOROUGH.random_inputs, like=real)
    return {name: array[seen:] for name, array in noise.items()}


def calibration_count(checkpoint: Checkpoint) -> int:
    """Return the number of calibration samples.

    Raises: SaccadeError if they are too few to check an export.
    """
    count = len(next(iter(checkpoint.calibration.values())))
    if count < _LEAST_REAL:
        raise SaccadeError(
            f"{checkpoint.path}: has {count} calibration samples, expected at least "
            f"{_LEAST_REAL}. Train or convert the checkpoint again with more."
        )
    return count


def calibration_samples(
    checkpoint: Checkpoint, component: Component, rows: np.ndarray
) -> tuple[dict[str, np.ndarray], Arrays]:
    """Return the calibration arrays of some rows, and the component's inputs made from them.

    Shapes: rows [n] -> each array [n ...].
    Raises: SaccadeError if the checkpoint has no samples for an input.
    """
    labelled = {name: array[rows] for name, array in checkpoint.calibration.items()}
    real = component.samples(labelled)
    if missing := component.missing(real):
        raise SaccadeError(
            f"{checkpoint.path}: has no calibration samples of {', '.join(missing)}, only of "
            f"{', '.join(sorted(checkpoint.calibration))}. Train or convert the checkpoint again."
        )
    return labelled, real


def calibration_inputs(checkpoint: Checkpoint, component: Component, count: int) -> Arrays:
    """Return a component's inputs on that many calibration samples, spread over all of them.

    Shapes: each input [n ...]; n is smaller than `count` if there are fewer samples.
    Raises: SaccadeError as `calibration_samples`.
    """
    inputs = calibration_samples(checkpoint, component, _spread(checkpoint, count))[1]
    return {spec.name: np.ascontiguousarray(inputs[spec.name]) for spec in component.inputs}


def _spread(checkpoint: Checkpoint, count: int) -> np.ndarray:
    there = calibration_count(checkpoint)
    return np.linspace(0, there - 1, min(there, count)).astype(np.int64)


def _with_extremes(spec: TensorSpec, noise: np.ndarray) -> np.ndarray:
    if spec.dtype != "uint8" or noise.ndim != 4 or len(noise) <= _EXTREMES:
        return noise
    noise = noise.copy()
    noise[0], noise[1], noise[2] = 0, 255, 0
    noise[2, noise.shape[1] // 3, noise.shape[2] // 3] = 255
    return noise


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
