# SPDX-License-Identifier: Apache-2.0
"""What holds of every manifest, whatever it is of: its hashes, its names, its tensors."""

import math
import re
from collections.abc import Iterable, Sequence
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


def check_equal(path: Path, claims: Iterable[tuple[str, str, str]], again: str) -> None:
    """What a manifest says, held against what follows from it: found, expected, what it is.

    Raises: SaccadeError for the first that differs, ending with what to do.
    """
    for found, expected, what in claims:
        if found != expected:
            raise SaccadeError(f"{path}: {what} is {found!r}, expected {expected!r}. {again}")


def check_hashes(path: Path, digests: Iterable[str], again: str) -> None:
    """Raises: SaccadeError for the first that is no SHA-256, ending with what to do."""
    for digest in digests:
        if not _SHA256.fullmatch(digest):
            raise SaccadeError(f"{path}: {digest!r:.80} is not a SHA-256 in hexadecimal. {again}")


def check_tensors(
    path: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], again: str
) -> None:
    """Raises: SaccadeError for inputs or outputs that are none, ending with what to do."""
    if not inputs or not outputs:
        raise SaccadeError(f"{path}: inputs or outputs are empty. {again}")
    if (count := len(inputs) + len(outputs)) > MOST_TENSORS:
        raise SaccadeError(
            f"{path}: has {count} inputs and outputs, expected at most {MOST_TENSORS}. {again}"
        )
    for spec in (*inputs, *outputs):
        if not spec.axes.split() or not all(_AXIS.fullmatch(axis) for axis in spec.axes.split()):
            raise SaccadeError(
                f"{path}: axes {spec.axes!r:.80} of {spec.name!r:.80} are not words and numbers. "
                f"{again}"
            )
        _check_tensor(path, spec, again)


def _check_tensor(path: Path, spec: TensorSpec, again: str) -> None:
    numbers = math.prod(int(axis) for axis in spec.axes.split() if axis.isdecimal())
    for fits, found, expected in (
        (spec.name.isprintable(), f"name {spec.name!r:.80}", "no control characters"),
        (len(spec.name) <= MOST_CHARACTERS, f"name {spec.name!r:.80}", "a shorter one"),
        (spec.dtype in _DTYPES, f"type {spec.dtype!r:.80}", f"one of {', '.join(_DTYPES)}"),
        (len(spec.axes) <= MOST_CHARACTERS, f"axes {spec.axes!r:.80}", "fewer"),
        (len(spec.axes.split()) <= MOST_AXES, f"axes {spec.axes!r:.80}", f"at most {MOST_AXES}"),
        (numbers <= MOST_NUMBERS, f"axes {spec.axes!r:.80}", f"{MOST_NUMBERS} numbers at most"),
    ):
        if not fits:
            raise SaccadeError(f"{path}: a tensor has {found}, expected {expected}. {again}")
