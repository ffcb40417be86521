# SPDX-License-Identifier: Apache-2.0
"""Manifest checks that apply to every family: hashes, names, tensors."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.models.interface import TensorSpec

_SHA256 = re.compile(r"[0-9a-f]{64}")
_AXIS = re.compile(r"[a-z][a-z0-9_]{0,63}|[1-9][0-9]{0,9}")
# Tensor types that servers and clients support.
_DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool",
)  # fmt: skip
MOST_TENSORS, MOST_AXES = 64, 16
MOST_NUMBERS = 2**31  # in one sample of one tensor
MOST_LABELS, MOST_CHARACTERS = 100_000, 1_000  # ImageNet-21k has 21,843 labels


class Contradiction(ValueError):
    """A contradiction in a file's content; the caller adds the file name and what to do."""


@contextmanager
def believed(path: Path, again: str) -> Iterator[None]:
    """Turn a contradiction in the file at `path` into an error that says what to do.

    Raises: SaccadeError for a `Contradiction`.
    """
    try:
        yield
    except Contradiction as error:
        raise SaccadeError(f"{path}: {error}. {again}") from error


def check_equal(checks: Iterable[tuple[str, str, str]]) -> None:
    """Compare values of a manifest with those derived from it: found, expected, what it is.

    Raises: Contradiction for the first that differs.
    """
    for actual, expected, what in checks:
        if actual != expected:
            raise Contradiction(f"{what} is {actual!r}, expected {expected!r}")


def check_hashes(digests: Iterable[str]) -> None:
    """Check hashes.

    Raises: Contradiction for the first one that is not a SHA-256.
    """
    for digest in digests:
        if not _SHA256.fullmatch(digest):
            raise Contradiction(f"{digest!r:.80} is not a SHA-256 in hexadecimal")


def check_tensors(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Check inputs and outputs.

    Raises: Contradiction if they are empty, too many, or not valid tensors.
    """
    if not inputs or not outputs:
        raise Contradiction("inputs or outputs are empty")
    if (count := len(inputs) + len(outputs)) > MOST_TENSORS:
        raise Contradiction(f"has {count} inputs and outputs, expected at most {MOST_TENSORS}")
    for spec in (*inputs, *outputs):
        if not spec.axes.split() or not all(_AXIS.fullmatch(axis) for axis in spec.axes.split()):
            raise Contradiction(
                f"axes {spec.axes!r:.80} of {spec.name!r:.80} are not words and numbers"
            )
        _check_tensor(spec)


def _check_tensor(spec: TensorSpec) -> None:
    numbers = math.prod(int(axis) for axis in spec.axes.split() if axis.isdecimal())
    for fits, actual, expected in (
        (spec.name.isprintable(), f"name {spec.name!r:.80}", "no control characters"),
        (len(spec.name) <= MOST_CHARACTERS, f"name {spec.name!r:.80}", "a shorter name"),
        (spec.dtype in _DTYPES, f"type {spec.dtype!r:.80}", f"one of {', '.join(_DTYPES)}"),
        (len(spec.axes) <= MOST_CHARACTERS, f"axes {spec.axes!r:.80}", "fewer"),
        (len(spec.axes.split()) <= MOST_AXES, f"axes {spec.axes!r:.80}", f"at most {MOST_AXES}"),
        (numbers <= MOST_NUMBERS, f"axes {spec.axes!r:.80}", f"at most {MOST_NUMBERS} numbers"),
    ):
        if not fits:
            raise Contradiction(f"a tensor has {actual}, expected {expected}")
