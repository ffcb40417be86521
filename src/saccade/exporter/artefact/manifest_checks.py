# SPDX-License-Identifier: Apache-2.0
"""Manifest checks that hold for every family: hashes, names, tensors."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.models.interface import TensorSpec

_SHA256 = re.compile(r"[0-9a-f]{64}")
_AXIS = re.compile(r"[a-z][a-z0-9_]{0,63}|[1-9][0-9]{0,9}")
# Types of tensors that a server and a client know.
_DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool",
)  # fmt: skip
MOST_TENSORS, MOST_AXES = 64, 16
MOST_NUMBERS = 2**31  # of one sample of one tensor
MOST_LABELS, MOST_CHARACTERS = 100_000, 1_000  # ImageNet-21k has 21,843 labels


class Contradiction(ValueError):
    """Contradiction in a file's content; its name, and what to do, are its reader's to say."""


@contextmanager
def believed(path: Path, again: str) -> Iterator[None]:
    """Raises: SaccadeError for a contradiction in that file, with what to do about it."""
    try:
        yield
    except Contradiction as error:
        raise SaccadeError(f"{path}: {error}. {again}") from error


def check_equal(checks: Iterable[tuple[str, str, str]]) -> None:
    """Compare a manifest's value with the one that follows from it: found, expected, its name.

    Raises: Contradiction for the first that differs.
    """
    for actual, expected, what in checks:
        if actual != expected:
            raise Contradiction(f"{what} is {actual!r}, expected {expected!r}")


def check_hashes(digests: Iterable[str]) -> None:
    """Raises: Contradiction for the first that is no SHA-256."""
    for digest in digests:
        if not _SHA256.fullmatch(digest):
            raise Contradiction(f"{digest!r:.80} is not a SHA-256 in hexadecimal")


def check_tensors(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Raises: Contradiction for inputs or outputs that are none."""
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
        (len(spec.name) <= MOST_CHARACTERS, f"name {spec.name!r:.80}", "a shorter one"),
        (spec.dtype in _DTYPES, f"type {spec.dtype!r:.80}", f"one of {', '.join(_DTYPES)}"),
        (len(spec.axes) <= MOST_CHARACTERS, f"axes {spec.axes!r:.80}", "fewer"),
        (len(spec.axes.split()) <= MOST_AXES, f"axes {spec.axes!r:.80}", f"at most {MOST_AXES}"),
        (numbers <= MOST_NUMBERS, f"axes {spec.axes!r:.80}", f"{MOST_NUMBERS} numbers at most"),
    ):
        if not fits:
            raise Contradiction(f"a tensor has {actual}, expected {expected}")
